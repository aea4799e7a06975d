"""Laws of thinking models: each API tells the thought from the answer, streamed or not, and asks for it in its way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.http.openai.structured_output import response_grammar
from orchestrator.http.responses.request import messages
from orchestrator.runtime.request_state import RequestState
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import MARK, TextCodec
from protocol.messages.base import RequestId
from protocol.messages.client import Submit, ThoughtText
from protocol.messages.grammar import Grammar
from protocol.messages.sampling import Sampling
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.transport import Stamp
from tests.orchestrator.http.test_tool_calls import TOOLS
from tests.support.asked_server import CHAT, DEMO, HELLO, TEMPLATE, post, saying
from tests.support.dialects import CHATS, MESSAGES, RESPONSES
from tests.support.fake_pipeline import FakePipeline
from tests.support.models.chat_models import ALWAYS, CHANNEL_MARKS, HARMONY, MARKS, QWEN, model

HI: dict[str, Any] = {**HELLO, "max_tokens": 9}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FINAL = "<|channel|>final<|message|>"
CHANNELS = (
    "<|channel|>analysis<|message|>Let me\nadd.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}'
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Of a model that begins a thought itself, if it may."""
    return model(tmp_path_factory.mktemp("qwen"), QWEN)


@pytest.fixture(scope="module")
def may(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """As `qwen`, with markers that are tokens."""
    return model(tmp_path_factory.mktemp("may"), QWEN, MARKS)


@pytest.fixture(scope="module")
def always(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """Of a model whose prompts end with the beginning of a thought."""
    return model(tmp_path_factory.mktemp("always"), ALWAYS, MARKS)


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return model(tmp_path_factory.mktemp("harmony"), HARMONY, CHANNEL_MARKS)


# What is answered --------------------------------------------------------------------------------


AGAIN = f"{MARK}<think>a</think>One: <think>.\n{MARK}<think>\nb</think>\n{CALL}\n{MARK}<think>c</think>{CALL}"


def test_a_later_thought_is_an_item_of_its_own_and_a_block_of_its_own(may: ChatTemplate):
    output = RESPONSES.answer(saying([AGAIN]), may, tools=TOOLS)["output"]
    blocks = MESSAGES.answer(saying([AGAIN]), may, tools=TOOLS)["content"]

    kinds = ["reasoning", "message", "reasoning", "function_call", "reasoning", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert [item["content"][0]["text"] for item in output if "content" in item] == ["a", "One: <think>.", "b", "c"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "thinking", "tool_use", "thinking", "tool_use"]
    assert [block["thinking"] for block in blocks if "thinking" in block] == ["a", "b", "c"]


def test_the_tokens_of_thoughts_are_counted(may: ChatTemplate):
    told = [dialect.answer(saying([AGAIN]), may, tools=TOOLS)["usage"] for dialect in (CHATS, RESPONSES)]

    details = [usage[f"{name}_tokens_details"] for usage, name in zip(told, ("completion", "output"), strict=True)]
    expected = [len(may.codec.encode("a\n\nb\n\nc", special=False)), 3]
    assert [each["reasoning_tokens"] for each in details] == expected


def test_where_a_form_is_enforced_markers_are_text(may: ChatTemplate):
    def marked(**more: Any) -> Sequence[int]:
        pipeline = FakePipeline()
        assert post(CHAT, {**HELLO, **more}, pipeline, template=may).status_code == 200
        return pipeline.asked[0][1].marked

    start = may.codec.id_of("<think>")
    assert marked() == marked(thinking_budget=3) == marked(tools=TOOLS) == (start,)
    assert marked(response_format=FORM) == marked(tools=TOOLS, tool_choice="required") == ()


def test_the_mark_of_a_token_is_not_that_of_its_text(may: ChatTemplate):
    codec = may.codec
    start = codec.id_of("<think>")
    assert start is not None
    spelt = [token for piece in ("<", "think", ">") for token in codec.encode(piece, special=False)]
    submit = Submit("r", "", None, Sampling(), 99, marked=(start,))
    state = RequestState.open(RequestId(1), b"", Stamp(0, 0), submit, codec)
    tokens = [*spelt, start, *codec.encode("é", special=False)[:1], start, *spelt]

    said = "".join(state.output((token,)).text for token in tokens)

    assert said.replace("\ufffd", "") == f"<think>{MARK}<think>{MARK}<think><think>"
    assert said.replace(MARK, "") == codec.decode(tokens)


@pytest.mark.parametrize(
    ("name", "thought"),
    [
        ("qwen", ThoughtText("<think>", "</think>")),
        ("always", ThoughtText("<think>", "</think>", opened=True)),
        ("harmony", ThoughtText("", FINAL, opened=True)),
    ],
)
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {**HELLO, "stop": ["Q?"]}),
        ("/v1/messages", {**HI, "stop_sequences": ["Q?"]}),
        ("/api/chat", {**HELLO, "options": {"stop": ["Q?"]}}),
    ],
)
def test_stop_strings_are_not_looked_for_in_thoughts(
    request: pytest.FixtureRequest, name: str, thought: ThoughtText, path: str, asked: dict[str, Any]
):
    pipeline = FakePipeline()

    post(path, asked, pipeline, template=request.getfixturevalue(name))

    ((_, params),) = pipeline.asked
    assert (params.stop, params.thought) == (("Q?",), thought)
    submit = params.submit("r", "a")
    state = RequestState.open(RequestId(1), b"", Stamp(0, 0), submit, TEMPLATE.codec)
    assert state.stops.push(f"{thought.start}Q?{thought.end}Q?") == (f"{thought.start}Q?{thought.end}", True)


