"""Laws of the bench: figures follow from the measurements, and a contender with a wrong token has no figure."""

import json
from pathlib import Path
from shutil import copytree
from time import perf_counter

import mlx.core as mx
import pytest
from click.testing import CliRunner
from mlx_lm.models.cache import BatchKVCache

from orchestrator import Pipeline, SamplingParams
from orchestrator.cli.app import cli
from orchestrator.lab import report
from orchestrator.lab.bench import trials
from orchestrator.lab.bench.contender import Family, GenerationTask, TimedGeneration
from orchestrator.lab.bench.figures import best_speculative, rows
from orchestrator.lab.bench.measurement import BenchRequest, Measurement, Setting, deviating, schedule, settings
from orchestrator.lab.bench.mlx_lm import rounds_of
from orchestrator.lab.bench.mlx_lm_process import PacedDevice
from orchestrator.lab.bench.plan import BenchPlan
from orchestrator.lab.bench.prompts import BenchPrompt, read_prompts
from orchestrator.lab.bench.strategies import findings
from orchestrator.lab.bench.trials import baseline_cores, encoded, measured, requests_of
from orchestrator.lab.report import picture
from orchestrator.text.chat_template import chat_prompt
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError
from protocol.messages.client import Pace
from protocol.worker.pacing import DevicePace
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.shown import complaints, shown

_ORDER = ["mlx-lm", "mlx-lm K=1", "mlx-lm K=2", "ar", "adaptive"]


class _Contender:
    """Returns the given tokens at a fixed speed, and records its tasks; `log` gets its name at every generation."""

    def __init__(
        self, name: str, family: Family = "coupled", tokens: tuple[int, ...] = (1, 2), log: list | None = None
    ):
        self.name = name
        self.family: Family = family
        self.tasks: list[GenerationTask] = []
        self._tokens = tokens
        self._log = log

    def generate(self, task: GenerationTask) -> TimedGeneration:
        self.tasks.append(task)
        if self._log is not None:
            self._log.append(self.name)
        return TimedGeneration(tokens=self._tokens, tokens_per_second=10.0, tokens_per_round=1.0)


def _plan(**changes) -> BenchPlan:
    words = {"draft_tokens": "1-2", "strategies": "ar,adaptive", "temperature": ()}
    others = {"target": None, "draft": None, "repeats": 2, "max_tokens": 8, "controls": False}
    return BenchPlan.of(**(words | others | changes))


def _measurement(contender: str, speed: float, setting: Setting, tokens: tuple[int, ...] = (1, 2), **figures):
    family: Family = "mlx-lm" if contender.startswith("mlx-lm") else "coupled"
    generation = TimedGeneration(tokens=tokens, tokens_per_second=speed, tokens_per_round=1.0, **figures)
    return Measurement(setting, contender, family, generation)


def _requests(*tokens: tuple[int, ...], categories: tuple[str, ...] = ()) -> list[BenchRequest]:
    """A prompt of one turn for each."""
    named = categories or ("",) * len(tokens)
    return [
        BenchRequest(each, prompt, category=category)
        for prompt, (each, category) in enumerate(zip(tokens, named, strict=True))
    ]


def _at(prompt: int, temperature: float = 0.0) -> Setting:
    return Setting(repeat=0, prompt=prompt, temperature=temperature)


def test_contenders_take_turns_within_each_setting_and_begin_in_turn():
    order = list(settings(2, _requests((1,), (2,), (3,)), (0.0, 1.0)))

    turns = list(schedule("abc", order))

    assert len(order) == 12
    assert [setting for setting, _ in turns] == [setting for setting in order for _ in "abc"]
    assert "".join(contender for _, contender in turns[:12]) == "abcbcacababc"


def test_all_contenders_get_the_same_task_in_a_setting():
    contenders = [_Contender("mlx-lm", "mlx-lm"), _Contender("ar")]

    measured(contenders, _requests((5, 6), (7, 8)), _plan(), lambda _: None)

    assert sorted(contenders[0].tasks) == sorted(contenders[1].tasks)


