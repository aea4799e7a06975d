"""Writes random weights for the config.json in a folder: `python -m tests.support.models.random_weights FOLDER`."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.inference.device import compute


def main() -> int:
    folder = Path(sys.argv[-1])
    config = json.loads((folder / "config.json").read_text())
    module: Any = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict(config))
    network.set_dtype(mx.float16)
    weights = dict(tree_flatten(network.parameters()))
    compute(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
