"""Laws of a bench's resident models: all at once if they fit into the GPU's memory, else one line after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from orchestrator.lab.bench import trials
from orchestrator.lab.bench.contender import BenchRequest, Family, GenerationTask, TimedGeneration
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.trials import IN_TURNS, AwaitContenders, BenchLine, bench_lines, groups
from orchestrator.lab.findings import Listener
from orchestrator.machine.drafts.converted_draft import conversion_of
from protocol.contracts.coreml import FOLDER_FACTS, FOLDER_MODEL, Facts
from protocol.contracts.model_folder import ModelFolder
from tests.support.bench_measurements import bench_plan, generation
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

_GIB = 1 << 30


class Stage:
    """Lines of fake contenders, and a record of what was resident and what generated."""

    def __init__(self) -> None:
        self.resident: list[str] = []
        self.most = 0
        self.events: list[str] = []

    def line(self, name: str, gib: int, contenders: int = 1) -> BenchLine:
        @contextmanager
        def start() -> Iterator[AwaitContenders]:
            self.resident.append(name)
            self.events.append(f"+{name}")
            self.most = max(self.most, len(self.resident))
            yield lambda: [Fake(self, name, index) for index in range(contenders)]
            self.resident.remove(name)

        return BenchLine(gib * _GIB, start)


class Fake:
    family: Family = "ours"

    def __init__(self, stage: Stage, line: str, index: int) -> None:
        self.name = f"{line}{index}"
        self._stage, self._line = stage, line

    def generate(self, task: GenerationTask) -> TimedGeneration:
        assert self._line in self._stage.resident
        self._stage.events.append(self.name)
        return generation()


class Heard(Listener):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps = 0

    def total(self, total: int) -> None:
        self.steps = total

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def plan(strategies: str = "ar,adaptive") -> BenchPlan:
    one = {"draft_tokens": "1", "temperature": (0.0,), "repeats": 1}
    return bench_plan(target=str(DEMO_TARGET), draft=str(DEMO_DRAFT), strategies=strategies, **one)


def test_lines_that_fit_are_resident_together_and_the_others_one_by_one():
    a, b = (Stage().line(name, 4) for name in "ab")

    assert groups([a, b], working_set=10 * _GIB) == [[a, b]]
    assert groups([a, b], working_set=10 * _GIB - 1) == [[a], [b]]
    assert groups([a, b], working_set=0) == [[a, b]], "no limit is known"


@pytest.mark.parametrize(("working_set", "most", "notes"), [(0, 3, []), (64, 3, []), (11, 1, [IN_TURNS])])
def test_every_generation_is_measured_however_little_fits(
    working_set: int, most: int, notes: list[str], monkeypatch: pytest.MonkeyPatch
):
    stage = Stage()
    lines = [stage.line("a", 9), stage.line("b", 9, contenders=2), stage.line("absent", 9, contenders=0)]
    monkeypatch.setattr(trials, "bench_lines", lambda *_: lines)
    monkeypatch.setattr(trials, "gpu_working_set", lambda: working_set * _GIB)
    requests = [BenchRequest((1,), 0), BenchRequest((2,), 1)]
    watch = Heard()

    found, names = trials.run(plan(), requests, watch, lambda *_: None)

    assert (stage.most, watch.notes, names, watch.steps) == (most, notes, ["a0", "b0", "b1"], 6)
    assert {(one.contender, one.setting.prompt) for one in found} == {(name, n) for name in names for n in (0, 1)}
    assert len(found) == 6
    alone = stage.events.index("+b") > max(index for index, event in enumerate(stage.events) if event == "a0")
    assert alone == bool(notes)


def weights(plan: BenchPlan) -> list[int]:
    return [line.weights for line in bench_lines(plan, 1, lambda _: None, lambda *_: None)]


def test_a_line_counts_the_models_that_it_loads():
    target, draft = ModelFolder(DEMO_TARGET).size, ModelFolder(DEMO_DRAFT).size
    first, ar, adaptive, without, lookup, blind = weights(plan("adaptive"))

    assert (first, ar, lookup) == (target + draft, target, target)
    assert adaptive == without == blind == target + draft, "a random draft computes too"


def test_a_draft_in_core_ml_takes_memory_for_each_of_its_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = conversion_of(DEMO_DRAFT)
    (folder / FOLDER_MODEL / "Data").mkdir(parents=True)
    (folder / FOLDER_MODEL / "Data" / "weight.bin").write_bytes(bytes(1000))
    (folder / FOLDER_FACTS).write_bytes(msgspec.json.encode(Facts(source=str(DEMO_DRAFT), widths=(1, 8, 16))))
    for name, size in (("host.safetensors", 70), ("config.json", 2), ("tokenizer.json", 2)):
        (folder / name).write_bytes(bytes(size))

    found = weights(replace(plan("adaptive"), core_ml_draft=True))
    assert ModelFolder(DEMO_TARGET).size + 3 * 1000 + 70 in found
