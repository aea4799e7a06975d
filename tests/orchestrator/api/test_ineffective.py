"""Laws of options without effect: each is told in a sentence with its reason, and defaults are never told."""

import warnings
from collections.abc import Callable
from typing import Any

import click
import pytest

from orchestrator import Client, Pipeline, SamplingParams
from orchestrator.api.sampling import UNFILTERED
from orchestrator.api.settings import PipelineSettings
from orchestrator.api.submission import submits
from orchestrator.api.validation import IneffectiveOption, warn_ineffective
from orchestrator.cli.app import cli
from orchestrator.cli.configuration import commands
from orchestrator.cli.pipeline_options import Option, without_effect
from protocol.ineffective import declared
from protocol.ineffective import without_effect as sentence

REQUIRED = {"serve-workers": ("--listen", "127.0.0.1:0"), "plan": ()}
WITH_PIPELINE = (
    "generate",
    "chat",
    "serve",
    "serve-workers",
    "start",
    "profile",
    "bench",
    "doctor",
)


def told(*words: str, **facts: Any) -> list[str]:
    """The sentences for a command line."""
    known, arguments = cli.commands[words[0]], [*REQUIRED.get(words[0], ()), *words[1:]]
    while isinstance(known, click.Group):
        known = known.commands[arguments.pop(0)]
    with known.make_context(known.name, arguments):
        return without_effect(**facts)