def test_a_thought_that_fills_the_answer_is_incomplete_reasoning(always: ChatTemplate):
    asked = {"input": "Hi", "stream": True}

    sent = RESPONSES.events(post("/v1/responses", asked, saying(["Hm"], "length"), template=always))

    (item,) = sent[-1]["response"]["output"]
    assert (item["type"], item["status"], sent[-1]["type"]) == ("reasoning", "incomplete", "response.incomplete")


def test_models_without_thoughts_write_markers_as_text():
    message = post(CHAT, HELLO, saying(["<think>a</think>b"])).json()["choices"][0]["message"]

    assert message["content"] == "<think>a</think>b"
    assert "reasoning_content" not in message


# What is asked -----------------------------------------------------------------------------------


def prompt(template: ChatTemplate, body: dict[str, Any], path: str = CHAT) -> str:
    """The prompt that reaches the pipeline."""
    pipeline = FakePipeline()
    response = post(path, body, pipeline, template=template)
    assert response.status_code == 200, response.text
    return TextCodec(DEMO).decode(pipeline.asked[0][0])


@pytest.mark.parametrize(("effort", "told"), [("high", "high"), ("minimal", "low"), (None, "medium")])
def test_a_template_that_knows_the_effort_gets_it(harmony: ChatTemplate, effort: str | None, told: str):
    body = {**HELLO, "reasoning_effort": effort}
    pipeline = FakePipeline()

    post(CHAT, body, pipeline, template=harmony)

    assert list(pipeline.asked[0][0]) == harmony.tokens(HELLO["messages"], reasoning_effort=told)


@pytest.mark.parametrize("name", ["messages", "tools", "self", "template", "text", "name", "cls", "documents"])
def test_requests_do_not_replace_their_messages_by_template_variables(qwen: ChatTemplate, name: str):
    response = post(CHAT, {**HELLO, "chat_template_kwargs": {name: [] if name == "messages" else 1}}, template=qwen)

    refused = name in ("messages", "tools", "self")
    assert response.status_code == (400 if refused else 200)
    assert not refused or response.json()["error"]["param"] == "chat_template_kwargs"


EARLIER = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    {"role": "user", "content": "Why?"},
]


def test_earlier_reasoning_reaches_templates_that_use_it(qwen: ChatTemplate):
    renamed = [EARLIER[0], {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, EARLIER[2]]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"role": "user", "content": "Why?"},
    ]
    block = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    said = {"role": "assistant", "content": [hidden, block, {"type": "text", "text": "Yes."}]}
    turns = [EARLIER[0], said, EARLIER[2]]
    expected = "user:Hi\nassistant:(Hm.)Yes.\nuser:Why?\nassistant:"

    assert prompt(qwen, {"messages": EARLIER}) == expected
    assert prompt(qwen, {"messages": renamed}) == expected
    assert prompt(qwen, {"input": items}, "/v1/responses") == expected
    assert prompt(qwen, {"max_tokens": 9, "messages": turns}, "/v1/messages") == expected
    assert prompt(TEMPLATE, {"messages": EARLIER}) == "User: Hi\nAssistant: Yes.\nUser: Why?\nAssistant:"


