"""The demo draft as converted models, made once a test session."""

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from draft_worker.coreml.conversion.build import convert
from protocol.contracts.conversion import Choices, WeightKind
from tests.support.paths import DEMO_DRAFT

DEMO = DEMO_DRAFT
CONTEXT = 512


@cache
def converted_demo(weights: WeightKind = "fp16") -> Path:
    """Its folder; with few slots, since the executor's time grows with them."""
    room = mkdtemp(prefix="converted-demo-")
    atexit.register(rmtree, room, ignore_errors=True)
    folder = Path(room) / weights
    convert(DEMO, folder, Choices(context=CONTEXT, weights=weights))
    return folder
