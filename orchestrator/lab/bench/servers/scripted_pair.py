"""A tiny thinking model with tools that writes fixed texts, so that servers can be compared by what they make of them.

Its layer adds nothing, so each token alone determines the next one. Its template ends with the last message, so the
last token of that message selects the text. Knows no MLX and no requests.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.server_process import (
    Body,
    RunningContender,
    TimedAnswer,
    ask,
    at_route,
    chat,
    effect,
    streamed_chat,
)
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


_BUDGET = 4
_NUMBER = {"enum": [1, 2, 3, 4]}
PARAMETERS = {
    "type": "object",
    "properties": {"a": _NUMBER, "b": _NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_STRICT, _LOOSE = (
    [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": strict}}]
    for strict in (True, False)
)
_NAMED = {"type": "function", "function": {"name": "add"}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS, "strict": True}}
_NO_THINKING = {"enable_thinking": False}


def asking(word: str) -> list[Body]:
    """A conversation that makes the model write the text of this name."""
    return [{"role": "user", "content": word}]


def thinking() -> dict[str, Probe]:
    return {
        "a thought": lambda server: _thought(_ask(server, THINK)),
        "a thought, streamed": lambda server: _where(streamed_chat(server, messages=asking(THINK), max_tokens=64)),
        "`chat_template_kwargs`": _thoughtless(chat_template_kwargs=_NO_THINKING),
        "`enable_thinking: false`": _thoughtless(**_NO_THINKING),
        '`reasoning_effort: "none"`': _thoughtless(reasoning_effort="none"),
        "`thinking_budget`": lambda server: effect(_ask(server, THINK, thinking_budget=_BUDGET), _keeps_to_budget),
        "a thought, then JSON by a schema": lambda server: effect(
            _ask(server, THINK, response_format=_FORMAT),
            lambda answer: bool(_reasoning(answer.message)) and fits(answer.message["content"]),
        ),
    }


def tool_calls() -> dict[str, Probe]:
    return {
        "two calls in an answer": lambda server: effect(
            _call(server, TWO_CALLS), lambda answer: _sums(answer.message) == [(2, 2), (3, 3)]
        ),
        "two calls, streamed": _streams_two,
        "text before and behind a call": lambda server: effect(_call(server, TEXT_AROUND), _has_text, "lost"),
        "a malformed call": lambda server: _remains(_call(server, MALFORMED)),
        "a call before one that `max_tokens` cuts": lambda server: effect(
            _cut(server), lambda answer: _sums(answer.message) == [(2, 2)]
        ),
        "the beginning of the cut call": lambda server: _remains(_cut(server)),
        "the result of a call": lambda server: effect(
            chat(server, messages=_with_result(), tools=_LOOSE),
            lambda answer: answer.message["content"] == "".join(ANSWER),
        ),
        '`tool_choice: "required"`, where the model would answer': _forced(tool_choice="required"),
        "`tool_choice`, a function's name": _forced(tool_choice=_NAMED),
        '`tool_choice: "none"`, where the model would call': lambda server: effect(
            _call(server, ONE_CALL, tool_choice="none"), lambda answer: not answer.message.get("tool_calls")
        ),
        "`parallel_tool_calls: false`": lambda server: effect(
            _call(server, TWO_CALLS, parallel_tool_calls=False), lambda answer: _sums(answer.message) == [(2, 2)]
        ),
        "`strict`, where the model would write other arguments": lambda server: effect(
            _ask(server, WRONG, tools=_STRICT), lambda answer: _calls_fit(answer.message)
        ),
        "`tools` with `response_format`": lambda server: effect(
            _call(server, PLAIN, response_format=_FORMAT),
            lambda answer: _calls_fit(answer.message) or fits(answer.message["content"]),
        ),
    }


def fits(text: str | None) -> bool:
    """Whether a text is a value of PARAMETERS."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"a", "b"} and {*value.values()} <= {*_NUMBER["enum"]}


