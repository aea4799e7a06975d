"""Whatever the target, the draft, the engine and the fault: tokens are those of the target alone. Real processes."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.runtime.notices import Notice
from protocol.messages.base import Level
from protocol.messages.worker import Grow
from tests.conftest import HALF, Reference
from tests.support.chaotic_draft import MODES
from tests.support.models import drafter_files, eagle3_folders, mtp_folders
from tests.support.models.architectures import write_tiny
from tests.support.models.coreml_programs import converted_demo
from tests.support.models.tokenizer_files import with_added_token, with_other_tokenizer
from tests.support.models.trained_drafters import write_target
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET, ROOT
from tests.support.processes import generate_while, inject, mark, members, of_worker, remains, shoot, state, until

LOOP = "for i in range(3):\n    print(i)\nfor i in range(3):\n"
IDS, MANY_IDS = tuple(range(2, 38)), tuple(range(2, 152))
"""For models with random weights, and longer than their windows."""
LEVELS: dict[str, Level] = {
    "qwen3_next": "tree",
    "lfm2": "tree",
    "rwkv7": "chain",
    "gpt2": "chain",
    "phi3small": "plain",
}
"""Of random models. Each is its own draft, so that many guesses are right; the temperature makes some wrong."""
GREEDY, HOT = SamplingParams(max_tokens=48), SamplingParams(temperature=0.8, seed=4, max_tokens=48)


class Run(NamedTuple):
    """What was seen of a pipeline that answered."""

    results: Sequence[Result]
    level: Level
    journal: Path
    warnings: Sequence[str]

    def nothing(self) -> bool:
        """Nothing else is asked for."""
        return True

    def accepted(self) -> bool:
        return any(result.statistics.acceptance_rate for result in self.results)

    def drafted(self) -> bool:
        return any(result.statistics.draft_busy for result in self.results)

    def fed(self) -> bool:
        """The draft grew with the features of all tokens before its root."""
        return any(grow.tokens and grow.staleness == 0 for grow in of_worker(self.journal, Grow))

    def told_of_no_use(self) -> bool:
        """Once."""
        return sum("probably trained for another target" in warning for warning in self.warnings) == 1

    def level_of(self, name: str) -> bool:
        """Guesses are right and taken at the target's own level."""
        right = any(result.statistics.acceptance_rate for result in self.results)
        return self.level == LEVELS[name] and right == (self.level != "plain")

    def told_of_restart(self) -> bool:
        died, again, *_ = (*self.warnings, "", "")
        told = died.startswith("The target worker ended by signal 9.") and died.endswith("Starting it again.")
        return told and again == "The target worker runs again."

    def fell(self, level: Level) -> bool:
        """Level by level, to this one."""
        first, *_, last = (*self.warnings[:1], "", *self.warnings[-1:])
        cause = "cannot be broadcast), so it verifies less from now on (level chain)"
        return self.level == level and cause in first and f"(level {level})" in last


def killed(program: str, pipeline: Pipeline) -> None:
    shoot(pipeline, program)


def paused(program: str, pipeline: Pipeline) -> None:
    pid = shoot(pipeline, program, signal.SIGSTOP)
    until(lambda: state(pid).startswith("T"))
    os.kill(pid, signal.SIGCONT)


_HALVING = """
import mlx.core as mx
from protocol.inference import stored_model

def halved(network):
    network.set_dtype({kind})
    open({seen!r}, "w").close()

stored_model.ready_for_processor = halved
"""
_FAILING = """
import itertools
from protocol.inference.tree_sequence import TreeSequence

calls, evaluate = itertools.count(1), TreeSequence.evaluate

def failing(self, *arguments, **named):
    if {condition}:
        raise {error}
    return evaluate(self, *arguments, **named)

TreeSequence.evaluate = failing
"""
GIVES_UP = _FAILING.format(
    condition="next(calls) % 7 == 0",
    error='RuntimeError("[METAL] Command buffer execution failed: Impacting Interactivity '
    '(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).")',
)


