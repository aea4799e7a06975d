"""Laws of chat templates: a model's own as transformers renders it, the plain one, and every instruction is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.repairs import Conversation, repaired
from orchestrator.text.template_sources import Question, ask
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
CODEC = TextCodec(DEMO)
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & ü?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CHATML = """
{%- if tools %}
    {{- '<|im_start|>tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {%- if loop.last %}{%- break %}{%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- bos_token + '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}
"""


def model(folder: Path, template: object = None, **files: str) -> Path:
    shutil.copy(DEMO / "tokenizer.json", folder)
    settings = json.loads((DEMO / "tokenizer_config.json").read_bytes())
    settings |= {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (folder / f"chat_template.{name}").write_text(text)
    return folder


def test_without_a_template_a_conversation_is_named_turns():
    template = ChatTemplate(DEMO)

    assert not template.own
    assert "\nUser:" in template.stops
    assert template.text(ASKED) == "Be brief.\n\nUser: 1 < 2 & ü?\nAssistant: Yes.\nUser: Why?\nAssistant:"
    assert template.tokens(ASKED) == TextCodec(DEMO).encode(template.text(ASKED))


def test_a_model_s_template_is_rendered_as_those_of_hugging_face_are(tmp_path: Path):
    template = ChatTemplate(model(tmp_path, CHATML))

    text = template.text(ASKED, TOOLS, enable_thinking=False)

    assert text == (
        '<|im_start|>tools\n{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
        "<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2 & ü?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<s><|im_start|>assistant\n"
        "<think></think>"
    )
    assert template.own
    assert template.knows_tools
    assert template.stops == ()


@pytest.mark.slow
def test_transformers_renders_it_the_same(tmp_path: Path):
    from transformers import AutoTokenizer

    template = ChatTemplate(model(tmp_path, CHATML))
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    for tools, answering in ((None, True), (TOOLS, True), (TOOLS, False)):
        ours = template.text(ASKED, tools, answering=answering)
        assert ours == theirs.apply_chat_template(ASKED, tools, add_generation_prompt=answering, tokenize=False)


def test_a_file_of_its_own_counts_before_the_settings_and_tools_may_have_their_own(tmp_path: Path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools[0].type }}"}]
    template = ChatTemplate(model(tmp_path, named))

    assert template.text(ASKED) == "plain"
    assert template.text(ASKED, TOOLS) == "with function"

    assert ChatTemplate(model(tmp_path, "old", json='{"chat_template": "new"}')).text(ASKED) == "new"
    assert ChatTemplate(model(tmp_path, "old", jinja="newest")).text(ASKED) == "newest"


def test_text_parts_are_joined_and_other_parts_refused():
    template = ChatTemplate(DEMO)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert template.text([{"role": "user", "content": parts}]) == "User: ab\nAssistant:"
    with pytest.raises(InputError, match="no text"):
        template.text([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(InputError, match="must be one of"):
        template.text([{"role": "wizard", "content": "x"}])
    with pytest.raises(InputError, match="type int"):
        template.text([{"role": "user", "content": 3}])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "broken"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{{ messages[9].content + 1 }}", "refuses"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refuses"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_sentence(tmp_path: Path, source: str, words: str):
    with pytest.raises(InputError, match=words):
        ChatTemplate(model(tmp_path, source)).text(ASKED)


TURNS = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + END + '\n' }}{% endfor %}"""


def ending(folder: Path, end: str, template: str = TURNS, ends: object = 2) -> TextCodec:
    """The tokenizer of a model whose template ends its turns with `end`, and whose config names `ends`."""
    model(folder, template.replace("END", f"'{end}'"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|channel|>", end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    return TextCodec(folder)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"])
def test_the_end_of_a_turn_is_found_in_the_template(tmp_path: Path, end: str):
    codec = ending(tmp_path, end)

    assert codec.eos - {codec.id_of(end)} == TextCodec(DEMO).eos | {2}
    assert codec.id_of(end) in codec.eos


def test_a_template_that_writes_a_named_end_adds_none(tmp_path: Path):
    named = TextCodec(DEMO).eos
    written = ending(tmp_path, "<|im_end|>", TURNS.replace("+ END", f"+ END + '{TextCodec(DEMO).shown(min(named))}'"))

    assert written.eos == named | {2}


def test_a_token_that_ends_the_parts_of_an_answer_is_no_end(tmp_path: Path):
    codec = ending(tmp_path, "<|end|>", TURNS.replace("'<|im_start|>'", "'<|channel|>'"))

    assert codec.id_of("<|end|>") not in codec.eos


@pytest.mark.parametrize("written", [False, True])
def test_a_conversation_begins_with_exactly_one_bos(tmp_path: Path, written: bool):
    ending(tmp_path, "<|im_end|>", "{{ bos_token }}" * written + TURNS)
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer.enable_truncation(1)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(file))
    template = ChatTemplate(tmp_path)

    tokens = template.tokens(ASKED)

    assert tokens == [bos, *template.codec.encode(template.text(ASKED).removeprefix("<s>"), special=False)]
    assert template.codec.encode("<s>Once") == template.codec.encode("Once") != template.codec.encode("Once", False)