def _ask(server: RunningContender, word: str, **fields: Any) -> TimedAnswer | None:
    return chat(server, **{"messages": asking(word), "max_tokens": 64, **fields})


def _call(server: RunningContender, word: str, **fields: Any) -> TimedAnswer | None:
    return _ask(server, word, tools=_LOOSE, **fields)


def _thought(answer: TimedAnswer | None) -> str:
    refused = effect(answer, lambda _: True)
    return _where(answer.message) if answer is not None and refused == "done" else refused


def _where(message: Body) -> str:
    told = [name for name in ("reasoning_content", "reasoning") if message.get(name) == "".join(THOUGHT)]
    return f"`{told[0]}`" if told and message["content"] == "".join(ANSWER) else "in the text"


def _reasoning(message: Body) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""


def _thoughtless(**fields: Any) -> Probe:
    """Done if the answer comes without a thought."""
    return lambda server: effect(
        _ask(server, THINK, **fields),
        lambda answer: answer.message["content"] == "".join(ANSWER) and not _reasoning(answer.message),
    )


def _keeps_to_budget(answer: TimedAnswer) -> bool:
    whole = answer.message["content"] == "".join(ANSWER)
    return whole and _reasoning(answer.message) == "".join(THOUGHT[:_BUDGET])


def _sums(message: Body) -> list[tuple[Any, Any]]:
    """What the calls of `add` would add."""
    found = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return [(arguments.get("a"), arguments.get("b")) for arguments in found]


def _calls_fit(message: Body) -> bool:
    calls = message.get("tool_calls") or ()
    return bool(calls) and all(fits(call["function"]["arguments"]) for call in calls)


def _streams_two(server: RunningContender) -> str:
    message = streamed_chat(server, messages=asking(TWO_CALLS), max_tokens=64, tools=_LOOSE)
    numbered = [call.get("index") for call in message["tool_calls"]] == [0, 1]
    return "done" if numbered and _sums(message) == [(2, 2), (3, 3)] else "lost"


def _has_text(answer: TimedAnswer) -> bool:
    text = answer.message["content"] or ""
    return BEFORE.strip() in text and AFTER.strip() in text and _sums(answer.message) == [(4, 4)]


def _cut(server: RunningContender) -> TimedAnswer | None:
    return _call(server, TWO_CALLS, max_tokens=CUT_AFTER)


def _remains(answer: TimedAnswer | None) -> str:
    """What becomes of a call that can't be read."""
    return effect(answer, lambda answer: '"add"' in (answer.message["content"] or ""), "lost").replace("done", "text")


def _forced(**fields: Any) -> Probe:
    return lambda server: effect(_call(server, PLAIN, **fields), lambda answer: _calls_fit(answer.message))


