"""Of each kind of drafter: a key of config.json that is read wrongly is found, and the right reading is left alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from draft_worker import drafter_examination
from draft_worker.drafter_examination import OwnText, checked, own_text
from draft_worker.engines import block, eagle3, mtp
from protocol.contracts.drafters.readings import other_readings
from protocol.messages.features import FINAL
from protocol.worker.process import WorkerSetup
from tests.support.models import drafter_files, eagle3_folders, mtp_folders, tiny_models
from tests.support.models.fitted_drafters import continued, features, guessed_text
from tests.support.models.trained_drafters import WIDTH, write_block_folder, write_target

LAYERS, OWN, BASE = 6, 48, 10.0


class Kind(NamedTuple):
    engine: Any
    write: Callable[[Path, Any], object]
    """Of a folder and its target's model."""
    sizes: dict[str, int]
    """Of the target."""


def _block(kind: str) -> Kind:
    sizes = {"hidden_size": WIDTH, "vocab_size": tiny_models.VOCABULARY, "num_hidden_layers": LAYERS}
    changes: dict[str, Any] = {"outputs": (1, 3), "target_layers": LAYERS}
    return Kind(block, lambda folder, target: write_block_folder(folder, kind, target, **changes), sizes)


def _rows(write: Callable[[Path], Path], engine: Any = eagle3, form: Any = drafter_files) -> Kind:
    sizes = {"hidden_size": form.WIDTH, "vocab_size": form.VOCABULARY, "num_hidden_layers": form.LAYERS}
    return Kind(engine, lambda folder, _: write(folder), sizes)


def _mtp(folder: Path) -> Path:
    folder.mkdir()
    config = json.loads((mtp_folders.write_mtp(folder, "glm4_moe") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": BASE}))
    return _reweighted(folder, lambda name, values: values * 4 if "self_attn" in name else values)


def _peagle(folder: Path) -> Path:
    return _reweighted(eagle3_folders.peagle(folder), lambda _, values: values - 0.3 if values.ndim == 2 else values)


def _reweighted(folder: Path, change: Callable[[str, mx.array], mx.array]) -> Path:
    """So that what a row reads decides what it guesses."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(changed := {name: change(name, values) for name, values in weights.items()})
    mx.save_safetensors(str(folder / "model.safetensors"), changed)
    return folder


KINDS = {
    **{name: _block(name) for name in ("z-lab", "vanilla", "DFlash2")},
    "SafeAILab": _rows(eagle3_folders.safe_ai_lab),
    "speculators": _rows(eagle3_folders.speculators),
    "DeepSpec": _rows(eagle3_folders.deep_spec),
    "P-EAGLE": _rows(_peagle, block),
    "MTP": _rows(_mtp, mtp, mtp_folders),
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Path, Path, OwnText]]:
    """A drafter and its target, and a text of which the drafter guesses every token."""
    monkeypatch.setattr(drafter_examination, "_OWN", OWN)

    def made(name: str) -> tuple[Path, Path, OwnText]:
        kind, folder, target = KINDS[name], tmp_path / "draft", tmp_path / "target"
        kind.write(folder, write_target(target, rope_theta=BASE, **kind.sizes))
        setup = WorkerSetup(address="", epoch=0, incarnation=0, engine="", model=str(folder), target=str(target))
        return folder, target, guessed_text(kind.engine.load(setup), kind.sizes, OWN)

    return made


def test_the_text_is_what_stock_mlx_lm_continues_with_its_states(tmp_path: Path):
    model = write_target(tmp_path, num_hidden_layers=3)

    tokens, states = own_text(tmp_path)

    prompt = len(tokens) - drafter_examination._OWN
    assert tokens == continued(model, tokens[:prompt], len(tokens))
    assert np.allclose(states.reshape(len(tokens), -1), features(model, tokens, (FINAL, 0, 1, 2)), atol=1e-3)


MISREAD = [
    *(("z-lab", key, other) for key, other in (("block_size", 8), ("mask_token_id", 64), ("rope_theta", BASE))),
    ("vanilla", "target_layer_ids", [0, 2]),
    ("DFlash2", "target_layer_ids", [2, 4]),
    ("SafeAILab", "eagle_aux_hidden_state_layer_ids", [1, 3, 6]),
    ("speculators", "eagle_aux_hidden_state_layer_ids", [1, 3, 4]),
    ("DeepSpec", "target_layer_ids", [2, 3, 4, 5, 6]),
    ("P-EAGLE", "eagle_aux_hidden_state_layer_ids", [3, 5, 6]),
    ("MTP", "rope_theta", 1e4),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "key", "other"), MISREAD)
def test_a_key_that_is_read_wrongly_is_named_with_both_values(
    name: str, key: str, other: object, folders: Callable[[str], tuple[Path, Path, OwnText]], tmp_path: Path
):
    folder, target, text = folders(name)
    engine = KINDS[name].engine.__name__.rpartition(".")[2]
    found = [*other_readings(folder, target, with_own_head=engine == "mtp")]
    reading = next(each for each in found if each.key.split(".")[-1] == key and each.other == other)
    wrong = Path(shutil.copytree(folder, tmp_path / "wrong"))
    (wrong / "config.json").write_text(json.dumps(reading.config))

    right, misread = (checked(engine, str(each), str(target), text) for each in (folder, wrong))

    assert (right.wrong, right.first) == (False, 1.0), right.guessed
    assert misread.wrong, misread.guessed
    assert misread.guessed.startswith(f"{reading.key} of the draft's config.json is probably wrong")
    assert f"as read ({other}) " in misread.guessed
    assert f"with {reading.read} " in misread.guessed