TOO_LONG, TOO_LARGE = "takes over 5 s of processor time", "takes over 512 MiB of memory"
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x|length }}"
HOSTILE = {
    "center": ("{{ 'a'|center(1000000000) }}", TOO_LARGE),
    "times": ("{{ 'a' * 9999999999 }}", TOO_LARGE),
    "doubling": (DOUBLING, TOO_LARGE),
    "a text that grows": ("{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}", TOO_LARGE),
    "indent": ("{{ ('a\n' * 9999)|indent(999999) }}", TOO_LARGE),
    "replace": ("{{ ('a' * 99999)|replace('a', 'a' * 99999) }}", TOO_LARGE),
    "tojson": ("{{ messages|tojson(indent=999999999) }}", TOO_LARGE),
    "a long text": ("{{ 'a' * 9999999 }}", "makes a far longer text than the messages"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "nesting": ("{{ " + "(" * 9999 + ")" * 9999 + " }}", "is broken"),
    "digits": ("{{ 10 ** 99999 }}", "limit .* for integer string conversion"),
    "loops": (LOOPS, TOO_LONG),
    "powers": ("{{ messages|length + 9 ** (9 ** 9) }}", TOO_LONG),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_refuses_within_its_bounds(tmp_path: Path, name: str):
    source, words = HOSTILE[name]
    template = ChatTemplate(model(tmp_path, source), CODEC)

    with pytest.raises(InputError, match=f"^The model's chat template .*{words}"):
        template.render(ASKED)
    assert ask(Question("{{ messages[0].content }}", ASKED)).text == "Be brief."


# Instructions: whatever a template does with roles, the model reads each, or somebody is told --------

HI = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Be kind."}
LATER = {"role": "system", "content": "Be quick."}
ANSWER = {"role": "assistant", "content": "Yes?"}
BOTH = "Be brief.\n\nBe kind."
ONLY_SYSTEM = (
    "{% for m in messages %}{% if m.role in ('system', 'user') or (m.role == 'assistant' and not m.tool_calls) %}"
    "<{{ m.role }}>{{ m.content | trim }}{% endif %}{% endfor %}"
)
"""As Qwen's templates, which drop other roles."""
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DEVELOPER_FIRST = (
    "{% if messages[0].role in ('system', 'developer') %}<rules>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
"""As gpt-oss' template, which knows developer messages, the first one."""


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (ONLY_SYSTEM, [DEVELOPER, HI], "<system>Be kind.<user>Hi"),
        (ONLY_SYSTEM, [SYSTEM, DEVELOPER, HI, LATER], "<system>Be brief.<system>Be kind.<user>Hi<system>Be quick."),
        (FIRST_ONLY, [SYSTEM, DEVELOPER, HI], f"<system>{BOTH}<user>Hi"),
        (FIRST_ONLY, [HI, ANSWER, LATER, DEVELOPER, HI], "<user>Hi<assistant>Yes?<user>Be quick.\n\nBe kind.\n\nHi"),
        (NO_SYSTEM, [SYSTEM, DEVELOPER, HI], f"<user>{BOTH}\n\nHi"),
        (DEVELOPER_FIRST, [DEVELOPER, HI], "<rules>Be kind.<user>Hi"),
        (DEVELOPER_FIRST, [SYSTEM, DEVELOPER, HI], f"<rules>{BOTH}<user>Hi"),
        (DEVELOPER_FIRST, [HI, LATER], "<user>Hi\n\nBe quick."),
    ],
)
def test_the_model_reads_every_instruction(tmp_path: Path, source: str, messages: list[dict[str, Any]], text: str):
    rendering = ChatTemplate(model(tmp_path, source)).render(messages)

    assert (rendering.text, rendering.left_out) == (text, ())


def test_what_a_template_leaves_out_is_told_by_role(tmp_path: Path):
    call = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "f"}}]}
    silent = {**call, "content": ""}
    result = {"role": "tool", "content": "4"}

    rendering = ChatTemplate(model(tmp_path, ONLY_SYSTEM)).render([DEVELOPER, HI, silent, result, call, result])

    assert rendering.text == "<system>Be kind.<user>Hi"
    assert rendering.left_out == ("tool", "assistant", "tool")


def test_a_template_without_a_place_for_instructions_renders_the_rest(tmp_path: Path):
    template = ChatTemplate(
        model(tmp_path, "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}")
    )

    rendering = template.render([SYSTEM, HI, ANSWER])
    assert (rendering.text, rendering.left_out, rendering.repaired) == ("Yes?", ("system", "user"), ())


def test_a_conversation_that_is_rendered_whole_is_tried_once():
    seen: list[Conversation] = []

    def render(conversation: Conversation) -> str:
        seen.append(conversation)
        return "".join(message["content"] for message in conversation.messages)

    repaired(Conversation([SYSTEM, HI]), render)

    (tried,) = seen
    assert [message["role"] for message in tried.messages] == ["system", "user"]
    assert not {"Be brief.", "Hi"} & {message["content"] for message in tried.messages}