def test_sampled_generations_of_other_prompts_and_repeats_use_other_seeds():
    one = _Contender("ar")

    measured([one], _requests((5, 6), (7, 8)), _plan(temperature=(1.0,)), lambda _: None)

    warm_up, *tasks = one.tasks
    assert warm_up.max_tokens == 8
    assert len({task.seed for task in tasks}) == len(tasks) == 4


def test_every_contender_warms_up_before_the_first_measurement():
    log: list[str] = []
    progress: list[str] = []
    contenders = [_Contender(name, log=log) for name in ("ar", "sd")]

    found = measured(contenders, _requests((5, 6)), _plan(temperature=(0.0,), repeats=1), progress.append)

    assert log == ["ar", "sd", "ar", "sd"]
    assert progress == ["ar", "sd"]
    assert len(found) == 2


def test_ratios_are_medians_over_pairs_and_not_ratios_of_medians():
    plain = [_measurement("mlx-lm", speed, _at(prompt)) for prompt, speed in enumerate([10.0, 100.0, 30.0])]
    ours = [_measurement("ar", speed, _at(prompt)) for prompt, speed in enumerate([20.0, 50.0, 90.0])]

    row = rows([*plain, *ours], ["mlx-lm", "ar"])[1]

    assert row.over_plain == 2.0
    assert row.over_autoregressive == 1.0
    assert row.over_speculative is None


def test_the_best_speculative_baseline_has_the_highest_median_not_the_fastest_generation():
    found = [_measurement("mlx-lm", 99.0, _at(0))]
    found += [_measurement("mlx-lm K=1", speed, _at(prompt)) for prompt, speed in enumerate([20.0, 21.0, 22.0])]
    found += [_measurement("mlx-lm K=2", speed, _at(prompt)) for prompt, speed in enumerate([10.0, 12.0, 90.0])]

    assert best_speculative(found) == "mlx-lm K=1"


def test_the_best_speculative_baseline_is_chosen_at_each_temperature():
    found = []
    for temperature, speeds in ((0.0, (10.0, 20.0)), (1.0, (20.0, 10.0))):
        for count, speed in enumerate(speeds, start=1):
            found.append(_measurement(f"mlx-lm K={count}", speed, _at(0, temperature)))
        found.append(_measurement("adaptive", 40.0, _at(0, temperature)))

    adaptive = [row for row in rows(found, ["mlx-lm K=1", "mlx-lm K=2", "adaptive"]) if row.contender == "adaptive"]

    assert [row.over_speculative for row in adaptive] == [2.0, 2.0]


