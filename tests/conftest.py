"""What several test modules share: what the target alone says, and shared memory that a test leaves to nobody."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.machine.drafts import draft_choice
from protocol.kv.segments import unlink_segment

# The settings of whoever runs the tests are none of theirs.
os.environ["LAUNCH_PIPELINE_CONFIG"] = os.devnull
# No test fetches the default target, nor do the processes that it starts.
os.environ["LAUNCH_PIPELINE_DEFAULT_TARGET"] = "demo"
if sys.platform == "darwin":
    # A background conversion in every pipeline of a test would slow all of them down; its own tests ask for it.
    os.environ["LAUNCH_PIPELINE_DRAFT_ENGINE"] = "mlx"
    draft_choice.neural_engine = lambda: None
# A slow machine fails no test: pytest-timeout ends one that hangs.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
Reference = Callable[[str | Sequence[int], SamplingParams], Result]


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """Target-only decoding with the demo target; every question is answered once."""
    known: dict[str, Result] = {}
    with Pipeline(strategy="ar") as pipeline:

        def ask(prompt: str | Sequence[int], params: SamplingParams) -> Result:
            key = repr((prompt, params))
            if key not in known:
                known[key] = pipeline.generate(prompt, params)
            return known[key]

        yield ask


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a registry of shared memory of the test's own; whatever the test leaves is unlinked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    for entry in tmp_path.glob("*-segments/lp-*"):
        unlink_segment(entry.name)
