"""Laws of instructions: whatever a template does with roles, the model reads every instruction, or somebody is told."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.mending import Conversation, mended
from protocol.errors import InputError
from tests.orchestrator.text.test_chat_template import model

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
        (FIRST_ONLY, [SYSTEM, HI, ANSWER, LATER], "<system>Be brief.<user>Hi<assistant>Yes?<user>Be quick."),
        (FIRST_ONLY, [SYSTEM, HI, LATER, ANSWER], "<system>Be brief.<user>Hi\n\nBe quick.<assistant>Yes?"),
        (FIRST_ONLY, [HI, ANSWER, LATER, DEVELOPER, HI], "<user>Hi<assistant>Yes?<user>Be quick.\n\nBe kind.\n\nHi"),
        (NO_SYSTEM, [SYSTEM, DEVELOPER, HI], f"<user>{BOTH}\n\nHi"),
        (NO_SYSTEM, [SYSTEM, ANSWER], "<user>Be brief.<assistant>Yes?"),
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
    assert (rendering.text, rendering.left_out, rendering.mended) == ("Yes?", ("system", "user"), ())


def test_a_template_that_refuses_every_form_says_why(tmp_path: Path):
    with pytest.raises(InputError, match="never"):
        ChatTemplate(model(tmp_path, "{{ raise_exception('never') }}")).render([SYSTEM, HI])


def test_a_conversation_that_is_rendered_whole_is_tried_once():
    seen: list[Conversation] = []

    def render(conversation: Conversation) -> str:
        seen.append(conversation)
        return "".join(message["content"] for message in conversation.messages)

    mended(Conversation([SYSTEM, HI]), render)

    (tried,) = seen
    assert [message["role"] for message in tried.messages] == ["system", "user"]
    assert not {"Be brief.", "Hi"} & {message["content"] for message in tried.messages}
