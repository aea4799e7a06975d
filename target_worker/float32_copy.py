"""Writes a model again with every weight in float32: `python -m target_worker.float32_copy FOLDER COPY`.

The target then computes in 32 bits wherever it runs.
"""

import shutil
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import save_config, save_model

from protocol.inference.packed_weights import dequantized
from protocol.inference.stored_model import load_network


def main() -> int:
    copy_in_32_bits(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


def copy_in_32_bits(folder: Path, copy: Path) -> None:
    """Make `copy`, with the tokenizer of the model in `folder`."""
    network, config = load_network(folder)
    dequantized(network).set_dtype(mx.float32)
    save_model(copy, network)
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    save_config(config | {"dtype": "float32", "torch_dtype": "float32"}, copy / "config.json")
    for file in folder.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".model") and not (copy / file.name).exists():
            shutil.copyfile(file, copy / file.name)


if __name__ == "__main__":
    sys.exit(main())