def test_mlx_lm_runs_on_all_cores_and_on_the_targets(monkeypatch: pytest.MonkeyPatch):
    def cores(target: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        monkeypatch.setattr(trials, "usable_cores", lambda: (0, 1, 2, 3))
        monkeypatch.setattr(trials, "usual_cores", lambda: {"target": target} if target else {})
        return baseline_cores(once=False)

    assert cores((0, 1, 2)) == {"mlx-lm": (0, 1, 2, 3), "mlx-lm, target's cores": (0, 1, 2)}
    assert [*cores(())] == [*cores((0, 1, 2, 3))] == [*baseline_cores(once=True)] == ["mlx-lm"]


@pytest.mark.parametrize("tokens", [(1, 3), (1,)], ids=["wrong", "missing"])
@pytest.mark.parametrize("wrong", _ORDER[1:])
def test_a_token_that_is_wrong_or_missing_at_temperature_0_is_found_in_every_contender(wrong: str, tokens: tuple):
    found = [_measurement(name, 1.0, _at(0), tokens if name == wrong else (1, 2)) for name in _ORDER]

    assert [each.wrong.contender for each in deviating(found, _ORDER)] == [wrong]


@pytest.mark.parametrize("other", [_at(1), Setting(0, 0, 0.0, turn=1)], ids=["prompt", "turn"])
def test_tokens_of_another_prompt_or_turn_are_never_compared(other: Setting):
    assert deviating([_measurement("ar", 1.0, _at(0)), _measurement("ar", 1.0, other, (3, 4))], _ORDER) == []


def test_sampled_tokens_are_compared_among_ours_only():
    tokens = {"mlx-lm": (7, 7), "mlx-lm K=1": (8, 8), "ar": (1, 2), "adaptive": (1, 3)}
    found = [_measurement(name, 1.0, _at(0, 1.0), generated) for name, generated in tokens.items()]

    assert [each.wrong.contender for each in deviating(found, _ORDER)] == ["adaptive"]
    assert [row.checked for row in rows(found, list(tokens))] == [0, 0, 1, 1]


def _paced(contender: str, overruns: int, prompt: int) -> Measurement:
    pace = Pace(profile="m4", forwards=100, overruns=overruns, stretch=overruns / 1000, valid=overruns <= 1)
    return _measurement(contender, 10.0, _at(prompt), pace=pace)


def test_overruns_are_counted_over_all_forwards_of_a_contender():
    found = [_paced("ar", overruns, prompt) for prompt, overruns in enumerate([0, 0, 3])]
    found += [_paced("adaptive", overruns, prompt) for prompt, overruns in enumerate([1, 1, 2])]

    ar, adaptive = rows(found, ["ar", "adaptive"])

    assert (ar.overruns, ar.representative) == (pytest.approx(0.01), True)
    assert (adaptive.overruns, adaptive.representative, adaptive.stretch) == (pytest.approx(4 / 300), False, 0.001)


def test_a_run_that_overran_is_reported_as_invalid():
    figures = rows([_paced("ar", 2, 0), _measurement("adaptive", 1.0, _at(0))], ["ar", "adaptive"])

    found = findings(figures, _plan(), prompts=1)

    (sentence,) = complaints(found, "warn")
    assert sentence.startswith("ar at temperature 0: invalid: 2.0% of its forwards took longer")
    assert found.figures["representative"] is False


def test_a_paced_device_runs_forwards_in_turns_and_delays_each_until_its_result_is_needed():
    device = PacedDevice()
    pace = DevicePace(steps=((1, 0.004), (3, 0.008)), prefill_rate=1.0)
    target, draft = (device.network(lambda tokens: tokens * 2, pace) for _ in range(2))

    began = perf_counter()
    first = target(mx.array([[1]]))
    second = draft(mx.array([[1, 2, 3]]))
    after_second = perf_counter() - began
    device.settle()
    device.settle()
    after_all = perf_counter() - began

    assert (first.tolist(), second.tolist()) == ([[2]], [[2, 4, 6]])
    assert after_second >= 0.004
    assert after_all >= 0.012
    paced = device.take()
    assert (paced.forwards, paced.seconds) == (2, pytest.approx(0.012))


def test_a_paced_batch_reads_as_much_as_its_longest_row():
    device = PacedDevice()
    pace = DevicePace(steps=((1, 0.004),), prefill_rate=1.0, context_seconds=0.0001)
    network = device.network(lambda tokens, cache: tokens, pace)
    batch = BatchKVCache([0, 0])
    batch.offset = mx.array([3, 20])

    network(mx.array([[1], [2]]), cache=[batch])
    device.settle()

    assert device.take().seconds == pytest.approx(0.006)


def test_a_wrong_contender_is_shown_without_a_speed():
    found = [_measurement("mlx-lm", 123.0, _at(0), (1, 2)), _measurement("ar", 456.0, _at(0), (1, 3))]
    told = findings(rows(found, ["mlx-lm", "ar"]), _plan(), prompts=1)

    text = shown(told, width=100)
    assert "123.0" in text
    assert "456" not in text
    assert "WRONG" in text
    assert complaints(told) == ["ar at temperature 0: 1 of 1 generations differ from the reference"]
    assert told.figures["exact"] is False


def test_the_legend_explains_what_is_shown_alone():
    names = ["mlx-lm", "lookup"]
    text = shown(findings(rows([_measurement(name, 10.0, _at(0)) for name in names], names), _plan(), prompts=1))

    assert "lookup: adaptive with the n-gram draft" in text
    assert not any(words in text for words in ("random draft:", "rej:", "overran:", "busy:", "differ only in K"))


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [((0, 1), (0, 1), "2 cores, which target and draft share"), ((0,), (1,), "of the draft 1")],
)
def test_cores_that_both_use_are_said_to_be_shared(
    target: tuple[int, ...], draft: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report, "usual_cores", lambda: {"target": target, "draft": draft})

    assert said in " ".join(report.machine_lines())


