"""A few layers of the target in training, as a language model of their own, and which places of a row count."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from draft_worker.drafters.files import parameters, save
from draft_worker.training.rows import Row
from draft_worker.training.target import Target, trained
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.contracts.training import DEPTHS

Judge: TypeAlias = Callable[[np.ndarray, mx.array], np.ndarray]
"""(n,) slots and the (n, head) logits of the tokens behind them, to (n,) bools: the guess is the target's token."""
NO_PLACE = -1
GIVEN = 0.15
"""Share of the places in prompts that count: the draft reads them, and need not guess them."""


class Layers(nn.Module):
    """Decoder layers of the target's own class, and a norm."""

    def __init__(self, target: Target, chosen: list[int]) -> None:
        super().__init__()
        self.layers = [_copied(target, number) for number in chosen]
        self.norm = nn.RMSNorm(target.width, target.norm_epsilon)
        self.norm.weight = target.norm

    def __call__(self, states: mx.array, visible: mx.array) -> mx.array:
        """(slots, width) states behind the norm. `visible` (slots, slots)."""
        states = states[None]
        for layer in self.layers:
            states = layer(states, visible, None)
        return self.norm(states[0])


class LanguageTraining:
    """A language model of a few of the target's layers, between its embedding and a part of its head."""

    def __init__(self, target: Target, head_tokens: np.ndarray, layers: int) -> None:
        """`head_tokens`: (head,) ascending, those that it can guess."""
        last = target.layers - 1
        self._target, self._head_tokens = target, head_tokens
        self._chosen = sorted({*range(min(layers - 1, last)), last})
        self._head = target.head(mx.array(head_tokens))
        self.network = Layers(target, self._chosen)
        self.parameters_per_guess = trained(self.network) + self._head.size
        """Parameters that a chain of guesses reads, by guess."""

    def loss(self, row: Row, random: np.random.Generator) -> mx.array:
        """A scalar; 0 if nothing in the row counts."""
        places = counted(row, random)
        if not len(places):
            return mx.array(0.0)
        # A draft whose head is its embedding can also guess the tokens of its context.
        context = row.tokens if self._target.tied else row.tokens[:0]
        head = self._target.head(mx.array(np.union1d(self._head_tokens, context)))
        choices = wanted(mx.array(row.states[places]) @ head.T, row.temperature)
        return loss(self._states(row, places) @ head.T, choices).mean()

    def hits(self, row: Row, places: np.ndarray, judge: Judge) -> np.ndarray:
        """(places, DEPTHS) int8: 1 the guess is right, 0 wrong, NO_PLACE where none is wanted. Guess d of place p is
        the token behind slot p + d, where the tokens in front of it are the target's own."""
        right = np.zeros(len(row.tokens), np.int8)
        right[places] = judge(places, self._states(row, places) @ self._head.T)
        found, lengths = np.full((len(places), DEPTHS), NO_PLACE, np.int8), reach(row)[places]
        for depth in range(DEPTHS):
            going = lengths > depth
            found[going, depth] = right[places[going] + depth]
        return found

    def write(self, folder: Path) -> None:
        named = {f"model.{name}": array for name, array in parameters(self.network)}
        named["model.embed_tokens.weight"] = self._target.embed(mx.arange(self._target.vocabulary))
        if not self._target.tied:
            named["lm_head.weight"] = self._target.head()
        removed = {"quantization", "quantization_config"}
        config = {name: value for name, value in self._target.config.items() if name not in removed}
        config |= {"num_hidden_layers": len(self._chosen), "torch_dtype": "float16"}
        if config.get("layer_types"):
            config["layer_types"] = [config["layer_types"][number] for number in self._chosen]
        save(folder, config, [(name, array.astype(mx.float16)) for name, array in named.items()])
        np.save(folder / HEAD_TOKENS, self._head_tokens.astype(np.int32))
        for file in self._target.folder.glob("tokenizer*.json"):
            shutil.copyfile(file, folder / file.name)

    def _states(self, row: Row, places: np.ndarray) -> mx.array:
        """(places, width): behind the norm."""
        slots = np.arange(len(row.tokens))
        visible: Any = (slots <= slots[:, None]) & (slots >= row.starts[:, None])
        embedded = self._target.embed(mx.array(row.tokens))
        return self.network(embedded, mx.array(visible))[mx.array(places)]


def _copied(target: Target, number: int) -> nn.Module:
    """A layer of the target in float32, to be trained."""
    layer = type(target.stack.layers[number])(target.model.args)
    layer.load_weights(list(target.layer(number).items()))
    return layer


def counted(row: Row, random: np.random.Generator) -> np.ndarray:
    """Places that count in a loss, ascending."""
    inside = np.zeros(len(row.tokens), bool)
    inside[:-1] = row.starts[1:] == row.starts[:-1]
    return np.flatnonzero(row.wanted | (inside & (random.random(len(row.tokens)) < GIVEN)))


def reach(row: Row) -> np.ndarray:
    """(slots,): how many places from this one on, without a gap, have a next token that the target wrote."""
    lengths = np.zeros(len(row.wanted) + 1, np.int32)
    for slot in range(len(row.wanted) - 1, -1, -1):
        lengths[slot] = lengths[slot + 1] + 1 if row.wanted[slot] else 0
    return lengths[:-1]


DIVERGENCE = 0.6
VARIATION = 1.0


class Wanted(NamedTuple):
    """What the target chooses at n places."""

    p: mx.array
    """(n, head) probabilities, at the temperature of the text, at 1 in greedy text."""
    best: mx.array
    """(n,) its best token among the head's."""
    temperature: float


def wanted(logits: mx.array, temperature: float) -> Wanted:
    """Of the target's (n, head) logits."""
    p = mx.softmax(logits / (temperature or 1.0), axis=-1, precise=True)
    return Wanted(mx.stop_gradient(p), mx.argmax(logits, axis=-1), temperature)


def loss(logits: mx.array, target: Wanted) -> mx.array:
    """(n,) losses of a drafter's (n, head) logits.

    In text written at T > 0: DIVERGENCE x H(p, q) + VARIATION x TV(p, q), with p and q the softmax of target and
    drafter at T, and H the cross entropy, which is KL(p, q) and a constant. A guess with shared noise is right with a
    probability that 1 - TV bounds; H teaches more while q is far from p (both: Zhou et al. 2023, DistillSpec, arXiv
    2310.08461). In greedy text the target's choice is its best token: DIVERGENCE x H at T = 1 + VARIATION x the cross
    entropy of that token.
    """
    scaled = logits / (target.temperature or 1.0)
    logs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    cross = -(target.p * logs).sum(-1)
    if target.temperature == 0:
        second = -mx.take_along_axis(logs, target.best[:, None], axis=-1)[:, 0]
    else:
        second = 0.5 * mx.abs(mx.softmax(scaled, axis=-1, precise=True) - target.p).sum(-1)
    return DIVERGENCE * cross + VARIATION * second
