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
from mlx_lm.models.cache import make_prompt_cache

from orchestrator.lab.bench.forwards import Built, ComparisonOrder, ComparisonReport, LayerKind, ModelSize, Sampled
from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX
from protocol.messages.base import Level
from protocol.report_output import claim_output


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
        mx.eval(network(mx.array([list(context)]), cache=self._caches))
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


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """In memory of its own, which a forward may overwrite."""
    copied = tree_map(lambda leaf: leaf + mx.zeros((), leaf.dtype) if isinstance(leaf, mx.array) else leaf, state)
    mx.eval(copied)
    return copied


class OurSequence:
    """Forwards behind one context."""

    def __init__(self, model: LanguageModel, context: Sequence[int]) -> None:
        self._sequence = model.sequence()
        self._sequence.prefill(context)
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
    context = random.integers(model.vocabulary, size=order.context).tolist()
    stock, ours = StockSequence(network, context), OurSequence(model, context)
    for sample in range(1 + order.samples):
        tokens = random.integers(model.vocabulary, size=max(*order.widths, 2 * order.round)).tolist()
        times = {width: _turns(stock, ours, tokens[:width], model.level, sample, clock) for width in order.widths}
        whole, undo = _round(ours, tokens, order.round, model.level, clock)
        if sample:
            by_name = {name: _of(name, times) for name in ("stock", "chain", "tree")}
            yield Sampled(kind=kind, **by_name, round=1e3 * whole, undo=1e3 * undo)


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


_HEAD = 64
_WINDOW = 128
_CONTEXT = 4096
_PERIOD = 4
"""In a model of two kinds of layers every fourth one has full attention."""


class _Size(NamedTuple):
    hidden: int
    layers: int
    vocabulary: int


_SIZES: Mapping[ModelSize, _Size] = {"measured": _Size(1024, 20, 16_384), "tiny": _Size(128, 4, 256)}


def random_network(kind: LayerKind, size: ModelSize) -> Any:
    """An mlx-lm model with float32 weights, which are computed."""
    architecture, particular = _KINDS[kind]
    sizes = _SIZES[size]
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
    heads = size.hidden // _HEAD
    return {
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_hidden_layers": size.layers,
        "vocab_size": size.vocabulary,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": _HEAD,
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }


def _windows(_: _Size) -> dict[str, Any]:
    return {"sliding_window": _WINDOW, "sliding_window_pattern": _PERIOD, "query_pre_attn_scalar": _HEAD}


def _latent(size: _Size) -> dict[str, Any]:
    return {
        "first_k_dense_replace": size.layers,
        "kv_lora_rank": size.hidden // 4,
        "q_lora_rank": None,
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _HEAD // 2,
        "v_head_dim": _HEAD,
    }


def _delta(size: _Size) -> dict[str, Any]:
    heads = size.hidden // _HEAD
    return {
        "full_attention_interval": _PERIOD,
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 2 * _HEAD),
        "linear_conv_kernel_dim": 4,
    }


def _space(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "mamba", "attention"),
        "mamba_n_heads": 2 * size.hidden // _HEAD,
        "mamba_d_head": _HEAD,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "shared_intermediate_size": 3 * size.hidden,
        **dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0),
        "attention_multiplier": _HEAD**-0.5,
    }


def _convolution(size: _Size) -> dict[str, Any]:
    return {
        "layer_types": _alternating(size, "conv", "full_attention"),
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": size.hidden,
        "block_ff_dim": 3 * size.hidden,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    }


def _rwkv(size: _Size) -> dict[str, Any]:
    ranks = ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim")
    return dict.fromkeys(ranks, size.hidden // 16)


def _alternating(size: _Size, common: str, every_fourth: str) -> list[str]:
    return [common if (layer + 1) % _PERIOD else every_fourth for layer in range(size.layers)]


_KINDS: Mapping[LayerKind, tuple[str, Callable[[_Size], dict[str, Any]]]] = {
    "attention": ("qwen3", lambda _: {}),
    "windows": ("gemma3_text", _windows),
    "latent": ("deepseek_v3", _latent),
    "delta": ("qwen3_5", _delta),
    "space": ("granitemoehybrid", _space),
    "convolution": ("lfm2", _convolution),
    "rwkv": ("rwkv7", _rwkv),
}
"""The module of mlx-lm, and the fields that only this kind has."""


if __name__ == "__main__":
    sys.exit(main())