@pytest.mark.parametrize(
    ("drafted", "draft_tokens", "rounds", "verified"),
    [
        ([True, True, False, False, True, False, True, True], 2, 4, 2 + 1 + 2 + 2),
        ([True, True, False, True], 2, 2, 3),
        ([False, False], 4, 2, 2),
        ([False] * 5, 0, 5, 0),
    ],
    ids=["all, none, one, cut off", "fewer may follow", "none", "plain"],
)
def test_rounds_and_verified_drafts_follow_from_the_accepted_ones(drafted, draft_tokens, rounds, verified):
    assert rounds_of(drafted, draft_tokens, max_tokens=len(drafted)) == (rounds, verified)


@pytest.mark.parametrize(
    ("words", "counts"), [("1-3", (1, 2, 3)), ("4", (4,)), ("1,2,4", (1, 2, 4)), ("0", ()), ("2-3,3-4", (2, 3, 4))]
)
def test_draft_tokens_are_numbers_and_ranges(words: str, counts: tuple[int, ...]):
    assert _plan(draft_tokens=words).draft_tokens == counts


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_tokens": "many"},
        {"draft_tokens": "3-1"},
        {"draft_tokens": "-1"},
        {"draft_tokens": "1-999"},
        {"strategies": "ar,magic"},
        {"strategies": ""},
        {"temperature": (-1.0,)},
        {"temperature": (float("nan"),)},
    ],
)
def test_an_impossible_plan_is_refused_with_a_sentence(changes: dict):
    with pytest.raises(InputError, match=r"\w+ .*[:.] ?\w*"):
        _plan(**changes)


def test_prompts_come_from_a_file_of_json_lines(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "id": 1}\n\n{"prompt": "b"}\n{"prompt": "c"}\n')

    assert read_prompts(path, limit=2) == [BenchPrompt("a"), BenchPrompt("b")]


def test_a_limit_takes_prompts_evenly_over_the_categories(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    lines = [("a", "chat"), ("b", "chat"), ("c", "chat"), ("d", "code"), ("e", "maths"), ("f", "maths")]
    path.write_text("\n".join(json.dumps({"prompt": text, "category": category}) for text, category in lines))

    assert [prompt.text for prompt in read_prompts(path, limit=5)] == ["a", "d", "e", "b", "f"]
    assert "".join(prompt.text for prompt in read_prompts(path, limit=None)) == "adebfc"


def test_a_conversation_has_all_turns_of_its_user(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["Hello", "And then?"], "category": "chat"}')

    assert read_prompts(path, limit=None) == [BenchPrompt("Hello", "chat", chat=True, later=("And then?",))]


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "a"}\nno json\n',
        '{"prompt": "a"}\n{"text": "b"}\n',
        '{"prompt": "a"}\n{"turns": []}\n',
        '{"prompt": "a"}\n{"prompt": "b", "turns": ["c"]}\n',
    ],
)
def test_a_broken_line_of_prompts_is_named(tmp_path: Path, content: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)

    with pytest.raises(InputError, match="line 2"):
        read_prompts(path, limit=None)


