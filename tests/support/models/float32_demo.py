"""The demo target in float32, for tests of exactness on Metal."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from orchestrator.machine import checkpoints
from tests.support.paths import DEMO_TARGET


def float32_demo(folder: Path) -> Path:
    """A copy of the demo target in `folder`, which must not exist, with the same weights in 32 bits."""
    shutil.copytree(DEMO_TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = mx.load(str(DEMO_TARGET / "model.safetensors"))
    assert isinstance(weights, dict)
    wide = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})
    return folder


@contextmanager
def default_target_in_float32(folder: Path) -> Iterator[None]:
    """Within the context, the demo target of pipelines that this process opens is a copy in 32 bits, in `folder`."""
    float32_demo(folder / "demo_model")
    with pytest.MonkeyPatch.context() as patch:
        of_role = checkpoints.worker_folder
        patch.setattr(checkpoints, "worker_folder", lambda role: folder if role == "target" else of_role(role))
        yield
