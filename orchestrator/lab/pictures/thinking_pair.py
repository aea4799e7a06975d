"""The default pair with a chat template that opens a thought and offers tools: no thinking model is in the package
index. Two special tokens that SmolLM2's chats never use get the names of a thought's markers; the weights stay."""

import shutil
from pathlib import Path

from orchestrator.machine.downloads.default_target import default_target
from orchestrator.machine.drafts.shipped_drafts import default_draft

_RENAMED = {"<jupyter_script>": "<think>", "<empty_output>": "</think>"}
_TEMPLATE = """\
{% if tools %}<|im_start|>system
Functions: {{ tools | tojson }}
Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def thinking_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of the target and of its draft, written below `folder`."""
    return _copy(default_target().folder, folder / "target"), _copy(default_draft().folder, folder / "draft")


def _copy(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for name, marker in _RENAMED.items():
        tokenizer = tokenizer.replace(f'"{name}"', f'"{marker}"')
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return folder
