"""Compares and times a model's forwards by width and context: `python -m orchestrator.lab.forwards_process ORDER`.

One JSON report a line. A forward over several tokens must give the logits of as many forwards over one token; on a
GPU it does up to the order of sums, and where two tokens are nearly tied, the order decides.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_moe

from draft_worker.conditioned.runner import ConditionedNetwork
from draft_worker.drafters.eagle3 import Eagle3
from orchestrator.lab.forwards import (
    Compared,
    ForwardOrder,
    ForwardReport,
    ForwardsReady,
    ForwardTimed,
    Gap,
    Loop,
    LoopTimed,
    Parting,
    Shape,
    Ties,
)
from protocol.child_process import claim_output
from protocol.contracts.drafters.description import Eagle3Form
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.packed_weights import dequantized
from protocol.inference.slots import PREFIX
from protocol.inference.stored_model import stock_network
from protocol.inference.tree_sequence import Tokens, TreeSequence
from protocol.messages.base import Level
from protocol.messages.sampling import Sampling
from protocol.sampling.gumbel_noise import Noise, scores

Clock = Callable[[], float]
"""Seconds."""
_WARM_UP = 2
_SHAPES: Mapping[Level, tuple[Shape, ...]] = {"tree": ("chain", "tree"), "chain": ("chain",), "plain": ()}
"""Of forwards over several tokens, by what the model evaluates."""
_CHUNK = 512
_COMPUTED = 32
"""Tokens of a context whose KV is computed; that of the others is made up where the layers allow it."""
_MOST_MADE_UP = 1 << 15
_TREE = (PREFIX, 0, 0, 1, 1)
"""Parents of the rows of a loop over trees."""
_TOGETHER = 3
"""Texts of a joint forward: ends of one text, of different lengths."""
_MIB = 1 << 20
ELEMENTS = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_WORDS = 1024
_MIXTURE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "vocab_size": _WORDS, "num_hidden_layers": 6, "max_position_embeddings": 4096},
    **{"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e6},
    **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "intermediate_size": 512},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "tie_word_embeddings": False},
    "rms_norm_eps": 1e-6,
}


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=ForwardOrder)
    tell = claim_output()
    for report in stock_loop(order, time.perf_counter):
        tell(report)
    kind = None if order.precision == "stored" else ELEMENTS[order.precision]
    if order.folder:
        model = LanguageModel.load(Path(order.folder), kind and Unpacked(kind))
    else:
        model = made_up(kind or mx.bfloat16, order.drafter)
    for report in examine(model, order, time.perf_counter):
        tell(report)
    return 0


class Unpacked:
    """For `LanguageModel.load`: the whole network, with every weight unpacked to one type."""

    def __init__(self, kind: mx.Dtype) -> None:
        self._kind = kind

    def divide(self, network: Any) -> None:
        """Unpack in place. Weights are not read yet."""
        dequantized(network).set_dtype(self._kind)

    def await_loaded(self) -> None:
        """Nobody else loads."""


def stock_loop(order: ForwardOrder, clock: Clock) -> Iterator[LoopTimed]:
    """mlx-lm's own loop on its own network, before ours takes the memory."""
    if order.rounds:
        network = stock_network(Path(order.folder))
        steps = generate_step(mx.array(order.tokens[: order.prompt]), network, max_tokens=-1)
        yield _looped("mlx-lm", 1, 0, lambda: next(steps), order.rounds, clock)
        del network, steps
        mx.clear_cache()


