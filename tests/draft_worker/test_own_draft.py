"""The documented example draft works and never changes a token."""

import sys

from orchestrator import Pipeline, SamplingParams
from tests.conftest import Reference
from tests.support.paths import ROOT

_EXAMPLE = ROOT / "docs" / "own_draft.py"


def test_the_example_draft_is_used_and_exact(reference: Reference):
    params = SamplingParams(max_tokens=48)

    with Pipeline(draft_command=(sys.executable, str(_EXAMPLE))) as pipeline:
        result = pipeline.generate("for i in range(3):\n    print(i)\n", params)

    assert result.tokens == reference("for i in range(3):\n    print(i)\n", params).tokens
    assert result.statistics.hit_rate
