"""A small Llama with random weights and a long context, and a draft of its first layer. Knows no MLX."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.server_process import (
    COMPLETIONS,
    ComparedServer,
    RunningContender,
    complete,
    running,
)
from orchestrator.machine.models.checkpoints import demo_model

_HIDDEN, _HEADS, _KEY_HEADS, _INNER, _LAYERS = 128, 2, 1, 256, 2
_SPREAD = 0.03
"""Standard deviation of the weights: layers change little, so that the draft often guesses right."""


def random_pair(folder: Path, context: int) -> tuple[Path, Path]:
    """Folders of a target and its draft in mlx-lm's format, with the demo pair's tokenizer.

    1 KiB of keys and values a token and 16 MFLOP of attention a token at 32k, so that a processor reads 128k.
    """
    tokenizer = demo_model("target")
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(0, _SPREAD, shape).astype(np.float32)

    width = _HIDDEN // _HEADS
    weights = {
        "model.embed_tokens.weight": normal(vocabulary, _HIDDEN) / _SPREAD,
        "lm_head.weight": normal(vocabulary, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
    }
    for layer in range(_LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}.weight": value
            for name, value in {
                "self_attn.q_proj": normal(_HIDDEN, _HIDDEN),
                "self_attn.k_proj": normal(_KEY_HEADS * width, _HIDDEN),
                "self_attn.v_proj": normal(_KEY_HEADS * width, _HIDDEN),
                "self_attn.o_proj": normal(_HIDDEN, _HIDDEN),
                "mlp.gate_proj": normal(_INNER, _HIDDEN),
                "mlp.up_proj": normal(_INNER, _HIDDEN),
                "mlp.down_proj": normal(_HIDDEN, _INNER),
                "input_layernorm": np.ones(_HIDDEN, np.float32),
                "post_attention_layernorm": np.ones(_HIDDEN, np.float32),
            }.items()
        }
    target, draft = folder / "target", folder / "draft"
    _write(target, tokenizer, weights, vocabulary, context, _LAYERS)
    first = {name: value for name, value in weights.items() if ".layers." not in name or ".layers.0." in name}
    _write(draft, tokenizer, first, vocabulary, context, 1)
    return target, draft


def _write(
    folder: Path, tokenizer: Path, weights: dict[str, np.ndarray], vocabulary: int, context: int, layers: int
) -> None:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    config = {
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_HEADS,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "eos_token_id": json.loads((tokenizer / "config.json").read_text())["eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), {"format": "mlx"})


TOKENS = 6144
CONTEXT = TOKENS + 1024
_ANSWER = 128
"""Tokens. While they are generated, a target copies the prompt's keys and values to where the disk is written from."""
_DISK_SECONDS = 5.0
"""Between an answer and the end of its server, so that it can write to a disk."""


def long_prompts() -> dict[str, Probe]:
    return {"progress in a stream": _progress}


def restarted(server: ComparedServer) -> str:
    """Seconds to the first text of a long prompt, and again after a restart of the server."""
    (before, _), (after, cached) = (_first_text(server) for _ in range(2))
    return f"{before:.1f}, then {after:.1f} with {cached:,} tokens from the cache"


def _progress(server: RunningContender) -> str:
    """Clients skip comments of an event stream, so their users do not see what is in them."""
    lines = list(_lines(server, "1"))
    if any('"prompt_progress"' in line for line in lines):
        return "events"
    told = any(line.startswith(":") and any(letter.isdigit() for letter in line) for line in lines)
    return "comments" if told else "none"


def _first_text(server: ComparedServer) -> tuple[float, int]:
    """The tokens of the prompt that were there are the second figure."""
    times, cached = [], 0
    with running(server) as process:
        complete(process)
        began = time.monotonic()
        for line in _lines(process, "2"):
            chunk = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                times.append(time.monotonic() - began)
            cached = ((chunk.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        time.sleep(_DISK_SECONDS)
    if not times:
        raise RuntimeError(f"{server.title} answers a long prompt without text.")
    return times[0], cached


def _lines(server: RunningContender, first_word: str) -> Iterator[str]:
    """Of the stream that answers a prompt of TOKENS tokens."""
    body = {
        "prompt": f"{first_word}{' a' * (TOKENS - 1)}",
        "max_tokens": _ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body) as response:
        yield from response.iter_lines()