def made_up(kind: mx.Dtype, drafter: int) -> LanguageModel:
    """With random weights: an EAGLE-3 drafter of this width, in proportion to those for Llama 3.1 8B; for width 0 a
    small mixture of experts, packed into 4 bits as most published ones are. `kind`: of its activations."""
    mx.random.seed(0)
    if not drafter:
        model: Any = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(_MIXTURE))
        model.set_dtype(kind)
        nn.quantize(model, 64, 4)
        return LanguageModel(model, config=_MIXTURE)
    form = Eagle3Form(
        outputs=(1, 15, 28),
        output_width=drafter,
        width=drafter,
        inner=7 * drafter // 2,
        heads=drafter // 128,
        kv_heads=max(1, drafter // 512),
        head_width=128,
        head_size=_WORDS,
        vocabulary=_WORDS,
        own_embedding=True,
    )
    network = Eagle3(form)
    network.set_dtype(kind)
    config = {"model_type": "eagle3", "max_position_embeddings": 4096}
    return LanguageModel(ConditionedNetwork(network, drafter, config), config=config)


def examine(model: LanguageModel, order: ForwardOrder, clock: Clock) -> Iterator[ForwardReport]:
    """Everything that the order asks for, as far as the model's level allows it, but mlx-lm's own loop."""
    sequence = model.sequence()
    first = sequence.evaluate((0,), (PREFIX,))
    device = "GPU" if mx.default_device() == mx.Device(mx.gpu) else "processor"
    weights: Any = tree_flatten(model.network.parameters())
    size = sum(values.nbytes for _, values in weights)
    yield ForwardsReady(device, str(first.dtype).removeprefix("mlx.core."), size, model.level, model.level_reason)
    # Before any other forward: the first use of a width counts.
    for context in order.contexts if order.timed else ():
        yield from _timed(model, order, context, clock)
    if order.compared:
        yield from _compared(model, order, first.dtype)
    if order.rounds:
        yield from _loops(model, order, clock)
    noise = Noise(model.vocabulary)
    for parting in order.partings:
        yield Gap(gap(model, parting, noise))


def _compared(model: LanguageModel, order: ForwardOrder, kind: mx.Dtype) -> Iterator[Ties | Compared]:
    """`kind`: of the logits."""
    expected = _rows(model, order, 1, "chain")
    yield ties(expected, float(mx.finfo(kind).eps))
    for width in order.compared:
        shapes = _SHAPES[model.level] + (("joint",) if order.joint and model.joins else ())
        for shape in shapes if width > 1 else ("chain",):
            got = _rows(model, order, width, shape)
            yield compare(expected[: len(got)], got, width, shape)


def ties(logits: np.ndarray, epsilon: float) -> Ties:
    """(N, V) float32 logits, which had a type with this distance from 1 to the next number."""
    second, first = np.sort(np.partition(logits, -2, axis=1)[:, -2:], axis=1).T
    unit = 2.0 ** np.floor(np.log2(np.maximum(np.abs(first), 1e-30))) * epsilon
    near = first - second <= unit
    return Ties(len(logits), int((first == second).sum()), int(near.sum()))


def compare(expected: np.ndarray, got: np.ndarray, width: int, shape: Shape) -> Compared:
    """(N, V) float32 logits of the same N positions."""
    spread = expected.std(axis=1)
    best, theirs = expected.argmax(axis=1), got.argmax(axis=1)
    flipped = np.flatnonzero(best != theirs)
    second, first = np.sort(np.partition(expected, -2, axis=1)[:, -2:], axis=1).T
    gaps = ((first - second) / spread)[flipped]
    difference = float((np.abs(got - expected).max(axis=1) / spread).max())
    return Compared(width, shape, len(expected), difference, len(flipped), float(gaps.max()) if len(gaps) else None)


def _rows(model: LanguageModel, order: ForwardOrder, width: int, shape: Shape) -> np.ndarray:
    """(N, V) float32: the logits at every position behind the prompt, evaluated `width` tokens at a time.

    The KV of earlier tokens is that of the same width, as in a pipeline.
    """
    starts = [order.prompt * part // _TOGETHER for part in range(_TOGETHER)] if shape == "joint" else [0]
    sequences = [_prefilled(model, order.tokens[start : order.prompt]) for start in starts]
    rest, rows = order.tokens[order.prompt :], []
    step = width if shape == "chain" else width - 1
    # Only whole forwards: a narrower last one would not be of this width.
    for begin in range(0, len(rest) - step + 1, step):
        path = rest[begin : begin + step]
        firsts = [sequence.next_row for sequence in sequences]
        leaf = () if shape == "chain" else (PREFIX,)
        parts = [
            ForwardPart(sequence, (*path, *path[: len(leaf)]), [PREFIX, *range(first, first + step - 1), *leaf])
            for sequence, first in zip(sequences, firsts, strict=True)
        ]
        # The text that is compared is the first one.
        rows.append(np.array(model.evaluate_together(parts)[0][:step].astype(mx.float32)))
        for sequence, first in zip(sequences, firsts, strict=True):
            sequence.keep(range(first, first + step), ())
    return np.concatenate(rows)


def _timed(model: LanguageModel, order: ForwardOrder, context: int, clock: Clock) -> Iterator[ForwardTimed]:
    random = np.random.default_rng(context)
    sequence = _behind(model, random.integers(model.vocabulary, size=context).tolist(), max(order.timed))
    if sequence is None:
        return
    for width in order.timed if model.level != "plain" else (1,):
        taken: list[float] = []
        for _ in range(_WARM_UP + order.samples):
            # Other tokens each time: a mixture of experts reads others for them.
            tokens, first = random.integers(model.vocabulary, size=width).tolist(), sequence.next_row
            began = clock()
            mx.eval(sequence.evaluate(tokens, [PREFIX, *range(first, first + width - 1)]))
            taken.append(clock() - began)
            sequence.truncate(context)
        yield ForwardTimed(width, context, 1e3 * median(taken[_WARM_UP:]), 1e3 * taken[0])


def _behind(model: LanguageModel, context: Sequence[int], width: int) -> TreeSequence | None:
    """None if a forward of this width behind this context can't be."""
    sequence, length = _prefilled(model, context[:_COMPUTED]), len(context)
    if length > _COMPUTED and model.level == "tree" and sequence.row_bytes and length <= _MOST_MADE_UP:
        sequence.make_up(length)
        return sequence
    return None if length + width > model.context else _prefilled(model, context)


def gap(model: LanguageModel, parting: Parting, noise: Noise) -> float:
    """See `Gap`."""
    sequence = _prefilled(model, parting.tokens[:-1])
    logits = sequence.evaluate(parting.tokens[-1:], [PREFIX])
    sampling = Sampling(temperature=parting.temperature, seed=parting.seed)
    found = np.array(scores(logits, [len(parting.tokens)], sampling, noise))[0]
    following = [float(found[token]) for token in parting.following]
    if len(following) == 1:
        # The other text ends here, by a token that is not told: at best the second one.
        following.append(float(np.partition(found, -2)[-2]))
    spread = float(np.array(logits.astype(mx.float32)).std())
    return (float(found.max()) - min(following)) * (parting.temperature or 1.0) / spread


def _loops(model: LanguageModel, order: ForwardOrder, clock: Clock) -> Iterator[LoopTimed]:
    """Our rounds of one token, as texts are decoded, and of small trees none of which is kept."""
    prompt = order.tokens[: order.prompt]
    loops: tuple[Loop, ...] = ("ahead", "waited") if model.unstage is None else ("ahead", "waited", "unstaged")
    for loop in loops:
        if loop == "unstaged" and model.unstage is not None:
            model.unstage()
        ahead = loop == "ahead"
        for parents in ((PREFIX,), _TREE) if model.level == "tree" else ((PREFIX,),):
            rounds = Rounds(_prefilled(model, prompt), parents, ahead)
            yield _looped(loop, len(parents), 0, rounds.advance, order.rounds, clock)
        for context in order.contexts:
            if (sequence := _behind(model, [0] * context, _WARM_UP + order.rounds)) is not None:
                advance = Rounds(sequence, (PREFIX,), ahead).advance
                yield _looped(loop, 1, context, advance, order.rounds, clock)


class Rounds:
    """Forwards of rows with these parents behind a text; a single row is kept, and takes the token that the last one
    picked: ahead, before anybody reads it."""

    def __init__(self, sequence: TreeSequence, parents: Sequence[int], ahead: bool) -> None:
        self._sequence, self._parents, self._ahead = sequence, parents, ahead
        self._awaited: mx.array | None = None

    def advance(self) -> None:
        sequence, first = self._sequence, self._sequence.next_row
        rows = [parent if parent == PREFIX else first + parent for parent in self._parents]
        tokens: Tokens = [first % 7 + row for row in range(len(rows))]
        if len(rows) == 1 and self._awaited is not None and sequence.level == "tree":
            tokens = self._awaited
        picks = mx.argmax(sequence.evaluate(tokens, rows), axis=-1)
        mx.async_eval(picks)
        mx.eval(self._awaited if self._ahead and self._awaited is not None else picks)
        self._awaited = picks
        sequence.keep((first,) if len(rows) == 1 else (), ())


def _looped(
    loop: Loop, width: int, context: int, advance: Callable[[], object], rounds: int, clock: Clock
) -> LoopTimed:
    for _ in range(_WARM_UP):
        advance()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    began = clock()
    for _ in range(rounds):
        advance()
    milliseconds = 1e3 * (clock() - began) / rounds
    return LoopTimed(loop, width, milliseconds, context, (mx.get_peak_memory() - held) / _MIB)


def _prefilled(model: LanguageModel, tokens: Sequence[int]) -> TreeSequence:
    sequence = model.sequence()
    for begin in range(0, len(tokens), _CHUNK):
        sequence.prefill(tokens[begin : begin + _CHUNK])
    return sequence


if __name__ == "__main__":
    sys.exit(main())
