"""Laws that hold in every dialect: a question is the chat that it stands for, and a stream adds up to its answer."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import MARK
from protocol.errors import InputError, PipelineError
from tests.orchestrator.http.test_logprobs import generated
from tests.support.asked_server import HELLO, TEMPLATE, post, saying
from tests.support.dialects import CHATS, DIALECTS, MESSAGES, OLLAMA, RESPONSES, Dialect, unnamed
from tests.support.fake_pipeline import READY, FakePipeline

each = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
others = pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES, OLLAMA], ids=("responses", "messages", "ollama"))
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
# What is asked ------------------------------------------------------------------------------------

WORDS = st.text("ab <", max_size=4)
CALLS = st.lists(
    st.builds(
        lambda id, name: {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}, WORDS, WORDS
    ),
    max_size=2,
)
TURNS = st.lists(
    st.one_of(
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user"]), WORDS),
        st.builds(
            lambda text, thought, calls: {
                "role": "assistant",
                "content": text,
                **({"reasoning_content": thought} if thought else {}),
                **({"tool_calls": calls} if calls else {}),
            },
            WORDS,
            WORDS,
            CALLS,
        ),
        st.builds(lambda id, text: {"role": "tool", "tool_call_id": id, "content": text}, WORDS, WORDS),
    ),
    max_size=4,
)


def became(dialect: Dialect, template: ChatTemplate = TEMPLATE, **chat: Any) -> Any:
    """Whether a question was refused, and what the pipeline was asked for it."""
    pipeline = FakePipeline(condition=structs.replace(READY, context=4096))
    return dialect.asked(pipeline, template, **{"seed": 1, "max_tokens": 50, **chat}).status_code, pipeline.asked


@settings(max_examples=25)
@given(turns=TURNS, last=WORDS)
@pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES], ids=("responses", "messages"))
def test_a_history_is_that_of_a_chat(
    models: dict[str, ChatTemplate], dialect: Dialect, turns: list[dict[str, Any]], last: str
):
    messages = [*turns, {"role": "user", "content": last}]

    assert became(dialect, models["seen"], messages=messages) == became(CHATS, models["seen"], messages=messages)


NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@others
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "max_tokens": 9},
        {"stop": ["x"]},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25},
        {"tools": TOOLS},
        *({"tools": TOOLS, "tool_choice": choice} for choice in ("none", "auto", "required", NAMED)),
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ],
    ids=str,
)
def test_a_field_is_what_it_is_in_a_chat(models: dict[str, ChatTemplate], dialect: Dialect, fields: dict[str, Any]):
    penalties = {"frequency_penalty", "presence_penalty"}
    absent = {
        RESPONSES: {"stop", *penalties},
        MESSAGES: penalties,
        OLLAMA: {"tool_choice", "parallel_tool_calls"},
    }[dialect]
    known = {name: value for name, value in fields.items() if name not in absent}

    assert became(dialect, models["hermes"], **known) == became(CHATS, models["hermes"], **known)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1, 9), st.sampled_from(["", "a", "user", "function", "text"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "id", "call_id", "output", "input", "format"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
"""Anything, with words that mean something here."""
ITEM = st.builds(
    lambda kind, other: {**other, "type": kind},
    st.sampled_from(
        [
            "message",
            "function_call",
            "function_call_output",
            "input_text",
            "tool_use",
            "tool_result",
            "text",
            "reasoning",
            "reasoning_text",
            "thinking",
        ]
    ),
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "arguments", "call_id", "output", "id", "input", "text"]),
        JSON,
        max_size=4,
    ),
)
TURN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system", "tool"]),
    st.one_of(JSON, st.lists(ITEM, max_size=3)),
)
ODD = ("tools", "tool_choice", "text", "include", "instructions", "system", "thinking", "output_config", "format")


@each
@settings(max_examples=25)
@given(turns=st.lists(st.one_of(TURN, ITEM, JSON), max_size=3), odd=st.dictionaries(st.sampled_from(ODD), JSON))
def test_any_question_is_answered_or_refused(dialect: Dialect, turns: list[Any], odd: dict[str, Any]):
    said = {"input" if dialect is RESPONSES else "messages": turns}

    response = post(dialect.path, {"max_tokens": 1, "stream": False, **odd, **said})

    assert response.status_code in (200, 400)
    assert response.status_code == 200 or dialect.error(response.json())


# What is answered ---------------------------------------------------------------------------------

CHANNELS = (
    "<|channel|>analysis<|message|>Let me\nadd.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}'
)
THOUGHT = "Let me\nadd."
ADD = ("add", {"a": 1})
AGAIN = f"{MARK}<think>a</think>One: <think>.\n{MARK}<think>\nb</think>\n{CALL}\n{MARK}<think>c</think>{CALL}"
MARKS = "</tool_call> </think>"
QUOTED = json.dumps(MARKS)
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
SAID: dict[str, tuple[str, str, tuple[str, str, list[Any]]]] = {
    "text": ("hermes", "Hello", ("Hello", "", [])),
    "no call": ("hermes", CALL[:20], (CALL[:20], "", [])),
    "half a call": ("hermes", CALL[:-20], ("", "", [("add", {"INVALID_JSON": '{"'})])),
    "calls": ("hermes", f"Let me see.\n{CALL}\n{CALL}", ("Let me see.", "", [ADD, ADD])),
    "deepseek": ("deepseek", DEEPSEEK.replace("{}", '{"a": 1}'), ("", "", [ADD])),
    "thought": ("qwen", f"<think>\n{THOUGHT}\n</think>\n\nI add. {CALL}", ("I add.", THOUGHT, [ADD])),
    "opened thought": ("always", f"{THOUGHT}\n</think>\n\nI add.", ("I add.", THOUGHT, [])),
    "channels": ("harmony", CHANNELS, ("I add.", THOUGHT, [ADD])),
    "call in a thought": ("always", f"{THOUGHT}\n{CALL}", ("", THOUGHT, [ADD])),
    "end marks in it": (
        "always",
        f"`</think>`\n{CALL.replace('1', QUOTED)}",
        ("", "`</think>`", [("add", {"a": MARKS})]),
    ),
    "quoted call": ("always", f"{CALL}?\n</think>\n\nNo.", ("No.", f"{CALL}?", [])),
    "unended call": ("hermes", CALL.removesuffix("</tool_call>"), ("", "", [ADD])),
    "unknown call": ("hermes", CALL.replace("add", "other"), (CALL.replace("add", "other"), "", [])),
    "several thoughts": ("may", AGAIN, ("One: <think>.", "a\n\nb\n\nc", [ADD, ADD])),
}
"""The model, what it says, and the text, thoughts and calls in it."""


@each
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("ends", ["stop", "length"])
def test_a_stream_adds_up_to_the_answer(models: dict[str, ChatTemplate], dialect: Dialect, said: str, ends: Any):
    name, output, expected = SAID[said]
    template = models[name]
    pipeline = saying([output], ends)

    whole = dialect.answer(pipeline, template, tools=TOOLS)

    reply = dialect.reply(whole)
    assert (reply.text.strip(), reply.thoughts.strip(), reply.calls) == expected
    prompt = len(pipeline.asked[0][0])
    assert (reply.cut, reply.usage, reply.warnings) == (ends == "length", (prompt, 1, len(output)), [])
    for size in (1, 3, 7):
        pieces = [output[start : start + size] for start in range(0, len(output), size)]
        streamed = dialect.answer(saying(pieces, ends), template, stream=True, tools=TOOLS)
        assert unnamed(streamed) == unnamed(whole)


PROMPT = len(TEMPLATE.tokens(HELLO["messages"]))
SAYING = {"role": "assistant", "content": "Hello"}
WORDS_OF: dict[str, dict[str, Any]] = {
    "chat": {
        "object": "chat.completion",
        "model": "demo",
        "choices": [
            {"index": 0, "message": {**SAYING, "refusal": None}, "logprobs": None, "finish_reason": "stop"},
        ],
        "usage": {
            "prompt_tokens": PROMPT,
            "completion_tokens": 5,
            "total_tokens": PROMPT + 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    },
    "responses": {
        "object": "response",
        "status": "completed",
        "model": "demo",
        "usage": {
            "input_tokens": PROMPT,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": PROMPT + 5,
        },
    },
    "messages": {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": PROMPT - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 5,
        },
    },
    "ollama": {
        "model": "demo",
        "message": SAYING,
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": PROMPT,
        "eval_count": 5,
        "eval_duration": 500_000_000,
        "total_duration": 500_000_000,
        "load_duration": 0,
    },
}
"""What each API says of an answer, and what it cost; durations in nanoseconds."""


@pytest.mark.parametrize("name", WORDS_OF)
def test_an_answer_is_in_the_words_of_its_api(name: str):
    answer = DIALECTS[name].answer()

    assert {field: answer[field] for field in WORDS_OF[name]} == WORDS_OF[name]


@each
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_did_not_read_is_told_once(models: dict[str, ChatTemplate], dialect: Dialect, stream: bool):
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    messages = [*HELLO["messages"], result, result]

    answer = dialect.answer(template=models["forgetful"], messages=messages, stream=stream)

    (warning,) = dialect.reply(answer).warnings

    assert "2 message(s) with the role 'tool'" in warning


@each
def test_json_that_is_cut_off_is_told_as_such(dialect: Dialect):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}

    for stream in (False, True):
        (warning,) = dialect.reply(
            dialect.answer(saying(['{"a"'], "length"), stream=stream, response_format=form)
        ).warnings
        assert "JSON is incomplete" in warning
        assert dialect.reply(dialect.answer(saying(["{}"]), stream=stream, response_format=form)).warnings == []


@each
def test_an_early_failure_has_a_status_and_a_late_one_is_an_event(dialect: Dialect):
    at_once = FakePipeline(lambda _: [InputError("No.")])
    later = FakePipeline(lambda _: ["Hel", PipelineError("Oh.")])

    for stream in (False, True):
        refused = dialect.asked(at_once, stream=stream)
        assert (refused.status_code, dialect.error(refused.json())) == (400, "No.")
    assert dialect.asked(later).status_code == 503
    last = dialect.events(dialect.asked(later, stream=True))[-1]
    told = last["response"] if dialect is RESPONSES else last
    assert dialect.error(told) == "Oh."
    if dialect is RESPONSES:
        (item,) = told["output"]
        assert (last["type"], told["status"], item["status"]) == ("response.failed", "failed", "incomplete")
        assert item["content"][0]["text"] == "Hel"


@each
def test_a_stream_tells_its_place_in_the_queue_and_how_far_the_prompt_was_read(dialect: Dialect):
    pipeline = FakePipeline(read=[(0, 2), (3, 0), (5, 0)])

    events = dialect.events(dialect.asked(pipeline, stream=True))

    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    total = len(pipeline.asked[0][0])
    assert told == [{"processed": 0, "total": total, "queued": 2}, *({"processed": n, "total": total} for n in (3, 5))]
    assert "prompt_progress" not in json.dumps(dialect.answer(pipeline))


@each
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_where_its_tokens_come_from(dialect: Dialect, stream: bool):
    found = {"draft_tokens": 2, "lookup_tokens": 1, "plain_tokens": 2}

    assert dialect.answer(stream=stream)["speculation"] == {"rounds": 2, "tokens_per_round": 2.5, **found}


@pytest.mark.parametrize("dialect", [CHATS, RESPONSES, OLLAMA], ids=("chat", "responses", "ollama"))
@pytest.mark.parametrize("seed", range(3))
def test_log_probabilities_are_those_of_a_chat(dialect: Dialect, seed: int):
    texts, result = generated((" end",), seed)
    pipeline = FakePipeline(lambda _: [piece.text for piece in texts], result=result)
    asked = {"logprobs": True, "top_logprobs": 3}

    found = dialect.logprobs(dialect.answer(pipeline, **asked))

    assert pipeline.asked[0][1].logprobs == 3
    assert found == CHATS.logprobs(CHATS.answer(pipeline, **asked))
    assert b"".join(bytes(entry["bytes"]) for entry in found).startswith(result.text.encode())


@pytest.mark.parametrize(
    ("dialect", "path"),
    [(RESPONSES, "/v1/responses/input_tokens"), (MESSAGES, "/v1/messages/count_tokens")],
    ids=("responses", "messages"),
)
def test_tokens_are_counted_as_they_are_read(dialect: Dialect, path: str):
    messages = [{"role": "system", "content": "Be brief."}, *HELLO["messages"]]

    counted = post(path, dialect.body({"messages": messages})).json()

    assert counted["input_tokens"] == dialect.reply(dialect.answer(messages=messages)).usage[0]
    assert counted["input_tokens"] == len(TEMPLATE.tokens(messages))
    assert post(path, {**dialect.body(HELLO), "model": "other"}).status_code == 404


@each
def test_an_unknown_model_and_a_wrong_key_are_refused_in_the_words_of_the_dialect(dialect: Dialect):
    unknown = post(dialect.path, {**dialect.body(HELLO), "model": "other"})
    wrong = post(dialect.path, dialect.body(HELLO), headers={"x-api-key": "wrong"})

    assert (unknown.status_code, wrong.status_code) == (404, 401)
    assert "no such model" in dialect.error(unknown.json())
    assert "API key" in dialect.error(wrong.json())


def test_the_text_of_many_parts_takes_time_in_proportion():
    # Adding each text to a copy of those before took nine seconds.
    parts = [{"type": "text", "text": "x" * 100}] * 20_000

    began = time.process_time()
    response = post(MESSAGES.path, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})

    assert time.process_time() - began < 1
    assert "prompt is too long" in MESSAGES.error(response.json())