def test_a_call_keeps_the_reasoning_before_it_and_encrypted_reasoning_is_left_out():
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    hidden = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    summary = {"type": "reasoning", "id": "s", "summary": [{"type": "summary_text", "text": "Hm."}]}

    turns = messages([hidden, call, {"role": "user", "content": "a"}, summary, call, summary])

    assert [turn.get("reasoning_content") for turn in turns] == [None, None, "Hm."]


def test_a_message_with_calls_has_no_reasoning_beside_text_in_harmony(harmony: ChatTemplate):
    function = {"name": "add", "arguments": "{}"}
    said = {"role": "assistant", "content": "I add.", "reasoning": "Hm.", "tool_calls": [{"function": function}]}

    assert post(CHAT, {"messages": [said, *HELLO["messages"]]}, template=harmony).status_code == 200


# Special tokens ----------------------------------------------------------------------------------


def test_special_tokens_are_text_only_where_they_are_markers(harmony: ChatTemplate):
    pipeline = FakePipeline()
    codec = harmony.codec
    post(CHAT, HELLO, pipeline, template=harmony)
    shown = tuple(pipeline.asked[0][1].shown)
    tokens = codec.encode(CHANNELS, special=False)

    for seen, expected in ((shown, CHANNELS), ((), codec.decode(tokens))):
        submit = Submit("r", "", None, Sampling(), 99, shown=seen)
        state = RequestState.open(RequestId(1), b"", Stamp(0, 0), submit, codec)
        pieces = [state.output((token,)).text for token in tokens]
        rest = state.rest()
        assert "".join(pieces) + (rest.text if rest else "") == expected
    assert "<|" not in codec.decode(tokens)


# What is enforced --------------------------------------------------------------------------------


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}


def bound(template: ChatTemplate, body: dict[str, Any], path: str = CHAT) -> Grammar | None:
    """The grammar that reaches the pipeline."""
    pipeline = FakePipeline()
    response = post(path, body, pipeline, template=template)
    assert response.status_code == 200, response.text
    return pipeline.asked[0][1].grammar


def takes(template: ChatTemplate, grammar: Grammar | None, said: str) -> bool:
    """Whether the grammar allows `said` as a complete answer."""
    assert grammar is not None
    codec = template.codec
    ends = tuple(codec.eos)
    try:
        rules = Grammars(template.folder, 1 << 13).open(grammar, ends, codec.encode(said, special=False))
    except GrammarError:
        return False
    (mask,) = rules.allowed([()])
    return mask is not None and bool(mask[list(ends)].any())


@pytest.mark.parametrize(
    ("name", "thought"), [("always", "Hm.\n</think>\n\n"), ("harmony", f"{CHANNELS}<|end|><|start|>assistant{FINAL}")]
)
def test_a_schema_binds_the_answer_and_not_the_thought(name: str, thought: str, request: pytest.FixtureRequest):
    template = request.getfixturevalue(name)
    asked = {**HELLO, "response_format": FORM}

    grammar = bound(template, asked)

    assert takes(template, grammar, thought + '"yes"')
    assert not takes(template, grammar, thought + "yes")
    assert not takes(template, grammar, '"yes"')
    message = post(CHAT, asked, saying([thought + '"yes"']), template=template).json()["choices"][0]["message"]
    assert message["content"].endswith('"yes"')
    assert message["reasoning_content"]


def test_a_line_break_before_the_thought_is_allowed_where_the_template_has_it(tmp_path: Path):
    glm = QWEN.replace("{{ message.role }}:", "{{ message.role }}:{{ '' if true else '\\n<think>' }}")
    template = model(tmp_path, glm, MARKS)
    asked = {**HELLO, "response_format": FORM}

    assert takes(template, bound(template, asked), '\n<think>Hm.</think>\n"yes"')
    (tmp_path / "chat_template.jinja").write_text(glm.replace("assistant:", "assistant:\n"))
    assert not takes(template, bound(ChatTemplate(tmp_path), asked), '\n<think>Hm.</think>\n"yes"')


