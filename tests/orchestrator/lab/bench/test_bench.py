"""Laws of the bench: who continues what and when, whose tokens are compared, and what a prompt is."""

import json
from pathlib import Path
from shutil import copytree
from time import perf_counter

import mlx.core as mx
import pytest
from click.testing import CliRunner

from orchestrator import Pipeline, SamplingParams
from orchestrator.cli.app import cli
from orchestrator.lab import report
from orchestrator.lab.bench.contender import BenchRequest, deviating, schedule, settings
from orchestrator.lab.bench.figures import rows
from orchestrator.lab.bench.mlx_lm import rounds_of
from orchestrator.lab.bench.mlx_lm_process import PacedDevice
from orchestrator.lab.bench.prompts import BenchPrompt, read_prompts
from orchestrator.lab.bench.trials import encoded, measured, requests_of
from orchestrator.lab.findings import Listener
from orchestrator.text.chat_template import chat_prompt
from protocol.contracts.engines import NO_DRAFT
from protocol.errors import InputError
from protocol.worker.pacing import DevicePace
from tests.support.bench_measurements import FakeContender, bench_plan, measurement
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

_ORDER = ["mlx-lm", "mlx-lm K=1", "mlx-lm K=2", "ar", "adaptive"]


def _requests(*tokens: tuple[int, ...]) -> list[BenchRequest]:
    """A prompt of one turn for each."""
    return [BenchRequest(each, prompt) for prompt, each in enumerate(tokens)]


def test_contenders_take_turns_within_each_setting_and_begin_in_turn():
    order = list(settings(2, _requests((1,), (2,), (3,)), (0.0, 1.0)))

    turns = list(schedule("abc", order))

    assert len(order) == 12
    assert [setting for setting, _ in turns] == [setting for setting in order for _ in "abc"]
    assert "".join(contender for _, contender in turns[:12]) == "abcbcacababc"


def test_every_contender_warms_up_and_then_gets_the_same_tasks_each_with_its_seed():
    log: list[str] = []
    progress: list[str] = []
    contenders = [FakeContender(name, log) for name in ("mlx-lm", "ar")]

    found = measured(contenders, _requests((5, 6), (7, 8)), bench_plan(temperature=(1.0,)), progress.append)

    assert log == ["mlx-lm", "ar", *progress]
    assert len(progress) == len(found) == 8
    assert progress[:2] == ["mlx-lm", "ar"]
    assert sorted(contenders[0].tasks) == sorted(contenders[1].tasks)
    warm_up, *tasks = contenders[0].tasks
    assert warm_up.max_tokens == 8
    assert len({task.seed for task in tasks}) == len(tasks) == 4


@pytest.mark.parametrize("tokens", [(1, 3), (1,)], ids=["wrong", "missing"])
@pytest.mark.parametrize("wrong", _ORDER[1:])
def test_a_token_that_is_wrong_or_missing_at_temperature_0_is_found_in_every_contender(wrong: str, tokens: tuple):
    found = [measurement(name, 1.0, tokens=tokens if name == wrong else (1, 2)) for name in _ORDER]

    assert [each.wrong.contender for each in deviating(found, _ORDER)] == [wrong]


@pytest.mark.parametrize("other", [{"prompt": 1}, {"turn": 1}], ids=str)
def test_tokens_of_another_prompt_or_turn_are_never_compared(other: dict):
    assert deviating([measurement("ar", 1.0), measurement("ar", 1.0, tokens=(3, 4), **other)], _ORDER) == []


def test_sampled_tokens_are_compared_among_ours_only():
    tokens = {"mlx-lm": (7, 7), "mlx-lm K=1": (8, 8), "ar": (1, 2), "adaptive": (1, 3)}
    found = [measurement(name, 1.0, temperature=1.0, tokens=generated) for name, generated in tokens.items()]

    assert [each.wrong.contender for each in deviating(found, _ORDER)] == ["adaptive"]
    assert [row.checked for row in rows(found, list(tokens))] == [0, 0, 1, 1]


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
    assert bench_plan(draft_tokens=words).draft_tokens == counts


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
        bench_plan(**changes)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


@pytest.mark.parametrize(
    ("content", "limit", "found"),
    [
        ('{"prompt": "a", "id": 1}\n\n{"prompt": "b"}\n{"prompt": "c"}\n', 2, [BenchPrompt("a"), BenchPrompt("b")]),
        ('\ufeff{"prompt": "a"}\n', None, [BenchPrompt("a")]),
        (
            '{"turns": ["Hello", "And then?"], "category": "chat"}',
            None,
            [BenchPrompt("Hello", "chat", chat=True, later=("And then?",))],
        ),
    ],
    ids=["lines", "a byte order mark", "all turns of a user"],
)
def test_prompts_come_from_a_file_of_json_lines(prompts: Path, content: str, limit: int | None, found: list):
    prompts.write_text(content)

    assert read_prompts(prompts, limit) == found


