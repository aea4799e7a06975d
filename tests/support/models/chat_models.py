"""Models of the demo's vocabulary with chat templates that are like those of families."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from orchestrator.text.chat_template import ChatTemplate
from tests.support.paths import DEMO_TARGET

HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}\n{% endfor %}"
)
QWEN = (
    '{% if tools %}{{ tools | tojson }}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}Reasoning: {{ reasoning_effort | default('medium') }}\n"
    "{% for message in messages %}"
    "{% if message.tool_calls and message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>{{ message.role }}{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
    "{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
)
MARKS = [AddedToken(text, normalized=False) for text in ("<think>", "</think>")]
CHANNEL_MARKS = [
    AddedToken(text, special=True, normalized=False)
    for text in ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
]


def model(folder: Path, template: str, added: Sequence[AddedToken] = ()) -> ChatTemplate:
    """Of the demo's vocabulary and `added`."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    tokenizer.add_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes((DEMO_TARGET / "config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return ChatTemplate(folder)
