"""A tiny thinking model with tools that writes fixed texts, so that servers can be compared by what they make of them.

Its layer adds nothing, so each token alone determines the next one. Its template ends with the last message, so the
last token of that message selects the text. Knows no MLX and no requests.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from orchestrator.machine.models.checkpoints import demo_model

THINK, ONE_CALL, TWO_CALLS, TEXT_AROUND, MALFORMED, WRONG, CUSTOM, PLAIN = (
    "(think)",
    "(call)",
    "(two calls)",
    "(text around a call)",
    "(malformed call)",
    "(wrong arguments)",
    "(call with a text)",
    "(answer)",
)
ANSWER = ("The sum", " is", " three.")
THOUGHT = ("First", " take", " one", ",", " then", " add", " two", " to", " it.")
CUSTOM_INPUT = "2 + 2"
BEFORE, AFTER = "Let me add.\n", "\nThat is it."
CUT_AFTER = 3
"""So many tokens of TWO_CALLS are a whole call and the beginning of another one."""

_HIDDEN, _CONTEXT = 256, 2048
_SHARPNESS = 24.0
"""The factor of the logits. The most probable token has nearly all of the probability."""
_END = "<|endoftext|>"
_CALL = '<tool_call>\n{"name": "add", "arguments": '
_SCRIPTS: Mapping[str, Sequence[str]] = {
    THINK: ("<think>", *THOUGHT, "</think>", *ANSWER),
    ONE_CALL: (f'{_CALL}{{"a": 1, ', '"b": 1}}\n</tool_call>'),
    TWO_CALLS: (f'{_CALL}{{"a": 2, ', '"b": 2}}\n</tool_call>', f'\n{_CALL}{{"a": 3, ', '"b": 3}}\n</tool_call>'),
    TEXT_AROUND: (BEFORE, f'{_CALL}{{"a": 4, ', '"b": 4}}\n</tool_call>', AFTER),
    MALFORMED: (f'{_CALL}{{"a": 1,, ', '"b"}}\n</tool_call>'),
    WRONG: (f"{_CALL}{{", '"a": "many", "b": null}}\n</tool_call>'),
    CUSTOM: (f'{_CALL}{{"input": ', f'"{CUSTOM_INPUT}"}}}}\n</tool_call>'),
    PLAIN: ANSWER,
}
_MARKERS = ("<think>", "</think>")
_TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n"
    'Call one by <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>\n{% endif %}'
    "{% for message in messages %}{% if message.role in ['system', 'user', 'assistant', 'tool'] %}"
    "{% if not loop.first %}\n{% endif %}{{ message.role }}: {{ message.content or '' }}"
    "{% for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function or tool_call %}"
    '<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
"""Like Qwen's, it leaves out messages of other roles."""


def scripted_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of a target and of its draft, which is the same model."""
    source = demo_model("target")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for text in (*_MARKERS, *_SCRIPTS):
        _add_marker(tokenizer, text)
    ids = {text: _added(vocabulary, text) for script in _SCRIPTS.values() for text in script}
    ids |= {text: vocabulary[text] for text in (*_SCRIPTS, _END)}
    weights = _weights(len(vocabulary), _successors(ids), ids[_END])
    for name in ("target", "draft"):
        made = folder / name
        made.mkdir(parents=True)
        shutil.copyfile(source / "tokenizer_config.json", made / "tokenizer_config.json")
        (made / "tokenizer.json").write_text(json.dumps(tokenizer))
        (made / "chat_template.jinja").write_text(_TEMPLATE)
        (made / "config.json").write_text(json.dumps(_configuration(len(vocabulary), ids[_END])))
        save_file(weights, str(made / "model.safetensors"), {"format": "mlx"})
    return folder / "target", folder / "draft"


def _add_marker(tokenizer: dict[str, Any], text: str) -> None:
    """A token that a prompt's text has wherever these letters stand."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    id = model["vocab"][text] = len(model["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added.append({"id": id, "content": text, **flags})


def _added(vocabulary: dict[str, int], text: str) -> int:
    """A token that no merge makes, so that only the model writes it."""
    letters = text.replace(" ", "Ġ").replace("\n", "Ċ")
    return vocabulary.setdefault(letters, len(vocabulary))


def _successors(ids: Mapping[str, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for select, script in _SCRIPTS.items():
        for text, following in pairwise((select, *script, _END)):
            assert found.setdefault(ids[text], ids[following]) == ids[following], f"{text!r} has two successors"
    return found


def _weights(size: int, successors: Mapping[int, int], end: int) -> dict[str, np.ndarray]:
    """Tokens without a successor are followed by the end."""
    random = np.random.default_rng(0)
    embedding = random.normal(0, 1, (size, _HIDDEN)).astype(np.float32)
    embedding *= np.sqrt(_HIDDEN) / np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros_like(embedding)
    for token, following in successors.items():
        head[following] += embedding[token]
    without = [token for token in range(size) if token not in successors]
    head[end] += embedding[without].mean(axis=0)
    zeros = np.zeros((_HIDDEN, _HIDDEN), np.float32)
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    layers = (*layers, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ones = np.ones(_HIDDEN, np.float32)
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head * (_SHARPNESS / _HIDDEN),
        **{f"model.layers.0.{name}.weight": zeros for name in layers},
        **{f"{name}.weight": ones for name in norms},
    }


def _configuration(size: int, end: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": size,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }
