"""Laws of `LLM`: the target's own texts in order, events of two types, models loaded once, nothing left behind."""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import LLM, InputError, Pipeline, PipelineError, ResultEvent, SamplingParams, Stream, TextEvent
from orchestrator.api.validation import IneffectiveOption
from tests.conftest import Reference
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import mark, members, remains

PROMPT = "def quicksort(items):"
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
TEMPLATE = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
LEFT_OPEN = """
from orchestrator import LLM, SamplingParams
llm = LLM(speculate=False)
llm.generate("import os", SamplingParams(max_tokens=1))
print(llm.pipeline.address)
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(speculate=True, speculate_k=3) as llm:
        yield llm


def test_a_stream_is_text_and_then_the_result(llm: LLM, reference: Reference):
    *pieces, last = llm.stream(PROMPT, PARAMS)

    assert isinstance(last, ResultEvent)
    assert last.result.tokens == reference(PROMPT, PARAMS).tokens
    assert all(isinstance(piece, TextEvent) for piece in pieces)
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextEvent)) == last.result.text


def test_leaving_a_stream_cancels_it(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    cancelled: list[Stream] = []
    cancel = Stream.cancel
    monkeypatch.setattr(Stream, "cancel", lambda stream: (cancelled.append(stream), cancel(stream)))

    events = llm.stream(PROMPT, SamplingParams(max_tokens=200))
    next(events)
    assert cancelled == []
    events.close()

    assert len(cancelled) == 1


def test_models_are_loaded_once_for_requests_with_other_parameters(llm: LLM):
    loaded = members(mark(llm.pipeline))
    for temperature in (0.0, 1.0):
        llm.generate("import os", SamplingParams(max_tokens=2, temperature=temperature, draft_tokens=6))

    assert {"target_worker", "draft_worker"} < loaded.keys()
    assert members(mark(llm.pipeline)) == loaded


def test_a_forked_child_ends_nothing(llm: LLM):
    child = os.fork()
    if child == 0:
        llm.close()
        os._exit(0)
    os.waitpid(child, 0)

    assert llm.generate("import os", SamplingParams(max_tokens=1)).finish_reason == "length"


@pytest.mark.thorough
def test_a_conversation_is_answered_by_the_template_in_steps_of_any_size(tmp_path: Path, reference: Reference):
    model = tmp_path / "model"
    shutil.copytree(DEMO_TARGET, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    question = [{"role": "system", "content": "import"}, {"role": "user", "content": "os"}]
    params = SamplingParams(temperature=0.0, max_tokens=6)

    with LLM(str(model), speculate=False, prefill_step_size=2) as llm:
        folder = mark(llm.pipeline)
        answer = llm.chat(question, params)
        started = subprocess.check_output(["ps", "-ww", "-o", "command=", "-p", str(members(folder)["target_worker"])])
        with pytest.raises(InputError, match="give one conversation"):
            llm.chat([question], params)  # pyright: ignore[reportArgumentType]

    assert answer.tokens == reference("# import\n# os\n", params).tokens
    assert b'"prefill_chunk":2,' in started
    assert remains(folder) == []
    with pytest.raises(PipelineError, match="closed"):
        llm.generate("import os")


@pytest.mark.thorough
def test_with_the_last_reference_and_with_the_program_the_pipeline_ends():
    llm = LLM(speculate=False)
    folder = mark(llm.pipeline)
    assert members(folder)
    del llm
    gc.collect()
    assert remains(folder) == []

    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert remains(str(Path(ended.stdout.strip().removeprefix("ipc://")).parent)) == []


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are checked, and no process is started."""
    monkeypatch.setattr(Pipeline, "start", lambda _: None)


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "adaptive"),
        ({"speculate": True}, "adaptive"),
        ({"speculate_k": 3}, "ssd"),
        ({"speculate_k": 3, "strategy": "sd"}, "sd"),
        ({"speculate": False}, "ar"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_speculation_is_one_of_the_strategies(options: dict[str, Any], strategy: str):
    assert LLM(**options).pipeline.strategy == strategy


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculate": False, "speculate_k": 3}, "speculate_k has no effect: the strategy ar"),
        ({"strategy": "adaptive", "speculate_k": 3}, "speculate_k has no effect: only the strategies sd and ssd"),
        ({"speculate": False, "draft": str(DEMO_DRAFT)}, "draft has no effect: the strategy ar"),
        ({"speculate": True, "draft_engine": "none"}, "speculate has no effect: without a draft"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_told_at_the_line_that_gave_it(options: dict[str, Any], sentence: str):
    with pytest.warns(IneffectiveOption) as found:
        LLM(**options)

    assert [(one.filename, str(one.message).startswith(sentence)) for one in found] == [(__file__, True)]


@pytest.mark.usefixtures("unstarted")
@pytest.mark.parametrize("asked", [{"speculate": True}, {"speculate_k": 3}], ids=str)
def test_it_is_told_if_no_draft_fits_the_target(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pipeline, "strategy", "ar")

    with pytest.warns(IneffectiveOption, match=f"{next(iter(asked))} has no effect: without a draft"):
        LLM(**asked)


@pytest.mark.parametrize(("speculate", "strategy"), [(False, "sd"), (True, "ar")])
def test_a_contradiction_is_refused(speculate: bool, strategy: str):
    with pytest.raises(InputError, match="give one of them"):
        LLM(speculate=speculate, strategy=strategy)
