"""Packs a trained draft into a small folder without its target's embedding, and makes it whole again.

    python -m orchestrator.tools.training.chat_draft.package pack --draft build/draft --out build/packed
    python -m orchestrator.tools.training.chat_draft.package join --packed build/packed --target build/target \
        --out build/draft-8bit

The embedding is the target's own, so everyone who has the target has it. `join` gives a folder that mlx-lm loads. Knows
no network. Needs safetensors.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GROUP, BITS = 32, 8
EMBEDDING = "model.embed_tokens."
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
HEAD_TOKENS = "head_tokens.npy"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--draft", type=Path, required=True)
    packing.set_defaults(run=lambda given: pack(given.draft, given.out))
    joining = commands.add_parser("join")
    joining.add_argument("--packed", type=Path, required=True)
    joining.add_argument("--target", type=Path, required=True)
    joining.set_defaults(run=lambda given: join(given.packed, given.target, given.out))
    for command in (packing, joining):
        command.add_argument("--out", type=Path, required=True)
    arguments = options.parse_args()
    arguments.run(arguments)


def pack(draft: Path, out: Path) -> None:
    """Write the draft's layers in 8 bits, its configuration and the tokens of its head."""
    out.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, weights in load_file(draft / "model.safetensors").items():
        if name.startswith(EMBEDDING):
            continue
        module = name.removesuffix(".weight")
        parts = quantised(weights.astype(np.float32)) if weights.ndim == 2 else {"weight": weights.astype(np.float16)}
        arrays |= {f"{module}.{part}": values for part, values in parts.items()}
    save_file(arrays, out / "layers.safetensors")
    shutil.copy(draft / HEAD_TOKENS, out)
    config = json.loads((draft / "config.json").read_text())
    config["quantization"] = {"group_size": GROUP, "bits": BITS}
    (out / "config.json").write_text(json.dumps(config, indent=1))


def join(packed: Path, target: Path, out: Path) -> None:
    """Write the packed draft with the target's embedding and tokenizer, as a model of its own."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((packed / "config.json").read_text())
    theirs = json.loads((target / "config.json").read_text())
    if (config["hidden_size"], config["vocab_size"]) != (theirs["hidden_size"], theirs["vocab_size"]):
        raise SystemExit(f"{packed} was trained for another target than {target}")
    embedding = {name: values for name, values in load_file(target / "model.safetensors").items() if EMBEDDING in name}
    if f"{EMBEDDING}scales" in embedding:
        theirs = theirs["quantization"]
        own = theirs.get(EMBEDDING.rstrip("."), theirs)
        config["quantization"][EMBEDDING.rstrip(".")] = {name: own[name] for name in ("group_size", "bits")}
    else:
        config["quantization"][EMBEDDING.rstrip(".")] = False
    arrays = load_file(packed / "layers.safetensors") | embedding
    save_file(arrays, out / "model.safetensors", {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copy(packed / HEAD_TOKENS, out)
    for name in TOKENIZER:
        shutil.copy(target / name, out)


def quantised(matrix: np.ndarray) -> dict[str, np.ndarray]:
    """MLX's affine quantisation: digits of 8 bits, four in an uint32, lowest first; weight = digit x scale + bias."""
    groups = matrix.reshape(len(matrix), -1, GROUP)
    lowest, highest = groups.min(-1), groups.max(-1)
    scales = (np.maximum(highest - lowest, 1e-6) / (2**BITS - 1)).astype(np.float16)
    biases = lowest.astype(np.float16)
    steps = (groups - biases[..., None].astype(np.float32)) / scales[..., None].astype(np.float32)
    digits = np.clip(np.rint(steps), 0, 2**BITS - 1).astype(np.uint8)
    return {"weight": digits.reshape(len(matrix), -1).view(np.uint32), "scales": scales, "biases": biases}


if __name__ == "__main__":
    main()
