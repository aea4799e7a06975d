"""A draft process that reads the target's features through the real ring: it gets those of its own tokens, and whatever
dies, the text is that of the target alone. Real processes."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from tests.conftest import Reference
from tests.support.paths import DEMO_TARGET
from tests.support.processes import mark, members, remains, until

PROMPT = "for i in range(10):\n    print(i)\nfor i in range(10):\n    print("
PARAMS = SamplingParams(max_tokens=120)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "features"
    file.touch()
    return file


@pytest.fixture
def pipeline(log: Path) -> Iterator[Pipeline]:
    """With the draft up."""
    command = (sys.executable, "-m", "tests.support.feature_draft", str(log), str(DEMO_TARGET))
    with Pipeline(draft_command=command) as pipeline:
        name = mark(pipeline)
        until(lambda: fed(pipeline, log))
        yield pipeline
    until(lambda: not remains(name), seconds=2.0)


def fed(pipeline: Pipeline, log: Path) -> bool:
    pipeline.generate(PROMPT, SamplingParams(max_tokens=4))
    return log.stat().st_size > 0


def predictions(log: Path) -> list[tuple[int, int]]:
    """Index of each fed token, and the token that the target's head makes of its feature."""
    return [(int(index), int(token)) for index, token in map(str.split, log.read_text().splitlines())]


def only_right(log: Path, prompt: int, tokens: tuple[int, ...] | list[int]) -> set[int]:
    """The indices of the generated tokens' predictions, which must all be the target's own next tokens."""
    chosen = dict(enumerate(tokens, start=prompt))
    compared = {(index, token, chosen[index + 1]) for index, token in predictions(log) if index + 1 in chosen}
    assert {entry for entry in compared if entry[1] != entry[2]} == set()
    return {index for index, _, _ in compared}


@pytest.mark.thorough
def test_the_draft_is_fed_the_features_of_every_committed_token(pipeline: Pipeline, log: Path, reference: Reference):
    log.write_text("")
    result = pipeline.generate(PROMPT, PARAMS)
    prompt, tokens = result.statistics.prompt_tokens, result.tokens
    last = prompt + len(tokens) - 1
    right = only_right(log, prompt, tokens)

    assert tokens == reference(PROMPT, PARAMS).tokens
    # The last round's features may come behind the request's end.
    assert right >= set(range(prompt - 1, last - 20))
    assert result.statistics.hit_rate


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["target_worker", "feature_draft"])
def test_after_a_death_features_go_on_and_the_text_is_the_targets(
    pipeline: Pipeline, log: Path, reference: Reference, program: str
):
    params = SamplingParams(max_tokens=400)
    with pipeline.stream(PROMPT, params) as stream:
        for count, _ in enumerate(stream):
            if count == 5:
                pid = until(lambda: members(mark(pipeline)).get(program))
                os.kill(pid, signal.SIGKILL)
                log.write_text("")
        result = stream.result
    assert result is not None

    assert result.tokens == reference(PROMPT, params).tokens
    until(lambda: fed(pipeline, log))
    prompt = result.statistics.prompt_tokens
    assert only_right(log, prompt, result.tokens)
