"""A ChatML model with a chat template that knows tools, made of one whose template does not."""

import json
from pathlib import Path

_TEMPLATE = """{%- set rules = messages[0].content if messages[0].role == "system" else "" %}
{%- if rules or tools %}<|im_start|>system
{{ rules }}{% if tools %}
Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one with <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call>{% endif %}<|im_end|>
{% endif %}
{%- for message in messages if message.role != "system" %}
{{- "<|im_start|>" + ("user" if message.role == "tool" else message.role) }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tool_template(source: Path, folder: Path) -> Path:
    """Makes `folder`, with links to the files of `source`."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _TEMPLATE}))
    return folder
