"""Times forwards of random models by mlx-lm and by us, in turns. Nothing is downloaded.

`python -m orchestrator.lab.bench.forwards_process ORDER` writes one JSON report a line.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from orchestrator.lab.bench.forwards import (
    PROMPT,
    Built,
    ComparisonOrder,
    ComparisonReport,
    LayerKind,
    ModelSize,
    Sampled,
)
from protocol.child_process import claim_output
from protocol.inference.language_model import LanguageModel
from protocol.inference.layer_cache import FoldingCache, RowCache
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=ComparisonOrder)
    tell = claim_output()
    # On a processor only this process's own time counts: other programs may be at work too.
    clock = time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter
    for kind in order.kinds:
        for report in compare(kind, order, clock):
            tell(report)
    return 0


class StockSequence:
    """Forwards behind one context."""

    def __init__(self, network: Any, context: Sequence[int]) -> None:
        self._network = network
        self._caches = make_prompt_cache(network)
        self._written = 0
        """Tokens behind the context."""
        mx.eval(network(mx.array([list(context[:PROMPT])]), cache=self._caches))
        for cache in self._caches:
            _lengthen(cache, len(context))
        # A cache that can be trimmed now is trimmed later; the others get a copy of what they hold now.
        self._saved = [None if cache.is_trimmable() else _copied(vars(cache)) for cache in self._caches]

    def evaluate(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        self._written += len(tokens)
        return self._network(mx.array([list(tokens)]), cache=self._caches).squeeze(0)

    def undo(self) -> None:
        """Return to the context; computed on return."""
        for cache, saved in zip(self._caches, self._saved, strict=True):
            if saved is None:
                cache.trim(self._written)
            else:
                vars(cache).update(_copied(saved))
        self._written = 0


def _lengthen(cache: Any, length: int) -> None:
    """Repeat what a cache of mlx-lm's holds of a prompt, as if it were so many tokens long."""
    if isinstance(cache, KVCache) and cache.offset < length:
        rows: tuple[Any, Any] = cache.keys_and_values()
        keys, values = rows
        vars(cache).update(keys=_repeated(keys, length), values=_repeated(values, length))
    if isinstance(cache, KVCache | RotatingKVCache):
        # A window that is full has the same rows behind any context.
        cache.offset = length


