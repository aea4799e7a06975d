"""The draft on a converted model, end to end: the target's tokens, and MLX's acceptance."""

from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.worker import Grow
from tests.conftest import Reference
from tests.support.models.coreml_programs import converted_demo
from tests.support.paths import DEMO_DRAFT
from tests.support.processes import of_worker, until

TEXTS = (
    "def quicksort(items):",
    "import os\nimport sys\n\n",
    "class Stack:\n    def push(self, item):\n",
    "for i in range(10):\n    print(",
)
CODEC = TextCodec(DEMO_DRAFT)


@pytest.mark.thorough
def test_requests_at_the_same_time_share_calls_and_get_the_targets_own_tokens(tmp_path: Path, reference: Reference):
    journal, params = tmp_path / "journal", SamplingParams(temperature=0.7, seed=2, max_tokens=60)
    own = [reference(text, params).tokens for text in TEXTS]
    with Pipeline(draft=str(converted_demo()), draft_engine="coreml", record=str(journal)) as pipeline:

        def shared() -> bool:
            assert [result.tokens for result in pipeline.generate(list(TEXTS), params)] == own
            return any(step.forward_nodes > 0 for step in of_worker(journal, Grow))

        # The target decodes alone until the draft is up.
        assert until(shared)


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
