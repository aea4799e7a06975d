"""Models of the demo's vocabulary with chat templates that are like those of families."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from orchestrator.text.chat_template import ChatTemplate
from protocol.messages.grammar import Grammar
from protocol.sampling.grammar import GrammarError, Grammars
from tests.support.paths import DEMO_TARGET

HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}\n{% endfor %}"
)
_SHOWN = '{% if tools %}{{ tools | tojson }}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
QWEN = (
    _SHOWN + "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS = _SHOWN + "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"
HARMONY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}Reasoning: {{ reasoning_effort | default('medium') }}\n"
    "{% for message in messages %}"
    "{% if message.tool_calls and message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "<|start|>{{ message.role }}{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"
    "{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
)
SEEN = (
    "{% for m in messages %}<{{ m.role }}{{ m.tool_call_id }}>({{ m.reasoning_content }}){{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.id }}]{% endfor %}{% endfor %}{{ tools }}"
)
FORGETFUL = (
    '{{ tools | tojson if tools }}{% if tools %}<tool_call>{"arguments": ...}{% endif %}'
    "{% for m in messages if m.role != 'tool' %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
)
DEEPSEEK = (
    "{% for message in messages %}<｜{{ message['role'] }}｜>{{ message['content'] }}"
    "{% if message['tool_calls'] %}<｜tool▁calls▁begin｜>{% for tool in message['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' "
    "+ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜Assistant｜>"
)
MARKS = [AddedToken(text, normalized=False) for text in ("<think>", "</think>")]
CHANNEL_MARKS = [
    AddedToken(text, special=True, normalized=False)
    for text in ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
]
MODELS: dict[str, tuple[str, Sequence[AddedToken]]] = {
    "hermes": (HERMES, ()),
    "qwen": (QWEN, ()),
    "may": (QWEN, MARKS),
    "always": (ALWAYS, MARKS),
    "harmony": (HARMONY, CHANNEL_MARKS),
    "seen": (SEEN, ()),
    "forgetful": (FORGETFUL, ()),
    "deepseek": (DEEPSEEK, ()),
}
"""`qwen` begins a thought itself, the prompts of `always` end with its beginning, `may` has tokens for it. `seen` shows
all that it reads, `forgetful` drops results of tools."""

_TURN = "<{{ m.role }}>{{ m.content }}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}({{ c.function.arguments | tojson }}){{ c.id }}]{% endfor %}"
)
_SYNTAX = '<tool_call>{% raw %}{"name": 1, "arguments": 2}{% endraw %}</tool_call>'
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}" + _SYNTAX + "{% endfor %}"
FAMILIES = {
    "chatml": _TOOLS + "{% for m in messages %}" + _TURN + _CALLS + "{% endfor %}",
    "mistral": (
        _TOOLS + "{% set start = 1 if messages[0].role == 'system' else 0 %}{% set n = namespace(i=0) %}"
        "{% for m in messages[start:] if not (m.role == 'tool' or m.tool_calls is defined) %}"
        "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set n.i = n.i + 1 %}{% endfor %}"
        "{% for m in messages %}{% if m.role not in ('user', 'assistant', 'tool') and not loop.first %}"
        "{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id | length != 9 %}"
        "{{ raise_exception('ids of length 9') }}{% endif %}{% endfor %}"
        "{% if m.role == 'tool' and (m.tool_call_id is not defined or m.tool_call_id | length != 9) %}"
        "{{ raise_exception('ids of length 9') }}{% endif %}"
        + _TURN
        + _CALLS
        + "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}" + _TURN + "{% endfor %}"
    ),
    "llama": (
        _TOOLS + "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        + _TURN
        + _CALLS
        + "{% endfor %}"
    ),
    "qwen": (
        _TOOLS + "{% set n = namespace(asked=false) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set n.asked = true %}{% endif %}"
        "{% if m.role in ('system', 'developer') and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + _TURN + _CALLS + "{% endfor %}"
        "{% if not n.asked %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    ),
    "firm": (
        _TOOLS + "{% for m in messages %}{% if m.role == 'tool' or m.tool_calls %}{{ raise_exception('no calls') }}"
        "{% endif %}" + _TURN + "{% endfor %}"
    ),
    "strict": (
        "{% for t in tools or [] %}{{ t.function.description + t.function.parameters.properties | string }}"
        '<tool_call>{% raw %}{"name": 1, "arguments": 2}{% endraw %}</tool_call>{% endfor %}'
        "{% for m in messages %}" + _TURN + "{% endfor %}"
    ),
}
"""They refuse what those of the families refuse whose names they have."""


def model(folder: Path, template: str, added: Sequence[AddedToken] = ()) -> ChatTemplate:
    """Of the demo's vocabulary and `added`."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    tokenizer.add_tokens([*added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_bytes((DEMO_TARGET / "config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return ChatTemplate(folder)


def takes(template: ChatTemplate, grammar: Grammar | None, *said: str) -> bool:
    """Whether the grammar allows this as a complete answer, of whose pieces each is tokenized by itself."""
    assert grammar is not None
    ends = tuple(template.codec.eos)
    tokens = [token for piece in said for token in template.codec.encode(piece, special=False)]
    try:
        rules = Grammars(template.folder, 1 << 13).open(grammar, ends, tokens)
    except GrammarError:
        return False
    (mask,) = rules.allowed([()])
    return mask is not None and bool(mask[list(ends)].any())