def test_a_limit_takes_prompts_evenly_over_the_categories(prompts: Path):
    lines = [("a", "chat"), ("b", "chat"), ("c", "chat"), ("d", "code"), ("e", "maths"), ("f", "maths")]
    prompts.write_text("\n".join(json.dumps({"prompt": text, "category": category}) for text, category in lines))

    assert "".join(prompt.text for prompt in read_prompts(prompts, limit=5)) == "adebf"
    assert "".join(prompt.text for prompt in read_prompts(prompts, limit=None)) == "adebfc"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"prompt": "a"}\nno json\n', "line 2"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2"),
        ('{"prompt": "a"}\n{"turns": []}\n', "line 2"),
        ('{"prompt": "a"}\n{"prompt": "b", "turns": ["c"]}\n', "line 2"),
        ("\n", "prompts.jsonl"),
        (None, "prompts.jsonl"),
    ],
)
def test_prompts_that_are_broken_missing_or_empty_are_refused(prompts: Path, content: str | None, named: str):
    if content is not None:
        prompts.write_text(content)

    with pytest.raises(InputError, match=named):
        read_prompts(prompts, limit=None)


@pytest.fixture
def chat_target(tmp_path: Path) -> Path:
    """The demo target with a chat template."""
    folder = Path(copytree(DEMO_TARGET, tmp_path / "target"))
    template = "{% for each in messages %}# {{ each.role }}: {{ each.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_later_turn_stands_behind_the_targets_own_answer(chat_target: Path):
    plan = bench_plan(target=str(chat_target), draft=str(DEMO_DRAFT), max_tokens=5)
    prompts = [BenchPrompt("One", "a", chat=True), BenchPrompt("Two", "b", chat=True, later=("Why?", "Sure?"))]

    one, two, why, sure = requests_of(prompts, plan, Listener())

    assert [(each.prompt, each.turn, each.category) for each in (one, two, why, sure)] == [
        (0, 0, "a"),
        *((1, turn, "b") for turn in range(3)),
    ]
    assert [one.tokens, two.tokens] == encoded(prompts, plan)
    with Pipeline(str(chat_target), draft_engine=NO_DRAFT) as pipeline:
        answer = pipeline.generate(two.tokens, SamplingParams(temperature=0, max_tokens=5)).text
    conversation = [("user", "Two"), ("assistant", answer), ("user", "Why?")]
    messages = [{"role": role, "content": content} for role, content in conversation]
    assert why.tokens == tuple(chat_prompt(str(chat_target), messages))
    assert len(sure.tokens) > len(why.tokens)


@pytest.mark.thorough
def test_a_real_run_is_exact_and_reports_it(prompts: Path):
    # So short that the draft, which is the target, has read it as soon: behind it, it would never catch up.
    prompts.write_text('{"prompt": "import os\\n"}')
    words = "bench --max-tokens 32 --draft-tokens 1,2 --strategies sd --temperature 0.8 --json"
    words += f" --prompts {prompts} --target {DEMO_TARGET} --draft {DEMO_TARGET}"

    result = CliRunner().invoke(cli, words.split(), catch_exceptions=False)

    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["exact"] is True
    assert [(row["temperature"], row["contender"]) for row in report["results"]] == [
        (0.8, f"{line}{count}") for line, most in (("mlx-lm", 0), ("sd", 1)) for count in ("", " K=1", " K=2")[most:]
    ]
    assert all(row["tokens_per_second"] > 0 for row in report["results"])
    assert all(0 < row["time_to_first_token"] <= row["total_time"] for row in report["results"])
    assert all(0 < row["inter_token_p50"] <= row["inter_token_p95"] for row in report["results"])
    (one, two) = (row for row in report["results"] if row["contender"].startswith("sd"))
    for start in (report["start"]["mlx-lm"], report["start"]["adaptive"]):
        assert start["ready"] > start["weights"] > 0 < start["first token"]
        assert start["tokenizer"] > 0
    # A draft that is the target guesses every token, so that K decides how many a round has.
    assert (one["acceptance_rate"], two["acceptance_rate"]) == (1.0, 1.0)
    assert one["tokens_per_round"] <= 2 < two["tokens_per_round"]
