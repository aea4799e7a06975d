"""Packs a trained draft into a small folder without its target's embedding, and makes it whole again.

    python -m orchestrator.lab.training.chat_draft.package pack --draft build/draft --out build/packed
    python -m orchestrator.lab.training.chat_draft.package join --packed build/packed --out build/draft-8bit

`pack` writes what draft_worker/default_draft holds. `join` gives the folder that the pipeline makes of it on first use.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from orchestrator.lab.training.chat_draft.target import add_target, target_folder
from orchestrator.machine.drafts.packed_draft import CONFIG, EMBEDDING, LAYERS, join
from protocol.contracts.head_tokens import HEAD_TOKENS

GROUP, BITS = 32, 8
SHARPENED = 1.2
"""Factor on the draft's logits, in the weights of its last norm: a draft is less sure than its target, and above
temperature 0 it is right more often with this factor (docs/log/2026.md)."""
_LAST_NORM = "model.norm"
CONTEXT = 512
"""Positions: of a longer conversation the draft sees the last 256 to 448 tokens. More of them do not change how often
it is right (docs/log/2026.md), and it must read them. The others are for the tree, which has a slot a row in Core ML.
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("--draft", type=Path, required=True)
    packing.set_defaults(run=lambda given: pack(given.draft, given.out))
    joining = commands.add_parser("join")
    joining.add_argument("--packed", type=Path, required=True)
    add_target(joining, "folder whose embedding and tokenizer the draft gets")
    joining.set_defaults(run=lambda given: join(given.packed, target_folder(given.target), given.out))
    for command in (packing, joining):
        command.add_argument("--out", type=Path, required=True)
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.run(arguments)


def pack(draft: Path, out: Path) -> None:
    """Fill the folder `out` with the draft's layers in 8 bits, its configuration and the tokens of its head."""
    arrays = {}
    for name, weights in load_file(draft / "model.safetensors").items():
        if name.startswith(f"{EMBEDDING}."):
            continue
        module = name.removesuffix(".weight")
        weights = weights * SHARPENED if module == _LAST_NORM else weights
        parts = quantised(weights.astype(np.float32)) if weights.ndim == 2 else {"weight": weights.astype(np.float16)}
        arrays |= {f"{module}.{part}": values for part, values in parts.items()}
    (out / LAYERS).write_bytes(save(arrays))
    shutil.copyfile(draft / HEAD_TOKENS, out / HEAD_TOKENS)
    config = json.loads((draft / CONFIG).read_text())
    config["max_position_embeddings"] = CONTEXT
    config["quantization"] = {"group_size": GROUP, "bits": BITS}
    (out / CONFIG).write_text(json.dumps(config, indent=1))


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
