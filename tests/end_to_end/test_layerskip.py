"""A target's first layers as its draft, with real processes: exact tokens, KV from the target, a killed draft."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator import Pipeline, SamplingParams
from protocol.messages.worker import Prefilled
from tests.conftest import Reference
from tests.support.journals import of_draft
from tests.support.paths import DEMO_TARGET
from tests.support.processes import generate_while, mark, remains, shoot

TEXT = "def quicksort(items):\n    return [item for item in items if item < items[0]]\n\n" * 10
PARAMS = SamplingParams(max_tokens=24)


def adopted(journal: Path) -> list[int]:
    """Tokens whose KV the draft took from the target, by Start."""
    return [message.adopted for message in of_draft(journal, Prefilled)]


# Many rounds, in one of which the draft is there in time however busy the machine is.
@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"lookup": "off"}, {"strategy": "sd"}], ids=["adaptive", "sd"])
def test_tokens_are_the_target_s_own_and_the_draft_reads_no_long_prompt(
    options: dict[str, Any], reference: Reference, tmp_path: Path
):
    journal = tmp_path / "journal"
    params = [replace(PARAMS, max_tokens=120), replace(PARAMS, max_tokens=120, temperature=1.0, seed=4)]
    with Pipeline(target=str(DEMO_TARGET), draft="exit:3", record=str(journal), **options) as pipeline:
        name = mark(pipeline)
        results = [pipeline.generate(TEXT, each) for each in params]

    assert [result.tokens for result in results] == [reference(TEXT, each).tokens for each in params]
    assert remains(name) == []
    assert adopted(journal)
    assert all(tokens >= 32 for tokens in adopted(journal))


@pytest.mark.thorough
def test_a_killed_draft_adopts_the_target_s_kv_again(reference: Reference, tmp_path: Path):
    journal = tmp_path / "journal"
    params = replace(PARAMS, max_tokens=160, temperature=0.7, seed=3)
    with Pipeline(target=str(DEMO_TARGET), draft="exit:3", record=str(journal)) as pipeline:
        name = mark(pipeline)
        result = generate_while(pipeline, TEXT, params, 6, lambda: shoot(pipeline, "draft_worker"))
        again = pipeline.generate(TEXT, params)

    assert result.tokens == again.tokens == reference(TEXT, params).tokens
    assert remains(name) == []
    assert len(adopted(journal)) >= 2
