"""A target whose layers fold tokens into states, or that verifies less than trees, in real processes: its tokens are
those of plain decoding, whatever happens meanwhile."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from orchestrator import Pipeline, SamplingParams
from tests.support.models.architectures import configuration, tiny
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import mark, members, remains

PROMPT = tuple(range(2, 122))
PARAMS = SamplingParams(max_tokens=60)
HOT = SamplingParams(temperature=0.5, seed=5, max_tokens=60)
KINDS = {"qwen3_next": "tree", "lfm2": "tree", "rwkv7": "chain", "gpt2": "chain", "phi3small": "plain"}
OWN_VOCABULARY = {"phi3small"}
"""mlx-lm rules out tokens of a fixed number, and writes outside of the logits of a smaller vocabulary."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "qwen3_next" else pytest.mark.slow) for name in KINDS],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo target's tokenizer."""
    folder = tmp_path_factory.mktemp("recurrent") / request.param
    shutil.copytree(DEMO_TARGET, folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    changes = {} if request.param in OWN_VOCABULARY else {"vocab_size": vocabulary}
    weights = dict(tree_flatten(tiny(request.param, **changes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(configuration(request.param, **changes)))
    return folder


@pytest.fixture(scope="module")
def pipeline(target: Path) -> Iterator[Pipeline]:
    """The draft is the target, so that many guesses are right; the temperature makes some wrong."""
    with Pipeline(str(target), str(target)) as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


def alone(target: Path, params: SamplingParams, *texts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """By plain decoding, without any reuse."""
    with Pipeline(str(target), strategy="ar", prefix_cache_memory=0) as plain:
        return [tuple(plain.generate(text, params).tokens) for text in texts]


@pytest.mark.thorough
def test_its_level_is_told(pipeline: Pipeline, target: Path):
    assert pipeline.state().level == KINDS[target.name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("params", [PARAMS, HOT])
def test_tokens_are_those_of_plain_decoding(pipeline: Pipeline, target: Path, params: SamplingParams):
    result = pipeline.generate(PROMPT, params)

    assert [tuple(result.tokens)] == alone(target, params, PROMPT)


@pytest.mark.thorough
def test_right_guesses_are_taken(target: Path):
    """In turns, where the target waits for guesses: left to itself, a target this small needs none."""
    with Pipeline(str(target), str(target), strategy="sd") as pipeline:
        result = pipeline.generate(PROMPT, HOT)

    assert [tuple(result.tokens)] == alone(target, HOT, PROMPT)
    assert bool(result.statistics.acceptance_rate) == (KINDS[target.name] != "plain")


@pytest.mark.thorough
def test_a_foreign_draft_changes_nothing(target: Path):
    with Pipeline(str(target), str(DEMO_DRAFT)) as pipeline:
        assert [tuple(pipeline.generate(PROMPT, HOT).tokens)] == alone(target, HOT, PROMPT)


@pytest.mark.thorough
def test_a_killed_target_prefills_again(pipeline: Pipeline, target: Path):
    with pipeline.stream(PROMPT, HOT) as stream:
        for count, _ in enumerate(stream):
            if count == 1:
                os.kill(members(mark(pipeline))["target_worker"], signal.SIGKILL)
        assert stream.result is not None

    assert [tuple(stream.result.tokens)] == alone(target, HOT, PROMPT)


@pytest.mark.thorough
def test_another_turn_reuses_the_state_and_an_edited_prompt_does_not_disturb(pipeline: Pipeline, target: Path):
    first = pipeline.generate(PROMPT, HOT)
    turn, edited = (*PROMPT, *first.tokens, *range(40, 80)), (*PROMPT[:90], *range(60, 120))
    found = [pipeline.generate(text, HOT) for text in (turn, edited)]

    assert [tuple(each.tokens) for each in found] == alone(target, HOT, turn, edited)
    assert found[0].statistics.adopted_tokens >= len(PROMPT)


@pytest.mark.thorough
def test_four_requests_at_once(pipeline: Pipeline, target: Path):
    texts = [PROMPT[begin:] for begin in (0, 10, 20, 30)]
    found: dict[int, tuple[int, ...]] = {}

    def ask(index: int) -> None:
        found[index] = tuple(pipeline.generate(texts[index], HOT).tokens)

    threads = [Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [found[index] for index in range(4)] == alone(target, HOT, *texts)