def _repeated(rows: mx.array, length: int) -> mx.array:
    """(1, heads, length, size) in memory of its own."""
    times = -(-length // rows.shape[2])
    repeated = mx.contiguous(mx.concatenate([rows] * times, axis=2)[:, :, :length])
    mx.eval(repeated)
    return repeated


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """In memory of its own, which a forward may overwrite."""
    copied = tree_map(lambda leaf: leaf + mx.zeros((), leaf.dtype) if isinstance(leaf, mx.array) else leaf, state)
    mx.eval(copied)
    return copied


class OurSequence:
    """Forwards behind one context."""

    def __init__(self, model: LanguageModel, context: Sequence[int]) -> None:
        self._sequence = model.sequence()
        self._sequence.prefill(context[:PROMPT])
        if len(context) > PROMPT:
            self._sequence = _longer(model, self._sequence, context)
        self._context = len(context)
        self._first = 0
        """Number of the first row of the last forward."""

    def chain(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed."""
        return self._evaluated(tokens, range(-1, len(tokens) - 1))

    def tree(self, tokens: Sequence[int]) -> mx.array:
        """(L, V) logits, not yet computed, of a balanced binary tree."""
        return self._evaluated(tokens, [(row - 1) // 2 for row in range(len(tokens))])

    def keep(self, rows: int) -> None:
        """Commit the first of the last chain's rows, drop the others; computed on return."""
        self._sequence.keep(range(self._first, self._first + rows), ())
        mx.eval([cache.arrays for cache in self._sequence.caches])

    def undo(self) -> None:
        """Return to the context."""
        self._sequence.truncate(self._context)

    def _evaluated(self, tokens: Sequence[int], parents: Sequence[int]) -> mx.array:
        """A parent is an index among the tokens, or -1."""
        self._first = self._sequence.next_row
        return self._sequence.evaluate(tokens, [self._first + row if row >= 0 else PREFIX for row in parents])


def _longer(model: LanguageModel, prompt: TreeSequence, context: Sequence[int]) -> TreeSequence:
    """A sequence behind this context, whose caches repeat those of its prompt."""
    long, length = model.sequence(), len(context)
    for cache, short in zip(long.caches, prompt.caches, strict=True):
        if isinstance(cache, FoldingCache) and isinstance(short, FoldingCache):
            cache.resume(length, short.state(PROMPT))
        elif isinstance(cache, RowCache) and isinstance(short, RowCache):
            first = 0 if cache.window is None else length - PROMPT
            keys, values = (_repeated(rows, length - first) for rows in short.rows(slice(0, PROMPT)))
            cache.adopt(keys, values, first)
    long.resumed(context)
    return long


Clock = Callable[[], float]
"""Seconds."""
Forward = Callable[[Sequence[int]], mx.array]


def compare(kind: LayerKind, order: ComparisonOrder, clock: Clock) -> Iterator[ComparisonReport]:
    """Reports of one kind. The first sample warms up and is not reported."""
    network = random_network(kind, order.size)
    # Ours wraps parts of a model: mlx-lm runs on one without wrappers.
    model = LanguageModel(same_network(network))
    parameters = sum(array.size for _, array in tree_flatten(network.parameters()) if isinstance(array, mx.array))
    yield Built(kind, model.architecture, model.level, parameters)
    random = np.random.default_rng(0)
    for length in order.contexts:
        context = random.integers(model.vocabulary, size=length).tolist()
        stock, ours = StockSequence(network, context), OurSequence(model, context)
        for sample in range(1 + order.samples):
            tokens = random.integers(model.vocabulary, size=max(*order.widths, 2 * order.round)).tolist()
            times = {width: _turns(stock, ours, tokens[:width], model.level, sample, clock) for width in order.widths}
            whole, undo = _round(ours, tokens, order.round, model.level, clock)
            if sample:
                by_name = {name: _of(name, times) for name in ("stock", "chain", "tree")}
                yield Sampled(kind=kind, context=length, **by_name, round=1e3 * whole, undo=1e3 * undo)


def _turns(
    stock: StockSequence, ours: OurSequence, tokens: Sequence[int], level: Level, turn: int, clock: Clock
) -> dict[str, float]:
    """Seconds of a forward by everyone."""
    contenders: list[tuple[str, StockSequence | OurSequence, Forward]]
    contenders = [("stock", stock, stock.evaluate), ("chain", ours, ours.chain)]
    if level == "tree":
        contenders.append(("tree", ours, ours.tree))
    # Each goes first in its turn: what the one before leaves in the processor's caches favours nobody.
    first = turn % len(contenders)
    seconds = {}
    for name, sequence, forward in contenders[first:] + contenders[:first]:
        seconds[name] = _timed(clock, forward, tokens)
        sequence.undo()
    return seconds


def _round(ours: OurSequence, tokens: Sequence[int], width: int, level: Level, clock: Clock) -> tuple[float, float]:
    """Seconds of a forward over a chain, and of committing its first half."""
    chain, after = tokens[:width], tokens[width : 2 * width]
    whole = _timed(clock, ours.chain, chain)
    began = clock()
    ours.keep(width // 2)
    undo = clock() - began
    if level != "tree":
        # These caches go back to the begin of the chain, and the next forward repeats what was accepted.
        repeated = _timed(clock, ours.chain, after)
        ours.undo()
        _timed(clock, ours.chain, chain)
        ours.keep(width)
        undo += repeated - _timed(clock, ours.chain, after)
    ours.undo()
    return whole, undo


def _timed(clock: Clock, forward: Forward, tokens: Sequence[int]) -> float:
    began = clock()
    mx.eval(forward(tokens))
    return clock() - began


def _of(name: str, times: dict[int, dict[str, float]]) -> dict[int, float]:
    """Milliseconds by width."""
    return {width: 1e3 * seconds[name] for width, seconds in times.items() if name in seconds}


_CONTEXT = 65_536
_PERIOD = 4
"""In a model of two kinds of layers every fourth one has full attention, where the model that is named has no other
share."""


class _Size(NamedTuple):
    """Of a layer with attention, and the layers."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    layers: int
    vocabulary: int = 4096


_TINY = _Size(hidden=128, heads=2, kv_heads=1, head=64, feed_forward=384, layers=4, vocabulary=256)
_ROWS_OF_EXPERTS = 8
"""Experts of one token."""


def random_network(kind: LayerKind, size: ModelSize) -> Any:
    """An mlx-lm model with float32 weights, which are computed."""
    architecture, measured, particular = _KINDS[kind]
    sizes = measured if size == "measured" else _TINY
    module = import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(0)
    arguments = {**_common(sizes), **particular(sizes), "model_type": architecture}
    network = module.Model(module.ModelArgs.from_dict(arguments))
    network.set_dtype(mx.float32)
    network.eval()
    mx.eval(network.parameters())
    return network


def same_network(network: Any) -> Any:
    """Another model object with the same weights, in the same memory."""
    other = type(network)(network.args)
    other.update(network.parameters())
    other.eval()
    return other


def _common(size: _Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocabulary,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }


def _experts(size: _Size) -> dict[str, Any]:
    return {
        "num_experts": 16 * _ROWS_OF_EXPERTS,
        "num_experts_per_tok": _ROWS_OF_EXPERTS,
        "moe_intermediate_size": size.feed_forward // _ROWS_OF_EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _windows(size: _Size) -> dict[str, Any]:
    return {
        "sliding_window": 4 * size.head,
        "sliding_window_pattern": min(6, size.layers),
        "query_pre_attn_scalar": size.head,
    }


def _latent(size: _Size) -> dict[str, Any]:
    return {
        "first_k_dense_replace": size.layers,
        "num_key_value_heads": size.heads,
        "kv_lora_rank": size.hidden // 4,
        "q_lora_rank": 3 * size.hidden // 8,
        "qk_nope_head_dim": 3 * size.head // 4,
        "qk_rope_head_dim": size.head // 4,
        "v_head_dim": size.head,
    }


def _delta(size: _Size) -> dict[str, Any]:
    return {
        "full_attention_interval": _PERIOD,
        "linear_num_key_heads": size.heads,
        "linear_num_value_heads": 2 * size.heads,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
        "linear_conv_kernel_dim": 4,
    }


def _space(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "mamba", "attention"),
        "mamba_n_heads": 2 * size.heads,
        "mamba_d_head": size.head,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "shared_intermediate_size": size.feed_forward,
        **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
        "attention_multiplier": size.head**-0.5,
    }


def _convolution(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "conv", "full_attention"),
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": size.hidden,
        "block_ff_dim": size.feed_forward,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _rwkv(size: _Size) -> dict[str, Any]:
    ranks = ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim")
    return dict.fromkeys(ranks, size.hidden // 16)


def _alternating(size: _Size, common: str, every_fourth: str) -> list[str]:
    return [common if (layer + 1) % _PERIOD else every_fourth for layer in range(size.layers)]


_KINDS: Mapping[LayerKind, tuple[str, _Size, Callable[[_Size], dict[str, Any]]]] = {
    "attention": ("qwen3", _Size(4096, 32, 8, 128, 12_288, 2), lambda _: {}),  # Qwen3-8B
    "experts": ("qwen3_moe", _Size(2048, 32, 4, 128, 6144, 1), _experts),  # Qwen3-30B-A3B
    "windows": ("gemma3_text", _Size(2560, 8, 4, 256, 10_240, 6), _windows),  # Gemma 3 4B
    "latent": ("deepseek_v3", _Size(2048, 20, 20, 256, 7680, 3), _latent),  # GLM-4.7-Flash, its experts as one
    "delta": ("qwen3_5", _Size(2560, 16, 4, 256, 9216, 4), _delta),  # Qwen3.5-4B
    "space": ("granitemoehybrid", _Size(2048, 32, 8, 64, 8192, 4), _space),  # Granite 4.0 H Micro
    "convolution": ("lfm2", _Size(2048, 32, 8, 64, 10_752, 4), _convolution),  # LFM2-2.6B
    "rwkv": ("rwkv7", _Size(2048, 32, 32, 64, 8192, 4), _rwkv),  # RWKV 7 1.5B
}
"""The module of mlx-lm, the sizes of a model with such layers, and the fields that only this kind has."""


if __name__ == "__main__":
    sys.exit(main())
