"""Which servers are compared, over which models."""

from pathlib import Path

import mlx.core as mx

from orchestrator.tools.bench.servers.running import ROOT, Server

KEY = "a-key-for-comparing"
_PAIR = {"target": ROOT / "target_worker/demo_model", "draft": ROOT / "draft_worker/demo_model"}


class Contenders:
    """All over the demo pair in 32 bits, which `folder` is to hold: so our workers compute on a processor anyway, and
    in 16 bits the greedy text would depend on how many tokens a forward has."""

    def __init__(self, folder: Path) -> None:
        target, self.draft = (_in_32_bits(source, folder / name) for name, source in _PAIR.items())
        pair = ("--target", str(target), "--draft", str(self.draft))
        serve = ("-m", "orchestrator.cli.app", "serve", "--model-name", "demo", "--api-key", KEY, *pair)
        theirs = ("-m", "mlx_lm", "server", "--log-level", "WARNING", "--model", str(target))
        self.ours = Server("launch-pipeline serve", serve, KEY)
        self.ours_alone = Server("launch-pipeline serve --draft-engine none", (*serve, "--draft-engine", "none"), KEY)
        self.mlx_lm = Server("mlx_lm.server", theirs)
        self.mlx_lm_drafting = Server("mlx_lm.server --draft-model", (*theirs, "--draft-model", str(self.draft)))


def _in_32_bits(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text().replace('"float16"', '"float32"'))
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    wide = {name: weight.astype(mx.float32) for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})
    return folder