def test_prompts_that_are_missing_or_empty_are_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("\n")

    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(InputError, match=name):
            read_prompts(tmp_path / name, limit=None)


@pytest.fixture
def chat_target(tmp_path: Path) -> Path:
    """The demo target with a chat template."""
    folder = Path(copytree(DEMO_TARGET, tmp_path / "target"))
    template = "{% for each in messages %}# {{ each.role }}: {{ each.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_later_turn_stands_behind_the_targets_own_answer(chat_target: Path):
    plan = _plan(target=str(chat_target), draft=str(DEMO_DRAFT), max_tokens=5)
    prompts = [BenchPrompt("One", "a", chat=True), BenchPrompt("Two", "b", chat=True, later=("Why?", "Sure?"))]
    answered: list[None] = []

    one, two, why, sure = requests_of(prompts, plan, lambda: answered.append(None))

    assert [(each.prompt, each.turn, each.category) for each in (one, two, why, sure)] == [
        (0, 0, "a"),
        *((1, turn, "b") for turn in range(3)),
    ]
    assert [one.tokens, two.tokens] == encoded(prompts, plan)
    assert len(answered) == 2
    with Pipeline(str(chat_target), draft_engine=NO_DRAFT) as pipeline:
        answer = pipeline.generate(two.tokens, SamplingParams(temperature=0, max_tokens=5)).text
    conversation = [("user", "Two"), ("assistant", answer), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    assert why.tokens == tuple(chat_prompt(str(chat_target), messages))
    assert len(sure.tokens) > len(why.tokens)


def test_the_turns_of_a_prompt_count_as_one_prompt():
    speeds = {(0, 0): 10.0, (0, 1): 30.0, (1, 0): 50.0}
    found = [_measurement("ar", speed, Setting(0, prompt, 0.0, turn=turn)) for (prompt, turn), speed in speeds.items()]

    (row,) = rows(found, ["ar"])

    assert (row.tokens_per_second, row.generations) == (35.0, 3)


def test_a_bench_can_be_drawn(tmp_path: Path):
    figures = rows(
        [_measurement(name, 10.0, _at(0, temperature)) for name in _ORDER for temperature in (0.0, 1.0)], _ORDER
    )

    picture(findings(figures, _plan(), prompts=1), tmp_path / "bench.png")

    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="can't be written"):
        picture(findings(figures, _plan(), prompts=1), tmp_path / "missing" / "bench.png")


@pytest.mark.thorough
def test_a_real_run_is_exact_and_reports_it():
    words = "bench --limit 1 --max-tokens 8 --draft-tokens 1,2 --strategies sd --temperature 0.8 --json"
    words += f" --target {DEMO_TARGET} --draft {DEMO_TARGET}"

    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)

    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["exact"] is True
    baselines = [f"{line}{count}" for line in baseline_cores(once=False) for count in ("", " K=1", " K=2")]
    controls = ["adaptive, no lookup", "lookup", "random draft"]
    assert [(row["temperature"], row["contender"]) for row in report["results"]] == [
        (0.8, name) for name in [*baselines, "sd K=1", "sd K=2", *controls]
    ]
    assert all(row["tokens_per_second"] > 0 for row in report["results"])
    assert all(0 < row["time_to_first_token"] <= row["total_time"] for row in report["results"])
    assert all(0 < row["inter_token_p50"] <= row["inter_token_p95"] for row in report["results"])
    (one, two) = (row for row in report["results"] if row["contender"].startswith("sd"))
    # A draft that is the target guesses every token, so that K decides how many a round has.
    assert (one["acceptance_rate"], two["acceptance_rate"]) == (1.0, 1.0)
    assert one["tokens_per_round"] <= 2 < two["tokens_per_round"]


def test_a_byte_order_mark_before_prompts_is_skipped(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "a"}\n')

    assert [prompt.text for prompt in read_prompts(file, None)] == ["a"]
