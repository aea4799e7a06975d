"""Laws of chat templates: a model's own as transformers renders it, the plain one, and every instruction is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
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
    with pytest.raises(InputError, match="no chat template"):
        template.text(ASKED, TOOLS)


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


# Instructions ------------------------------------------------------------------------------------


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
        (FIRST_ONLY, [DEVELOPER, HI], "<system>Be kind.<user>Hi"),
        (FIRST_ONLY, [SYSTEM, DEVELOPER, HI], f"<system>{BOTH}<user>Hi"),
        (FIRST_ONLY, [SYSTEM, HI, ANSWER, LATER], "<system>Be brief.\n\nBe quick.<user>Hi<assistant>Yes?"),
        (NO_SYSTEM, [SYSTEM, DEVELOPER, HI], f"<user>{BOTH}\n\nHi"),
        (NO_SYSTEM, [SYSTEM, ANSWER], "<user>Be brief.<assistant>Yes?"),
        (DEVELOPER_FIRST, [DEVELOPER, HI], "<rules>Be kind.<user>Hi"),
        (DEVELOPER_FIRST, [SYSTEM, DEVELOPER, HI], f"<rules>{BOTH}<user>Hi"),
        (DEVELOPER_FIRST, [HI, LATER], "<rules>Be quick.<user>Hi"),
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

    assert template.render([SYSTEM, HI, ANSWER]) == ("Yes?", ("system", "user"))


def test_a_template_that_refuses_every_form_says_why(tmp_path: Path):
    with pytest.raises(InputError, match="never"):
        ChatTemplate(model(tmp_path, "{{ raise_exception('never') }}")).render([SYSTEM, HI])