def fails_at(*levels: Level) -> str:
    return _FAILING.format(
        condition=f"self.level in {levels} and self.committed > 20",
        error='ValueError("Shapes (3,4) and (4,4) cannot be broadcast.")',
    )


class Fault(NamedTuple):
    """Of a process: something that happens to it in the midst of an answer, or code that it runs at its start, which
    must not end it."""

    program: str
    happens: Callable[[str, Pipeline], None] | None = None
    code: str = ""


def windows(folder: Path) -> Path:
    """The demo target, half of whose layers see the last 24 tokens only."""
    shutil.copytree(DEMO_TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    windows = {"layer_types": kinds[: config["num_hidden_layers"]], "sliding_window": 24}
    (folder / "config.json").write_text(json.dumps(config | windows))
    return folder


def published(folder: Path) -> Path:
    """A target for the drafters of `drafter_files`."""
    sizes = {"hidden_size": drafter_files.WIDTH, "vocab_size": drafter_files.VOCABULARY}
    write_target(folder, num_hidden_layers=drafter_files.LAYERS, **sizes)
    return folder


def with_mtp(folder: Path) -> Path:
    """A target for the head of `mtp_folders`."""
    sizes = {"hidden_size": mtp_folders.WIDTH, "vocab_size": mtp_folders.VOCABULARY}
    write_target(folder, num_hidden_layers=mtp_folders.LAYERS, **sizes)
    return folder


def written_mtp(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {"draft": str(mtp_folders.write_mtp(folder, "qwen3_5"))}


TARGETS: dict[str, Callable[[Path], Path]] = {
    "demo": lambda folder: DEMO_TARGET,
    "other tokenizer": partial(with_other_tokenizer, DEMO_TARGET),
    "published": published,
    "with MTP": with_mtp,
    "windows": windows,
    **{name: partial(write_tiny, name=name) for name in LEVELS},
}
DRAFTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "itself": lambda folder: {},
    "demo": lambda folder: {"draft": str(DEMO_DRAFT), "draft_engine": "mlx"},
    "other tokenizer": lambda folder: {"draft": str(with_other_tokenizer(DEMO_DRAFT, folder))},
    "other added tokens": lambda folder: {"draft": str(with_added_token(DEMO_DRAFT, folder))},
    "lookup": lambda folder: {"draft_engine": "ngram"},
    "Core ML": lambda folder: {"draft": str(converted_demo()), "draft_engine": "coreml"},
    "DFlash2": lambda folder: {"draft": str(drafter_files.write(folder, drafter_files.dflash2()))},
    "P-EAGLE": lambda folder: {"draft": str(drafter_files.write(folder, drafter_files.speculators_peagle()))},
    "EAGLE-3": lambda folder: {"draft": str(eagle3_folders.safe_ai_lab(folder))},
    "DSpark": lambda folder: {"draft": str(drafter_files.write(folder, drafter_files.dspark()))},
    "MTP": written_mtp,
    "example": lambda folder: {"draft_command": (sys.executable, str(ROOT / "docs" / "inside" / "own_draft.py"))},
    **{
        mode: lambda folder, mode=mode: {"draft_command": (sys.executable, "-m", "tests.support.chaotic_draft", mode)}
        for mode in MODES
    },
}


class Case(NamedTuple):
    draft: str = "demo"
    options: Mapping[str, Any] = MappingProxyType({})
    seen: Callable[[Run], bool] = Run.nothing
    """What else comes about: perhaps later, for the target decodes alone until the draft is up."""
    fault: Fault | None = None
    target: str = "demo"
    prompt: str | tuple[int, ...] = LOOP
    kind: mx.Dtype = mx.float32
    """In which every process holds the networks that it loads."""


SD, SSD, NO_LOOKUP = {"strategy": "sd"}, {"strategy": "ssd"}, {"lookup": "off"}
FOUR_BITS = {"kv_bits": 4}
GATE = {
    "DFlash2, never right": Case(
        "DFlash2", SD, lambda run: run.fed() and run.told_of_no_use(), target="published", prompt=IDS
    ),
    "the documented example": Case("example", NO_LOOKUP, Run.accepted),
    "a draft that forges messages": Case("forger"),
    "a draft in disorder": Case("disorder"),
    "Core ML": Case("Core ML", seen=Run.drafted),
    "forwards that fail for trees and chains": Case(
        seen=lambda run: run.fell("plain"), fault=Fault("target_worker", code=fails_at("tree", "chain"))
    ),
    "a GPU that gives up the target's forwards": Case(fault=Fault("target_worker", code=GIVES_UP)),
    "windows, a killed target": Case(
        seen=Run.told_of_restart, fault=Fault("target_worker", killed), target="windows", prompt=MANY_IDS
    ),
}
THOROUGH = {
    **{f"a draft that is {mode}": Case(mode) for mode in MODES if mode not in ("forger", "disorder")},
    **{
        name: Case(name, seen=Run.fed, target="with MTP" if name == "MTP" else "published", prompt=IDS)
        for name in ("P-EAGLE", "EAGLE-3", "DSpark", "MTP")
    },
    "a killed target": Case(seen=Run.told_of_restart, fault=Fault("target_worker", killed)),
    "turns that a silent draft does not take": Case("silent", SD),
    "turns that a slow draft takes too late": Case("slow", SD),
    "neural guesses": Case(options=SSD | {"fallback": "neural"}, seen=Run.drafted),
    "fast guesses": Case(options=SSD | {"fallback": "fast", "draft_tokens": 3}, seen=Run.drafted),
    "no lookup": Case(options=NO_LOOKUP, seen=Run.drafted),
    "lookup alone": Case("lookup"),
    "another tokenizer": Case("other tokenizer", seen=Run.drafted, target="other tokenizer"),
    "other added tokens": Case("other added tokens", seen=Run.accepted),
    **{
        f"{name}, in turns": Case("itself", SD, partial(Run.level_of, name=name), target=name, prompt=MANY_IDS)
        for name in LEVELS
    },
    **{
        f"{name}, a killed target": Case(
            "itself", seen=Run.told_of_restart, fault=Fault("target_worker", killed), target=name, prompt=MANY_IDS
        )
        for name in ("qwen3_next", "rwkv7")
    },
    "windows, in turns": Case(options=SD, target="windows", prompt=MANY_IDS),
    "KV of 4 bits": Case(options=FOUR_BITS, target="demo", prompt=MANY_IDS),
    "KV of 4 bits, in turns": Case(options=SD | FOUR_BITS, prompt=MANY_IDS),
    "KV of 4 bits, a killed target": Case(
        options=FOUR_BITS, seen=Run.told_of_restart, fault=Fault("target_worker", killed), prompt=MANY_IDS
    ),
    "a prefill worker that quantizes": Case(
        options=FOUR_BITS | {"prefill_engine": "mlx", "prefill": "always"},
        seen=lambda run: bool(run.results[0].statistics.adopted_tokens),
        prompt=MANY_IDS,
    ),
    "a target that was stopped": Case(fault=Fault("target_worker", paused)),
    "forwards that fail for trees": Case(
        seen=lambda run: run.fell("chain"), fault=Fault("target_worker", code=fails_at("tree"))
    ),
    "a GPU that gives up the draft's forwards": Case(fault=Fault("draft_worker", code=GIVES_UP)),
}
SLOW = {
    **{f"{mode}, {strategy}": Case(mode, {"strategy": strategy}) for mode in MODES for strategy in ("sd", "ssd")},
    **{
        f"{name}, {strategy}": Case("itself", {"strategy": strategy}, target=name, prompt=MANY_IDS)
        for name in LEVELS
        for strategy in ("adaptive", "ssd")
    },
}
IN_HALF = {
    f"{name}, {kind}": case._replace(kind=kind)
    for (name, case), kind in zip((GATE | THOROUGH).items(), cycle(HALF), strict=False)
    # MLX's processor backend has the products of experts in float32 alone.
    if case.draft not in MODES and case.target != "qwen3_next" and not (case.fault and case.fault.code)
}
CASES = [
    *(pytest.param(case, id=name) for name, case in GATE.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.thorough) for name, case in (THOROUGH | IN_HALF).items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = TARGETS[name](tmp_path_factory.mktemp("target") / "model")
        return made[name]

    return folder


@pytest.fixture(scope="module")
def alone(reference: Reference, target: Callable[[str], Path]) -> Callable[[Case], list[Sequence[int]]]:
    """What the target says without a draft, at both temperatures."""
    said: dict[tuple[object, ...], list[Sequence[int]]] = {}

    def tokens(case: Case) -> list[Sequence[int]]:
        bits = case.options.get("kv_bits", 16)
        asked = case.target, case.prompt, bits, case.kind
        if asked == ("demo", case.prompt, 16, mx.float32):
            return [reference(case.prompt, params).tokens for params in (GREEDY, HOT)]
        if asked not in said:
            with Pipeline(str(target(case.target)), strategy="ar", kv_bits=bits) as plain:
                said[asked] = [plain.generate(case.prompt, params).tokens for params in (GREEDY, HOT)]
        # Otherwise the option did not reach the target.
        assert bits == 16 or said[asked] != tokens(case._replace(options={}))
        return said[asked]

    return tokens


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_targets_own(
    case: Case,
    target: Callable[[str], Path],
    alone: Callable[[Case], list[Sequence[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    seen_in_half = tmp_path / "half"
    if case.kind != mx.float32:
        kind = str(case.kind).replace("mlx.core", "mx")
        inject(monkeypatch, tmp_path, "-m", _HALVING.format(kind=kind, seen=str(seen_in_half)))
    expected, fault, journal = alone(case), case.fault or Fault(""), tmp_path / "journal"
    if fault.code:
        inject(monkeypatch, tmp_path, fault.program, fault.code)
    notices: list[Notice] = []
    own = {"draft": str(target(case.target))} if case.draft == "itself" else {}
    options = {**DRAFTS[case.draft](tmp_path / "draft"), **own, **case.options}
    with Pipeline(str(target(case.target)), record=str(journal), on_notice=notices.append, **options) as pipeline:
        name = mark(pipeline)
        process = until(lambda: members(name).get(fault.program)) if fault.program else 0
        happenings = [fault.happens] if fault.happens else []

        def happen() -> None:
            while happenings:
                happenings.pop()(fault.program, pipeline)

        def seen() -> bool:
            results = [pipeline.generate(case.prompt, GREEDY), generate_while(pipeline, case.prompt, HOT, 3, happen)]
            assert [result.tokens for result in results] == expected
            warnings = [notice.text for notice in notices if notice.kind == "warning"]
            return case.seen(Run(results, pipeline.state().level, journal, warnings))

        until(seen)
        assert not happenings
        assert not fault.code or members(name)[fault.program] == process
    assert remains(name) == []
    assert seen_in_half.exists() == (case.kind != mx.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("windows", 16),
        ("demo", 4),
        ("qwen3_next", 16),
        *(pytest.param(name, 16, marks=pytest.mark.slow) for name in LEVELS),
    ],
)
def test_turns_edits_and_company_change_no_token(target: Callable[[str], Path], name: str, bits: int):
    """The edit lies many windows before the end, so rows before the window are needed again."""
    folder = str(target(name))
    draft = str(DEMO_DRAFT) if name in ("windows", "demo") else folder
    with Pipeline(folder, draft, kv_bits=bits) as pipeline:
        first = pipeline.generate(MANY_IDS, HOT)
        texts = [(*MANY_IDS, *first.tokens, *range(40, 80)), (*MANY_IDS[:90], *range(60, 120))]
        turn, edited = (pipeline.generate(text, HOT) for text in texts)
        texts += [MANY_IDS[begin:] for begin in (0, 10, 20, 30)]
        together = pipeline.generate(texts[2:], HOT)
    with Pipeline(folder, strategy="ar", prefix_cache_memory=0, kv_bits=bits) as plain:
        expected = [plain.generate(text, HOT).tokens for text in texts]

    assert [result.tokens for result in (turn, edited, *together)] == expected
    assert turn.statistics.adopted_tokens >= len(MANY_IDS)
