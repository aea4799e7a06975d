"""A target with another tokenizer than the demo draft's: it decodes alone and says why."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from orchestrator import InputError, Pipeline, Result, SamplingParams
from tests.support.models.tokenizer_files import with_other_tokenizer
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

PROMPT = "for i in range(3):\n    print(i)\nfor i in range(3):\n"
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=4)
NOTE = "There is no draft, since no shipped draft fits the target"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(with_other_tokenizer(DEMO_TARGET, tmp_path_factory.mktemp("foreign") / "target"))


@pytest.fixture(scope="module")
def alone(target: str) -> Iterator[Result]:
    """What the target says without a draft."""
    with Pipeline(target, strategy="ar") as pipeline:
        assert pipeline.note == ""
        yield pipeline.generate(PROMPT, PARAMS)


def generated(target: str, *options: str) -> tuple[int, str, str]:
    words = ("generate", PROMPT, "--target", target, "--max-tokens", "24", "--temperature", "0.8", "--seed", "4")
    command = [sys.executable, "-m", "orchestrator.cli.app", *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.thorough
def test_the_command_line_says_why_in_one_sentence(target: str, alone: Result):
    code, output, errors = generated(target, "--quiet")

    assert (code, output) == (0, alone.text + "\n")
    (line,) = errors.splitlines()
    assert line.startswith(NOTE)


def test_a_draft_that_was_asked_for_and_does_not_fit_is_an_error(target: str):
    with pytest.raises(
        InputError,
        match=r"another tokenizer than the target .* \(token \d+ is .* in the draft\).* Choose a draft of the same",
    ):
        Pipeline(target, str(DEMO_DRAFT)).start()


def test_drafts_of_other_machines_may_still_come(target: str):
    pipeline = Pipeline(target, listen="127.0.0.1:0")

    assert pipeline.note.startswith(NOTE)
    assert pipeline.strategy == "adaptive"
