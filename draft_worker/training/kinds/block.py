"""DFlash, DFlash2, DSpark and JetSpec in training: blocks behind random anchors, with some known tokens in front.

DFlash: arXiv 2602.06036; DSpark: deepseek-ai/DeepSpec (deepspec/modeling/dspark). Both train anchors whose context ends
in front of them. An asynchronous draft's context ends earlier, so here up to 8 tokens behind the context are known
inputs of the block (a clean prefix).

JetSpec (arXiv 2606.18394) is DFlash with attention that is causal in the block, and a loss of its own. DFlash2's
selector learns to choose among the drafter's best tokens (vllm-project/speculators: models/dflash2).
"""

from math import gcd
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from draft_worker.drafters.block import BlockDrafter, BlockPart
from draft_worker.drafters.block_checkpoint import write_block
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.training.columns import counted
from draft_worker.training.corpus.guessable import Guessable
from draft_worker.training.corpus.rows import Row
from draft_worker.training.kind import NO_PLACE, Judge, TrainingSetting
from draft_worker.training.losses import among, forward_divergence, loss, wanted
from draft_worker.training.target import Target, fitting, trained
from protocol.contracts.drafters.description import BlockForm
from protocol.contracts.training import DEPTHS, STALENESS

ANCHORS = 32
"""Blocks of a row."""
DECAY = 4.0
"""gamma of the weights exp(-k / gamma) of a block's guesses (both papers)."""
LAYERS = 2
RANK = 64
CHOICES, TAPS, TAP_GROUP = 16, 2, 16
"""Of DFlash2, as published."""
BlockTrainedKind: TypeAlias = Literal["dspark", "dflash", "dflash2", "jetspec"]


def outputs(layers: int) -> tuple[int, ...]:
    """Five, evenly spread as z-lab/dflash spreads them, up to the highest that EAGLE-3 reads: one tap serves both."""
    return tuple(sorted({int(number) for number in np.linspace(1, max(1, layers - 4), 5).round()}))


class Blocks(NamedTuple):
    """Inputs of several blocks behind one another."""

    tokens: np.ndarray
    positions: np.ndarray
    numbers: np.ndarray
    """(inputs,): the number of the input's block."""
    known: np.ndarray
    """(inputs,): the first position that is no context of the input's block."""
    starts: np.ndarray
    """(inputs,): where the block's text begins."""
    rows: np.ndarray
    """(blocks, guesses): inputs whose states guess."""


class Guesses(NamedTuple):
    """Rows of blocks, one after the other."""

    logits: mx.array
    """(n, tokens)."""
    states: mx.array
    """(n, width), behind the final norm."""
    before: mx.array
    """(n,): the text's token in front of the guessed one."""

    def at(self, rows: mx.array) -> "Guesses":
        return Guesses(*(values[rows] for values in self))


