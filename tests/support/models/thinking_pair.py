"""The demo pair with the markers of a thought among its tokens, and a chat template that opens a thought."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

_MARKERS = ("<think>", "</think>")
_TEMPLATE = (
    '{% if tools %}{{ tools | tojson }}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: {% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)


def write_thinking_pair(folder: Path) -> tuple[Path, Path]:
    """Returns the folders of the target and of the draft."""
    return _model(DEMO_TARGET, folder / "target"), _model(DEMO_DRAFT, folder / "draft")


def _model(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = sorted(vocabulary, key=vocabulary.__getitem__)[-len(_MARKERS) :]
    for token, marker in zip(last, _MARKERS, strict=True):
        id = vocabulary[marker] = vocabulary.pop(token)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": id, "content": marker, "special": True, **flags})
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [merge for merge in merges if not {*_parts(merge), "".join(_parts(merge))} & {*last}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _parts(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