def test_without_thoughts_in_the_template_or_tokens_for_markers_a_schema_binds_the_whole_answer(
    tmp_path: Path, qwen: ChatTemplate
):
    for template in (model(tmp_path, "{{ messages[0].content }}", MARKS), qwen):
        assert bound(template, {**HELLO, "response_format": FORM}) == response_grammar(FORM)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": FORM}, "response_format"),
    ],
)
def test_calls_that_can_not_be_enforced_are_refused(tmp_path: Path, asked: dict[str, Any], param: str):
    template = model(tmp_path, "{{ tools }}{{ messages[0].content }}<atem:function_calls>")
    response = post(CHAT, {**HELLO, "tools": TOOLS, **asked}, template=template)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


ADDS = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}'
ANALYSIS = "<|channel|>analysis<|message|>Let me add.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"


OTHER, ARGUMENTS = ADDS.replace("add", "other"), ADDS.replace('{"a":1}', "[1]")
DEMANDED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
IN_FORM: dict[str, Any] = {"response_format": FORM}
STRICT: dict[str, Any] = {"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]}
THOUGHT = "<think>Hm.</think>\n\n"


@pytest.mark.parametrize(
    ("name", "asked", "allowed", "refused"),
    [
        ("may", IN_FORM, ['"yes"', THOUGHT + '"yes"'], []),
        ("may", {**IN_FORM, "enable_thinking": False}, ['"yes"'], [THOUGHT + '"yes"']),
        ("may", DEMANDED, [THOUGHT + CALL], [THOUGHT + "No."]),
        (
            "may",
            {"tools": TOOLS, **IN_FORM},
            ['"yes"', CALL, f"{CALL}\n{CALL}", THOUGHT + CALL],
            ["yes", f'"yes"{CALL}', f"I add. {CALL}", CALL[:-3]],
        ),
        (
            "harmony",
            DEMANDED,
            [
                ahead + said
                for said in (ADDS, ' to=functions.add<|channel|>commentary json<|message|>{"a":1}')
                for ahead in ("", ANALYSIS, PREAMBLE, ANALYSIS + PREAMBLE)
            ],
            [FINAL + "No.", ANALYSIS + FINAL + "No.", OTHER, ARGUMENTS, ADDS[:-1], ADDS + ".", ANALYSIS],
        ),
        (
            "harmony",
            STRICT,
            [ADDS, ANALYSIS + ADDS, FINAL + "No.\nNever.", ANALYSIS + FINAL + "No."],
            [ARGUMENTS, ANALYSIS + OTHER, "No."],
        ),
        (
            "harmony",
            {"tools": TOOLS, **IN_FORM},
            [ADDS, ANALYSIS + ADDS, FINAL + '"yes"', ANALYSIS + FINAL + '"yes"'],
            [FINAL + "yes", ANALYSIS + FINAL + '"yes".', '"yes"', ARGUMENTS],
        ),
    ],
)
def test_forms_and_calls_are_enforced_behind_thoughts(
    name: str, asked: dict[str, Any], allowed: list[str], refused: list[str], request: pytest.FixtureRequest
):
    template = request.getfixturevalue(name)
    grammar = bound(template, {**HELLO, **asked})

    assert [said for said in allowed if not takes(template, grammar, said)] == []
    assert [said for said in refused if takes(template, grammar, said)] == []


def test_a_budget_ends_the_thought(always: ChatTemplate, harmony: ChatTemplate):
    grammar = bound(always, {**HELLO, "thinking_budget": 3})

    assert takes(always, grammar, "a b</think>Yes.")
    assert not takes(always, grammar, "a b c d e f</think>Yes.")
    thinking = {"type": "enabled", "budget_tokens": 3}
    assert bound(always, {**HI, "thinking": thinking}, "/v1/messages") == grammar
    assert takes(always, grammar, "a</think>Yes.<think>b</think>No.")
    assert not takes(always, grammar, "a b</think>Yes.<think>c d e f</think>No.")
    assert bound(always, HELLO) is None
    assert bound(harmony, {**HELLO, "thinking_budget": 3}) is not None
    assert bound(harmony, {**HELLO, "thinking_budget": 3, "tools": TOOLS}) is None
    assert bound(TEMPLATE, {**HELLO, "thinking_budget": 3}) is None
