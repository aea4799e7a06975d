"""The documented example draft works and never changes a token."""

import sys

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.lab.drill.processes import until
from tests.conftest import Reference
from tests.support.paths import ROOT

_EXAMPLE = ROOT / "docs" / "inside" / "own_draft.py"
_PROMPT = "for i in range(3):\n    print(i)\n"


def test_the_example_draft_is_used_and_exact(reference: Reference):
    params = SamplingParams(max_tokens=48)

    with Pipeline(draft_command=(sys.executable, str(_EXAMPLE)), lookup="off") as pipeline:
        # The target decodes alone until the draft is up, and on a busy machine a short text may be over before.
        result = until(lambda: _with_accepted_guesses(pipeline, params))

    assert result.tokens == reference(_PROMPT, params).tokens


def _with_accepted_guesses(pipeline: Pipeline, params: SamplingParams) -> Result | None:
    result = pipeline.generate(_PROMPT, params)
    return result if result.statistics.acceptance_rate else None