def _with_result() -> list[Body]:
    call = {"id": "one", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    said: Callable[..., Body] = dict
    return [
        *asking(ONE_CALL),
        said(role="assistant", content=None, tool_calls=[call]),
        said(role="tool", tool_call_id="one", content=PLAIN),
    ]


_RESPONSES, _MESSAGES, _OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
_FUNCTION = {"name": "add", "parameters": PARAMETERS}
_NAMESPACE = {"type": "namespace", "name": "sums", "tools": [{"type": "function", **_FUNCTION}]}
_CUSTOM = {"type": "custom", "name": "add", "description": "Adds."}
_RULE = "Answer in one sentence."


def clients() -> dict[str, Probe]:
    return {
        "the `developer` role": _developer,
        "Responses: a thought": lambda server: _respond(
            server, THINK, lambda items: [item["type"] for item in items] == ["reasoning", "message"]
        ),
        "Responses: a function of a namespace (Codex)": lambda server: _respond(
            server,
            PLAIN,
            lambda items: [(item.get("namespace"), item.get("name")) for item in _calls(items)] == [("sums", "add")],
            tools=[_NAMESPACE],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=256,
        ),
        "Responses: a custom tool (Codex)": lambda server: _respond(
            server,
            CUSTOM,
            lambda items: [(item["type"], item.get("input")) for item in items] == [("custom_tool_call", CUSTOM_INPUT)],
            tools=[_CUSTOM],
        ),
        "Responses: `previous_response_id`": _continued,
        "Messages: a thought": lambda server: at_route(
            _ask_messages(server, THINK),
            lambda answer: [block["type"] for block in answer.body["content"]] == ["thinking", "text"],
        ),
        "Messages: a call": lambda server: at_route(
            _ask_messages(server, ONE_CALL, tools=[{"name": "add", "input_schema": PARAMETERS}]),
            lambda answer: answer.body["content"][-1].get("input") == {"a": 1, "b": 1},
        ),
        "Messages: errors in Anthropic's form": _anthropic_error,
        "Ollama: a thought": lambda server: at_route(
            _ask_ollama(server, THINK), lambda answer: answer.body["message"].get("thinking") == "".join(THOUGHT)
        ),
        "Ollama: a call": lambda server: at_route(
            _ask_ollama(server, ONE_CALL, tools=[{"type": "function", "function": _FUNCTION}]),
            lambda answer: answer.body["message"]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 1},
        ),
        "Ollama: a stream": lambda server: at_route(
            _ask_ollama(server, PLAIN, stream=True), lambda answer: _lines_say(str(answer.body))
        ),
    }


def _developer(server: RunningContender) -> str:
    """Whether the model is given the message, by the length of the prompt."""

    def tokens(*before: Body) -> int | None:
        answer = chat(server, messages=[*before, *asking(PLAIN)])
        return answer.body["usage"]["prompt_tokens"] if answer is not None and answer.status == 200 else None

    found = tokens({"role": "developer", "content": _RULE})
    if found is None:
        return "refused"
    return "done" if found == tokens({"role": "system", "content": _RULE}) else "left out"


def _respond(server: RunningContender, word: str, honoured: Any, **fields: Any) -> str:
    body = {"input": word, "temperature": 0, "max_output_tokens": 64, **fields}
    return at_route(ask(server, _RESPONSES, body), lambda answer: honoured(answer.body["output"]))


def _calls(items: list[Body]) -> list[Body]:
    return [item for item in items if item["type"] == "function_call"]


def _continued(server: RunningContender) -> str:
    """Done if the earlier turns are part of the prompt."""
    first = ask(server, _RESPONSES, {"input": PLAIN, "max_output_tokens": 16})
    if first is None or first.status != 200:
        return at_route(first, lambda _: True)
    body = {"input": PLAIN, "max_output_tokens": 16, "previous_response_id": first.body["id"]}

    def longer(answer: TimedAnswer) -> bool:
        return answer.body["usage"]["input_tokens"] > first.body["usage"]["total_tokens"]

    return at_route(ask(server, _RESPONSES, body), longer)


def _ask_messages(server: RunningContender, word: str, **fields: Any) -> TimedAnswer | None:
    return ask(server, _MESSAGES, {"messages": asking(word), "max_tokens": 64, "temperature": 0, **fields})


def _anthropic_error(server: RunningContender) -> str:
    answer = _ask_messages(server, "word " * 3000)
    if answer is None or answer.status == 404:
        return at_route(answer, lambda _: True)
    known = isinstance(answer.body, dict) and answer.body.get("type") == "error"
    told = known and answer.body["error"]["message"].startswith("prompt is too long: ")
    return "done" if told and answer.status == 400 else "another form"


def _ask_ollama(server: RunningContender, word: str, **fields: Any) -> TimedAnswer | None:
    body = {"model": "demo", "messages": asking(word), "stream": False, "options": {"temperature": 0}}
    return ask(server, _OLLAMA, {**body, **fields})


def _lines_say(text: str) -> bool:
    lines = [json.loads(line) for line in text.splitlines()]
    said = "".join(line["message"]["content"] for line in lines)
    return said == "".join(ANSWER) and [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
