"""The draft on a converted model, end to end: the target's tokens, MLX's acceptance, and a life after death."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.text.tokenizer import TextCodec
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError
from protocol.kv.segments import SegmentError
from protocol.messages.worker import Grow, Prefilled
from protocol.paths import segments_folder
from tests.conftest import Reference
from tests.support.models.coreml_programs import DEMO_CONTEXT, converted_demo
from tests.support.paths import DEMO_DRAFT
from tests.support.processes import generate_while, mark, members, of_draft, remains, shoot, until

TEXTS = (
    "def quicksort(items):",
    "import os\nimport sys\n\n",
    "class Stack:\n    def push(self, item):\n",
    "for i in range(10):\n    print(",
)
CODEC = TextCodec(DEMO_DRAFT)


def shared_steps(journal: Path) -> int:
    """Growth steps that grew several requests' trees."""
    return sum(message.forward_nodes > 0 for message in of_draft(journal, Grow))


@pytest.mark.thorough
def test_requests_at_the_same_time_share_calls_and_get_the_targets_own_tokens(tmp_path: Path, reference: Reference):
    journal, params = tmp_path / "journal", SamplingParams(temperature=0.7, seed=2, max_tokens=60)
    own = [reference(text, params).tokens for text in TEXTS]
    with Pipeline(draft=str(converted_demo()), draft_engine="coreml", record=str(journal)) as pipeline:

        def shared() -> bool:
            assert [result.tokens for result in pipeline.generate(list(TEXTS), params)] == own
            return shared_steps(journal) > 0

        # The target decodes alone until the draft is up.
        assert until(shared)


# A life after death --------------------------------------------------------------------------------


def saved_by_the_draft(name: str) -> int:
    """The most tokens that an arena of this pipeline's draft holds: of as many slots as the converted model."""
    owner, most = members(name)["orchestrator"], 0
    for entry in segments_folder().glob("lp-*"):
        with suppress(ArenaError, SegmentError, OSError):
            arena = Arena.attach(entry.name)
            if json.loads(entry.read_bytes())["pid"] == owner and arena.layout.capacity == DEMO_CONTEXT:
                most = max(most, arena.committed)
    return most


@pytest.mark.thorough
def test_a_draft_that_is_killed_goes_on_without_reading_again(tmp_path: Path, reference: Reference):
    journal, prompt = tmp_path / "journal", tuple(CODEC.encode(Path(__file__).read_text()))[:200]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=120)
    with Pipeline(draft=str(converted_demo()), draft_engine="coreml", record=str(journal)) as pipeline:
        name = mark(pipeline)

        def resume() -> None:
            # The target waits, so that the request is not over before the next draft has resumed it.
            target = shoot(pipeline, "target_worker", signal.SIGSTOP)
            until(lambda: saved_by_the_draft(name) >= 199)
            shoot(pipeline, "draft_worker")
            until(lambda: of_draft(journal, Prefilled))
            os.kill(target, signal.SIGCONT)

        result = generate_while(pipeline, prompt, params, 0, resume)
    (resumed,) = of_draft(journal, Prefilled)

    assert result.tokens == reference(prompt, params).tokens
    assert resumed.warning == ""
    assert resumed.adopted >= 199
    assert remains(name) == []


# First use, and bad input --------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_model_is_converted_on_its_first_use_and_found_on_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    stages: list[str] = []
    params = SamplingParams(max_tokens=8)
    with Pipeline(draft_engine="coreml", on_progress=lambda progress: stages.append(progress.stage)) as pipeline:
        assert pipeline.generate(TEXTS[0], params).tokens == reference(TEXTS[0], params).tokens
    assert stages
    made = list(stages)
    again = Pipeline(draft_engine="coreml", on_progress=lambda progress: stages.append(progress.stage))

    assert stages == made
    assert again.note == ""