class BlockTraining:
    """A drafter of one of these kinds."""

    tables = ("markov", "codebook")

    def __init__(self, setting: TrainingSetting, *, kind: BlockTrainedKind) -> None:
        target = setting.target
        self._target = target
        self._kind = kind
        self._form = form = _form(setting, kind)
        self._columns = [setting.outputs.index(output) for output in form.outputs]
        self._guessable = Guessable(target, setting.head_tokens)
        self.network = BlockDrafter(form)
        self.network.load_weights(fitting(self.network, _start(target, form)), strict=False)
        read = trained(self.network) - (2 * form.rank * form.vocabulary) + form.rank * len(setting.head_tokens)
        self.parameters_per_guess = (read + len(setting.head_tokens) * form.width) // form.rows

    def loss(self, row: Row, random: np.random.Generator) -> mx.array:
        places = counted(row, random)
        places = np.sort(random.permutation(places)[:ANCHORS])
        stale = np.minimum(random.integers(0, STALENESS, len(places)), places - row.starts[places])
        tokens, offsets = self._guessable.drawn(random)
        slots, inside = self._guessed(row, places - stale, stale)
        if not inside.any():
            return mx.array(0.0)
        which = mx.array(np.flatnonzero(inside))
        found = self._guesses(row, places - stale, stale, tokens, offsets)
        final = mx.array(row.states[slots[inside], -1])
        choices = wanted(final @ self._target.head(tokens).T + offsets, row.temperature)
        weights = np.exp(-np.arange(self._form.rows) / DECAY)
        weights = np.broadcast_to(weights, inside.shape)[inside]
        each = (forward_divergence if self._kind == "jetspec" else loss)(found.logits[which], choices)
        if self._form.choices:
            columns, chosen = among(found.logits[which], choices, min(self._form.choices, len(tokens)))
            each = each + loss(self._selected(found.at(which), columns, tokens), chosen)
        return (each * mx.array(weights / weights.sum())).sum()

    def hits(self, row: Row, places: np.ndarray, judge: Judge) -> np.ndarray:
        """A block has one staleness: every second place is examined with fresh features, the others in turn."""
        found = np.full((len(places), STALENESS, DEPTHS), NO_PLACE, np.int8)
        stale = np.where(np.arange(len(places)) % 2 == 0, 0, 1 + np.arange(len(places)) // 2 % (STALENESS - 1))
        tokens = self._guessable.tokens
        for first in range(0, len(places), ANCHORS):
            part = slice(first, first + ANCHORS)
            slots, inside = self._guessed(row, places[part], stale[part])
            # A guess counts if all places between the features and itself are the target's.
            inside &= _written(row, places[part], slots)
            usable = inside[:, 0]
            if not usable.any():
                continue
            guesses = self._guesses(row, places[part][usable], stale[part][usable], tokens, mx.array(0.0))
            logits = self._chosen(guesses, tokens) if self._form.choices else guesses.logits
            slots, inside = slots[usable], inside[usable]
            right = np.full(inside.shape, NO_PLACE, np.int8)
            right[inside] = judge(slots[inside], logits[mx.array(np.flatnonzero(inside))])
            which = np.flatnonzero(usable) + first
            found[which, stale[which]] = right[:, :DEPTHS]
        return found

    def write(self, folder: Path) -> None:
        network = BlockDrafter(self._form)
        network.update(tree_map(lambda array: array.astype(mx.float16), self.network.parameters()))
        ends = TokenEnds(
            lambda tokens: self._target.embed(tokens).astype(mx.float16),
            lambda states: (states @ self._target.head().T).astype(mx.float16),
            self._target.width,
            self._target.vocabulary,
        )
        write_block(folder, network, ends, self._target.config)
        self._guessable.write(folder)

    def _guessed(self, row: Row, places: np.ndarray, stale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(blocks, guesses) slots behind which a block guesses, and whether the target wrote what is there."""
        slots = (places + stale)[:, None] + np.arange(self._form.rows)
        inside = slots < len(row.tokens)
        slots = np.where(inside, slots, 0)
        return slots, inside & row.wanted[slots] & (row.starts[slots] == row.starts[places][:, None])

    def _selected(self, guesses: "Guesses", columns: mx.array, tokens: mx.array) -> mx.array:
        """(n, K) scores that the selector makes of the logits at these columns."""
        selector = self.network.candidate_selector
        corrections = selector.corrections(guesses.before, selector.hidden_projection(guesses.states), tokens[columns])
        return mx.take_along_axis(guesses.logits, columns, axis=-1) + corrections

    def _chosen(self, guesses: "Guesses", tokens: mx.array) -> mx.array:
        """(n, tokens) logits of the tokens that the selector chooses among; -inf for the others."""
        count = min(self._form.choices, len(tokens))
        columns = mx.argpartition(-guesses.logits, count - 1, axis=-1)[:, :count]
        nothing = mx.full(guesses.logits.shape, -mx.inf)
        return mx.put_along_axis(nothing, columns, self._selected(guesses, columns, tokens), axis=-1)

    def _guesses(
        self, row: Row, places: np.ndarray, stale: np.ndarray, tokens: mx.array, offsets: mx.array
    ) -> "Guesses":
        """Of (blocks * guesses) rows: context before `places`, known tokens from there to the anchor `stale` behind."""
        blocks = _blocks(row, places, stale, self._form)
        network, slots = self.network, mx.arange(len(row.tokens))[None]
        context = network.encode(mx.array(row.states[:, self._columns].reshape(1, len(row.tokens), -1)))
        positions, known = mx.array(blocks.positions)[None], mx.array(blocks.known)[None]
        text = slots[0] >= mx.array(blocks.starts)[:, None]
        text = mx.concatenate([text, mx.ones((len(blocks.tokens),) * 2, mx.bool_)], axis=1)
        visible = [
            text if mask is None else mask & text
            for mask in network.visibility(slots, positions, mx.array(blocks.numbers)[None], known)
        ]
        embedded = self._target.embed(mx.array(blocks.tokens))[None]
        part = BlockPart(len(blocks.tokens), network.keys_values(context, slots), visible)
        states = network(embedded, positions, [part], mx.array(blocks.numbers)[None])[0]
        guessing = states[mx.array(blocks.rows.reshape(-1))]
        logits = guessing @ self._target.head(tokens).T + offsets
        # The row of a mask guesses the mask's own token, that of an anchor which guesses the one behind it.
        before = blocks.positions[blocks.rows] - (0 if self._form.anchor_predicts else 1)
        before = mx.array(row.tokens[np.minimum(before, len(row.tokens) - 1)])
        if self._form.markov is not None:
            latents = network.markov_head.latents(before, guessing.reshape(*before.shape, -1))
            logits = logits + latents.reshape(-1, self._form.rank) @ network.markov_head.markov_w2.weight[tokens].T
        return Guesses(logits, guessing, before.reshape(-1))


def _written(row: Row, places: np.ndarray, slots: np.ndarray) -> np.ndarray:
    gaps = np.concatenate([[0], np.cumsum(~row.wanted)])
    return gaps[slots + 1] - gaps[places][:, None] == 0


def _blocks(row: Row, places: np.ndarray, stale: np.ndarray, form: BlockForm) -> Blocks:
    parts, rows, at = [], [], 0
    for number, (place, known) in enumerate(zip(places, stale, strict=True)):
        count = known + 1 + form.masks
        tokens = np.full(count, form.mask_token)
        tokens[: known + 1] = row.tokens[place : place + known + 1]
        each = [tokens, place + np.arange(count)]
        parts.append([*each, *(np.full(count, value) for value in (number, place, row.starts[place]))])
        first = at + known + (0 if form.anchor_predicts else 1)
        rows.append(np.arange(first, first + form.rows))
        at += count
    tokens, positions, numbers, before, starts = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Blocks(tokens, positions, numbers, before, starts, np.stack(rows))


def _form(setting: TrainingSetting, kind: BlockTrainedKind) -> BlockForm:
    dspark, dflash2 = kind == "dspark", kind == "dflash2"
    target, config = setting.target, setting.target.config
    heads = target.size("num_attention_heads")
    return BlockForm(
        width=target.width,
        layers=setting.layers or LAYERS,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=target.head_width,
        inner=target.size("intermediate_size"),
        vocabulary=target.vocabulary,
        outputs=outputs(target.layers),
        output_width=target.width,
        target_layers=target.layers,
        block=7 if dspark else 8,
        mask_token=setting.unused,
        anchor_predicts=dspark,
        clean_prefix=STALENESS,
        markov="vanilla" if dspark else None,
        rank=RANK if dspark or dflash2 else 0,
        choices=CHOICES if dflash2 else 0,
        taps=TAPS if dflash2 else 0,
        tap_group=gcd(TAP_GROUP, target.width),
        causal="all" if kind == "jetspec" else "windows",
        norm_epsilon=target.norm_epsilon,
        rope_base=target.rope_base,
        rope_scaling=target.rope_scaling,
        positions=config.get("max_position_embeddings", 4096),
    )


def _start(target: Target, form: BlockForm) -> dict[str, mx.array]:
    """Layers of the target, evenly spread from its first to its last; `fc` passes the mean of the outputs through.

    A Markov head, a selector and convolutions begin without an effect.
    """
    found = {"norm.weight": target.norm}
    chosen = np.linspace(0, target.layers - 1, form.layers).round().astype(int)
    for number, layer in enumerate(chosen):
        for name, weight in target.layer(int(layer)).items():
            found[f"layers.{number}.{name}"] = weight
    count = len(form.outputs)
    found["fc.weight"] = mx.concatenate([mx.eye(form.width) / count] * count, axis=1)
    if form.markov is not None:
        found["markov_head.markov_w2.weight"] = mx.zeros((form.vocabulary, form.rank))
    if form.choices:
        found["candidate_selector.successor_codebook"] = mx.zeros((form.vocabulary, form.rank))
    for number in range(form.layers if form.taps else 0):
        for place in ("attention_conv", "mlp_conv"):
            shape = (2 * form.taps * form.width // form.tap_group, form.width)
            found[f"layers.{number}.{place}.kernel_projection.weight"] = mx.zeros(shape)
    return found