CASES: list[tuple[str, dict[str, object], list[str]]] = [
    ("generate x --address ipc:///a --strategy sd --pace p", {}, ["--strategy", "--pace"]),
    ("generate x --address ipc:///a --target t --pair qwen2.5-3b", {}, ["--target", "--pair"]),
    ("chat --address ipc:///a --target t --draft d", {}, ["--draft"]),
    (
        "serve --address ipc:///a --target t --pair qwen2.5-3b --listen localhost:0 --draft-tokens 3 --top-p 1",
        {},
        ["--pair", "--listen", "--draft-tokens"],
    ),
    ("serve --address ipc:///a --pair qwen2.5-3b", {}, []),
    ("start --address tcp://127.0.0.1:5570 --target t --draft d", {}, []),
    ("serve --keep 5 --models-memory 8", {"several": False}, ["--keep", "--models-memory"]),
    ("serve --keep 5 --models-memory 8", {"several": True}, []),
    ("serve --keep 5 --embedding-model m", {"several": False}, []),
    ("generate x --pair qwen2.5-3b --target t --draft d", {}, ["--pair"]),
    (
        "serve --preset balanced --temperature 1 --top-p 1 --top-k 0 --min-p 0 --repetition-penalty 1",
        {},
        ["--preset"],
    ),
    ("generate x --json --quiet", {}, ["--quiet"]),
    ("chat --no-history", {"terminal": False}, ["--no-history"]),
    ("chat --no-history", {"terminal": True}, []),
    (
        "start --strategy ar --draft d --draft-engine mlx --draft-tokens 3",
        {},
        ["--draft", "--draft-engine", "--draft-tokens"],
    ),
    ("serve --draft-engine none --draft-tokens 4 --strategy ssd", {}, ["--draft-tokens", "--strategy"]),
    ("serve-workers --draft-engine none --draft-tokens 4 --strategy ssd", {}, []),
    ("serve-workers --draft-engine none --draft d", {}, ["--draft"]),
    ("start --draft-engine ngram --draft d", {}, ["--draft"]),
    ("start --draft-tokens 3", {}, ["--draft-tokens"]),
    ("start --strategy sd --draft-tokens 3", {}, []),
    ("profile --concurrent 3", {}, ["--concurrent"]),
    ("start --concurrent 3", {}, []),
    ("start --arena-memory 0 --prefix-cache-memory 3", {}, ["--prefix-cache-memory"]),
    ("generate x --prefix-cache-memory 3", {}, ["--prefix-cache-memory"]),
    ("generate x --top-p 0.5 --top-k 3 --min-p 0.1 --seed 1 --temperature 0", {},
     ["--top-p", "--top-k", "--min-p", "--seed"]),
    ("generate x --top-p 0.5 --top-k 3 --min-p 0.1 --seed 1 --temperature 0.5", {}, []),
    ("chat --seed 1 --top-p 0.5", {}, []),
    ("serve --temperature 0 --top-p 0.5", {}, []),
    ("profile --seed 1 --temperature 0", {}, ["--seed"]),
    ("profile --seed 1 --temperature 0 --temperature 1", {}, []),
    ("doctor --target t --draft d", {}, []),
    ("doctor --target t --neural-engine --draft d", {}, ["--target"]),
    ("bench --replay", {}, ["--replay"]),
    ("bench --replay --pace p", {}, []),
    ("attach draft HOST:1 --kv-bits 8 --target t", {}, ["--kv-bits", "--target"]),
    ("attach draft HOST:1 --draft d --target t", {}, []),
    ("attach target HOST:1 --kv-bits 8 --draft d --draft-engine mlx", {}, ["--draft", "--draft-engine"]),
    ("attach prefill HOST:1 --kv-bits 8 --target t --draft d", {}, ["--draft"]),
    ("attach prefill HOST:1 --prefix-cache-memory 3", {}, ["--prefix-cache-memory"]),
    ("attach draft HOST:1 --prefix-cache-memory 3", {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("line", "facts", "expected"), CASES, ids=[line for line, *_ in CASES])
def test_an_option_that_changes_nothing_is_told_with_its_reason(
    line: str, facts: dict[str, object], expected: list[str]
):
    sentences = told(*line.split(), **facts)

    assert sorted(sentence.partition(" has no effect: ")[0] for sentence in sentences) == sorted(expected)
    assert all(sentence.endswith(".") for sentence in sentences)


@pytest.mark.parametrize("command", WITH_PIPELINE)
def test_nothing_is_told_of_a_command_without_options(command: str):
    assert told(*command.split(), terminal=False) == []


def test_settings_of_the_environment_are_for_many_commands_and_none_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAUNCH_PIPELINE_DRAFT_TOKENS", "3")

    assert told("start") == []


def warned(**keywords: object) -> list[str]:
    """What the Python API warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_ineffective(PipelineSettings().changed(**keywords))
    assert all(one.category is IneffectiveOption for one in found)
    return [str(one.message) for one in found]


def test_python_is_warned_by_keyword_and_never_of_defaults():
    assert warned() == []
    assert warned(draft_tokens=3) == ["draft_tokens has no effect: only the strategies sd and ssd use it."]
    assert warned(strategy="ar", draft="d") == ["draft has no effect: the strategy ar uses no draft."]
    assert warned(strategy="ssd", draft_tokens=3) == []


def test_what_is_not_known_proves_nothing():
    options = [option for _, command in commands(cli) for option in command.params if isinstance(option, Option)]
    declarations = [*declared(PipelineSettings).values(), *(option.ineffective for option in options)]

    assert any(declarations)
    assert not any(sentence("it", each, {"flags": set()}) for each in declarations)


def sampled(**params: Any) -> None:
    Client("tcp://127.0.0.1:9").stream("x", SamplingParams(**params)).close()


@pytest.mark.parametrize(
    ("asks", "name"),
    [
        (lambda: Pipeline(draft_tokens=3), "draft_tokens"),
        (lambda: sampled(top_p=0.5, temperature=0), "top_p"),
        (lambda: sampled(seed=1, temperature=0), "seed"),
        (lambda: sampled(repetition_context=5, temperature=1), "repetition_context"),
        (lambda: submits(["x", "y"], SamplingParams(top_p=0.5, temperature=0)), "top_p"),
    ],
)
def test_a_warning_names_the_line_that_asked(asks: Callable[[], object], name: str):
    with pytest.warns(IneffectiveOption, match=f"{name} has no effect: ") as found:
        asks()

    assert [one.filename for one in found] == [__file__]


def test_sampling_that_a_request_uses_causes_no_warning():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for params in (
            None,
            SamplingParams(top_p=0.5, seed=1, temperature=0.5),
            SamplingParams(max_tokens=3, stop="x"),
            SamplingParams(temperature=0, **UNFILTERED),
            # The model's own temperature is not known here.
            SamplingParams(top_p=0.5, seed=1),
        ):
            Client("tcp://127.0.0.1:9").stream("x", params).close()

    assert found == []
