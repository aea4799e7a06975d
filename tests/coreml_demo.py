"""The demo draft as converted models, made once a test session."""

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from draft_worker.coreml.build import convert
from protocol.conversion import Choices, WeightKind

DEMO = Path(__file__).parent.parent / "draft_worker" / "demo_model"
CONTEXT = 512


@cache
def converted_demo(weights: WeightKind = "fp16") -> Path:
    """Its folder; with few slots, since the executor's time grows with them."""
    room = mkdtemp(prefix="converted-demo-")
    atexit.register(rmtree, room, ignore_errors=True)
    folder = Path(room) / weights
    convert(DEMO, folder, Choices(context=CONTEXT, weights=weights))
    return folder
