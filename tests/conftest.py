"""What several test modules share: what the target alone says, from real processes."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from orchestrator import Pipeline, Result, SamplingParams

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
