"""Laws of thinking models: each API tells the thought from the answer, streamed or not, and asks for it in its way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from orchestrator.api.result import Result
from orchestrator.http.openai.structured_output import response_grammar
from orchestrator.http.responses.request import messages
from orchestrator.runtime.client_frontend import RequestState
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import MARK
from protocol.messages.base import RequestId
from protocol.messages.client import Submit, ThoughtText
from protocol.messages.grammar import Grammar
from protocol.messages.sampling import Sampling
from protocol.transport import Stamp
from tests.orchestrator.http.test_dialects import AGAIN, CALL, CHANNELS, TOOLS
from tests.support.asked_server import CHAT, HELLO, TEMPLATE, asked, post, saying
from tests.support.dialects import CHATS, DIALECTS, MESSAGES, RESPONSES, Dialect
from tests.support.fake_pipeline import FakePipeline, statistics
from tests.support.models.chat_models import MARKS, MODELS, QWEN, model, takes

HI: dict[str, Any] = {**HELLO, "max_tokens": 9}
FINAL = "<|channel|>final<|message|>"


@pytest.fixture
def may(models: dict[str, ChatTemplate]) -> ChatTemplate:
    return models["may"]


@pytest.fixture
def harmony(models: dict[str, ChatTemplate]) -> ChatTemplate:
    return models["harmony"]


# What is answered --------------------------------------------------------------------------------


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
        return asked(CHAT, {**HELLO, **more}, may).params.marked

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
    ("path", "body"),
    [
        (CHAT, {**HELLO, "stop": ["Q?"]}),
        ("/v1/messages", {**HI, "stop_sequences": ["Q?"]}),
        ("/api/chat", {**HELLO, "stream": False, "options": {"stop": ["Q?"]}}),
    ],
)
def test_stop_strings_are_not_looked_for_in_thoughts(
    models: dict[str, ChatTemplate], name: str, thought: ThoughtText, path: str, body: dict[str, Any]
):
    params = asked(path, body, models[name]).params

    assert (params.stop, params.thought) == (("Q?",), thought)
    submit = params.submit("r", "a")
    state = RequestState.open(RequestId(1), b"", Stamp(0, 0), submit, TEMPLATE.codec)
    assert state.stops.push(f"{thought.start}Q?{thought.end}Q?") == (f"{thought.start}Q?{thought.end}", True)


def test_a_thought_that_fills_the_answer_is_incomplete_reasoning(models: dict[str, ChatTemplate]):
    sent = RESPONSES.events(RESPONSES.asked(saying(["Hm"], "length"), models["always"], stream=True))

    (item,) = sent[-1]["response"]["output"]
    assert (item["type"], item["status"], sent[-1]["type"]) == ("reasoning", "incomplete", "response.incomplete")


OPEN = [
    # The model, what it says, and whether a thought is open then.
    ("always", "Hm", True),
    ("always", "Hm</think>", False),
    ("always", "Hm</think>Yes.<think>Or", True),
    ("may", "<think>Hm", True),
    ("may", "<think>Hm<tool_call>", False),
    ("may", "Hm", False),
    # No tool is offered.
    ("always", "Hm<tool_call>", True),
    ("harmony", "<|channel|>analysis<|message|>Hm", True),
    ("harmony", CHANNELS, False),
]


@pytest.mark.parametrize(("name", "said", "inside"), OPEN)
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_an_end_inside_a_thought_is_told(tmp_path: Path, dialect: Dialect, name: str, said: str, inside: bool):
    source, added = MODELS[name]
    call = AddedToken("<tool_call>", normalized=False)
    template, tools = model(tmp_path, source, [*added, call]), TOOLS if name == "may" else None
    tokens = (*template.codec.encode(said, special=False), *template.codec.eos)
    pipeline = FakePipeline(lambda _: [said], result=Result(said, tokens, "stop", statistics(3, 9), 0))

    for stream in (False, True):
        warnings = dialect.reply(dialect.answer(pipeline, template, stream=stream, tools=tools)).warnings
        assert sum("inside a thought" in text for text in warnings) == inside


@pytest.mark.parametrize("name", ["always", "may", "harmony"])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_a_request_or_the_server_has_the_thought_closed(models: dict[str, ChatTemplate], dialect: Dialect, name: str):
    close, template = {"reasoning_eos": "close"}, models[name]
    own = asked(dialect.path, dialect.body({**HELLO, **close}), template)
    keeps = asked(dialect.path, dialect.body({**HELLO, "reasoning_eos": "keep"}), template, defaults=close)
    (end,) = template.codec.encode("<|end|>" if name == "harmony" else "</think>", special=False)

    assert own.params.closed_thought is not None
    assert (own.params.closed_thought.end, own.params.closed_thought.opened) == ((end,), name == "always")
    assert own.warnings == []
    assert asked(dialect.path, dialect.body(HELLO), template, defaults=close).params == own.params
    assert keeps.params == asked(dialect.path, dialect.body(HELLO), template).params
    assert keeps.params.closed_thought is None


def test_models_without_thoughts_write_markers_as_text():
    message = post(CHAT, HELLO, saying(["<think>a</think>b"])).json()["choices"][0]["message"]
    (told,) = asked(CHAT, {**HELLO, "reasoning_eos": "close"}).warnings

    assert message["content"] == "<think>a</think>b"
    assert "reasoning_content" not in message
    assert told.endswith("so the request for it has no effect.")


# What is asked -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("effort", "told"), [("high", "high"), ("minimal", "low"), (None, "medium")])
def test_a_template_that_knows_the_effort_gets_it(harmony: ChatTemplate, effort: str | None, told: str):
    tokens = asked(CHAT, {**HELLO, "reasoning_effort": effort}, harmony).tokens

    assert tokens == harmony.tokens(HELLO["messages"], reasoning_effort=told)


@pytest.mark.parametrize("name", ["messages", "tools", "self", "template", "text", "name", "cls", "documents"])
def test_requests_do_not_replace_their_messages_by_template_variables(models: dict[str, ChatTemplate], name: str):
    body = {**HELLO, "chat_template_kwargs": {name: [] if name == "messages" else 1}}
    response = post(CHAT, body, template=models["qwen"])

    refused = name in ("messages", "tools", "self")
    assert response.status_code == (400 if refused else 200)
    assert not refused or response.json()["error"]["param"] == "chat_template_kwargs"


EARLIER = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    {"role": "user", "content": "Why?"},
]


def test_earlier_reasoning_reaches_templates_that_use_it(models: dict[str, ChatTemplate]):
    renamed = [EARLIER[0], {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, EARLIER[2]]
    hidden = {"type": "redacted_thinking", "data": "x"}
    hiding = MESSAGES.body({"messages": EARLIER})
    hiding["messages"][1]["content"].insert(0, hidden)
    bodies = [(each.path, each.body({"messages": EARLIER})) for each in (CHATS, RESPONSES, MESSAGES)]

    for path, body in [*bodies, (CHAT, {"messages": renamed}), (MESSAGES.path, hiding)]:
        assert asked(path, body, models["qwen"]).prompt == "user:Hi\nassistant:(Hm.)Yes.\nuser:Why?\nassistant:"
    assert asked(CHAT, {"messages": EARLIER}).prompt == "User: Hi\nAssistant: Yes.\nUser: Why?\nAssistant:"


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
    codec = harmony.codec
    shown = tuple(asked(CHAT, HELLO, harmony).params.shown)
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
    return asked(path, body, template).params.grammar


def test_a_line_break_before_the_thought_is_allowed_where_the_template_has_it(tmp_path: Path):
    glm = QWEN.replace("{{ message.role }}:", "{{ message.role }}:{{ '' if true else '\\n<think>' }}")
    template = model(tmp_path, glm, MARKS)

    assert takes(template, bound(template, {**HELLO, **IN_FORM}), '\n<think>Hm.</think>\n"yes"')
    (tmp_path / "chat_template.jinja").write_text(glm.replace("assistant:", "assistant:\n"))
    assert not takes(template, bound(ChatTemplate(tmp_path), {**HELLO, **IN_FORM}), '\n<think>Hm.</think>\n"yes"')


def test_without_thoughts_in_the_template_or_tokens_for_markers_a_schema_binds_the_whole_answer(
    tmp_path: Path, models: dict[str, ChatTemplate]
):
    for template in (model(tmp_path, "{{ messages[0].content }}", MARKS), models["qwen"]):
        assert bound(template, {**HELLO, **IN_FORM}) == response_grammar(FORM)


@pytest.mark.parametrize(
    ("body", "param"), [({"tool_choice": "required"}, "tool_choice"), ({"response_format": FORM}, "response_format")]
)
def test_calls_that_can_not_be_enforced_are_refused(tmp_path: Path, body: dict[str, Any], param: str):
    template = model(tmp_path, "{{ tools }}{{ messages[0].content }}<atem:function_calls>")
    response = post(CHAT, {**HELLO, "tools": TOOLS, **body}, template=template)

    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


ADDS = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}'
ANALYSIS = "<|channel|>analysis<|message|>Let me add.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant"


OTHER, ARGUMENTS = ADDS.replace("add", "other"), ADDS.replace('{"a":1}', "[1]")
DEMANDED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
IN_FORM: dict[str, Any] = {"response_format": FORM}
STRICT: dict[str, Any] = {"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]}
THOUGHT = "<think>Hm.</think>\n\n"


AHEAD = f"{CHANNELS}<|end|><|start|>assistant"
BUDGET = {"thinking_budget": 3}
ENFORCED: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    # The model, what is asked, what it may say, and what not.
    ("always", IN_FORM, ['Hm.\n</think>\n\n"yes"'], ["Hm.\n</think>\n\nyes", '"yes"']),
    ("harmony", IN_FORM, [AHEAD + FINAL + '"yes"'], [AHEAD + FINAL + "yes", '"yes"']),
    ("may", IN_FORM, ['"yes"', THOUGHT + '"yes"'], []),
    ("may", {**IN_FORM, "enable_thinking": False}, ['"yes"'], [THOUGHT + '"yes"']),
    ("may", DEMANDED, [THOUGHT + CALL], [THOUGHT + "No."]),
    ("may", {"tools": TOOLS, **IN_FORM}, ['"yes"', CALL, f"{CALL}\n{CALL}", THOUGHT + CALL],
     ["yes", f'"yes"{CALL}', f"I add. {CALL}", CALL[:-3]]),
    ("harmony", DEMANDED,
     [ahead + said
      for said in (ADDS, ' to=functions.add<|channel|>commentary json<|message|>{"a":1}')
      for ahead in ("", ANALYSIS, PREAMBLE, ANALYSIS + PREAMBLE)],
     [FINAL + "No.", ANALYSIS + FINAL + "No.", OTHER, ARGUMENTS, ADDS[:-1], ADDS + ".", ANALYSIS]),
    ("harmony", STRICT, [ADDS, ANALYSIS + ADDS, FINAL + "No.\nNever.", ANALYSIS + FINAL + "No."],
     [ARGUMENTS, ANALYSIS + OTHER, "No."]),
    ("harmony", {"tools": TOOLS, **IN_FORM}, [ADDS, ANALYSIS + ADDS, FINAL + '"yes"', ANALYSIS + FINAL + '"yes"'],
     [FINAL + "yes", ANALYSIS + FINAL + '"yes".', '"yes"', ARGUMENTS]),
    ("always", BUDGET, ["a b</think>Yes.", "a</think>Yes.<think>b</think>No."],
     ["a b c d e f</think>Yes.", "a b</think>Yes.<think>c d e f</think>No."]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "allowed", "refused"), ENFORCED)
def test_forms_calls_and_budgets_are_enforced_beside_thoughts(
    models: dict[str, ChatTemplate], name: str, more: dict[str, Any], allowed: list[str], refused: list[str]
):
    template = models[name]
    grammar = bound(template, {**HELLO, **more})

    assert [said for said in allowed if not takes(template, grammar, said)] == []
    assert [said for said in refused if takes(template, grammar, said)] == []


def test_a_budget_puts_no_end_into_a_call(tmp_path: Path):
    template = model(tmp_path, QWEN, [*MARKS, AddedToken("<tool_call>", normalized=False)])
    said = "<think>a<tool_call>b c d e f"

    assert takes(template, bound(template, {**HELLO, **BUDGET, "tools": TOOLS}), said)
    assert not takes(template, bound(template, {**HELLO, **BUDGET}), said)


def test_a_budget_binds_where_a_thought_can_be_ended(models: dict[str, ChatTemplate]):
    thinking = {"type": "enabled", "budget_tokens": 3}
    always, harmony = models["always"], models["harmony"]

    assert bound(always, {**HI, "thinking": thinking}, "/v1/messages") == bound(always, {**HELLO, **BUDGET})
    assert bound(always, HELLO) is None
    assert bound(harmony, {**HELLO, **BUDGET}) is not None
    assert bound(harmony, {**HELLO, **BUDGET, "tools": TOOLS}) is None
    assert bound(TEMPLATE, {**HELLO, **BUDGET}) is None
