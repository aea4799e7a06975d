"""Laws of a bench's line-up: the models, which pipelines there are, and under which names."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.bench.contender import contender_name, line_and_draft_tokens
from orchestrator.lab.bench.plan import BenchModels, BenchPlan, bench_models
from orchestrator.lab.bench.strategies import measure
from orchestrator.lab.bench.trials import entries
from orchestrator.lab.findings import Listener
from protocol.errors import InputError
from protocol.speculation.successors import SUCCESSORS
from tests.support.bench_measurements import bench_plan
from tests.support.models import drafter_files
from tests.support.models.tokenizer_files import with_other_tokenizer
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

PAIR = BenchModels(DEMO_TARGET, DEMO_DRAFT)
PARTS = ["without lookup", "lookup alone", "blind draft"]


def plan(strategies: str, **options) -> BenchPlan:
    return bench_plan(**({"strategies": strategies, "draft_tokens": "1,2,4"} | options))


def names(plan: BenchPlan) -> list[str]:
    return [contender_name(entry.line, count) for entry in entries(plan) for count in entry.draft_tokens]


@pytest.mark.parametrize(
    ("strategies", "options", "lines"),
    [
        ("ssd,adaptive,ar", {}, ["plain (ar)", "ssd K=1", "ssd K=2", "ssd K=4", "adaptive", *PARTS]),
        ("ssd", {"draft_tokens": "0"}, ["ssd"]),
        ("adaptive", {}, ["plain (ar)", "adaptive", *PARTS]),
        ("adaptive", {"pace": "m4-16gb-qwen2.5-3b"}, ["plain (ar)", "adaptive", "adaptive, one device", *PARTS]),
        ("ar", {}, ["plain (ar)"]),
    ],
)
def test_chains_are_measured_at_every_k_and_adaptive_beside_its_parts(strategies: str, options: dict, lines: list[str]):
    assert names(plan(strategies, **options)) == lines


def test_on_a_gpu_the_draft_in_turns_is_a_line_of_its_own():
    lines = [(entry.line, entry.placement) for entry in entries(plan("adaptive"), gpu=True)]

    assert lines[1:3] == [("adaptive", "auto"), ("adaptive, one device", "shared")]


def test_a_trained_drafter_takes_the_place_of_the_draft_by_the_engine_of_its_kind(tmp_path: Path):
    drafter = drafter_files.write(tmp_path / "eagle", drafter_files.specforge())
    models = PAIR._replace(draft=drafter, engine="eagle3")

    assert (models.trained, models.settings("adaptive").draft_engine) == (True, "eagle3")
    assert (PAIR.trained, PAIR.settings("adaptive").draft_engine) == (False, "mlx")
    lines = [entry.line for entry in entries(plan("ar,adaptive"), trained=True)]
    assert lines == ["plain (ar)", "adaptive", *PARTS[:2]], "no draft that guesses blindly costs as much"


def test_recorded_texts_hold_no_states_for_a_trained_drafter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BenchPlan, "models", lambda _: PAIR._replace(engine="eagle3"))

    with pytest.raises(InputError, match="leave out --replay"):
        measure(plan("ar", pace="m4-16gb-qwen2.5-3b", replay=True), [], Listener())


def test_the_parts_are_adaptive_with_one_thing_changed():
    without, lookup, blind = (entry.settings(PAIR) for entry in list(entries(plan("ar,adaptive")))[2:])

    assert [each.strategy for each in (without, lookup, blind)] == ["adaptive"] * 3
    assert (without.lookup, without.draft_engine) == ("off", "mlx")
    assert (lookup.draft_engine, blind.draft_engine) == ("ngram", "random")


@pytest.mark.filterwarnings("error::orchestrator.api.validation.IneffectiveOption")
def test_the_lookup_of_each_part_knows_the_table_of_the_draft(tmp_path: Path):
    draft = shutil.copytree(DEMO_DRAFT, tmp_path / "draft")
    (draft / SUCCESSORS).write_bytes(bytes(16))

    for entry in list(entries(plan("adaptive")))[1:]:
        assert Pipeline(settings=entry.settings(PAIR._replace(draft=draft))).successors is not None, entry.line


@pytest.mark.parametrize("count", [None, 1, 12])
def test_a_name_tells_its_line_and_its_k(count: int | None):
    for name in ("plain (ar)", "without lookup", "mlx-lm"):
        assert line_and_draft_tokens(contender_name(name, count)) == (name, count)


def test_another_target_without_a_draft_of_its_family_is_refused(tmp_path: Path):
    target = with_other_tokenizer(DEMO_TARGET, tmp_path / "target")

    with pytest.raises(InputError, match="There is no draft"):
        bench_models(str(target), None)


def test_a_draft_in_core_ml_is_a_line_of_its_own_if_it_is_asked_for():
    with_it = replace(plan("ar,adaptive"), core_ml_draft=True)
    (line,) = (entry for entry in entries(with_it) if entry not in list(entries(plan("ar,adaptive"))))

    settings = line.settings(PAIR)
    assert (line.line, settings.strategy, settings.draft_engine) == ("adaptive, Core ML draft", "adaptive", "coreml")
