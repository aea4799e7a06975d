"""A few layers of the target in training: behind its first ones (an early exit), or by themselves (a language model).

The early exit is LayerSkip's (arXiv 2404.16710) for a target that was not trained for it: one more layer and a norm
make up for that. Neither reads features, so staleness costs nothing.
"""

import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from draft_worker.drafters.files import save
from draft_worker.training.columns import counted, no_hits, reach, windows
from draft_worker.training.corpus.guessable import Guessable
from draft_worker.training.corpus.rows import Row
from draft_worker.training.kind import CHAIN, Judge, TrainingSetting
from draft_worker.training.losses import loss, wanted
from draft_worker.training.target import Target, trained
from protocol.errors import InputError

_LANGUAGE_LAYERS = 3


def exit_layers(layers: int) -> int:
    """The default number of the target's layers in front of the exit."""
    return max(1, round(layers / 4))


def outputs(layers: int, chosen: int) -> tuple[int, ...]:
    """What the exit's own layer reads. Raises InputError for an exit behind the target's last layers."""
    behind = chosen or exit_layers(layers)
    if behind >= layers:
        raise InputError(
            f"--layers {behind}: the target has {layers} layers, so an exit leaves behind 1 to {layers - 1}."
        )
    return (behind - 1,)


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


class LayersTraining(ABC):
    """What both have in common: a guess depends only on the tokens in front of it."""

    tables = ()

    def __init__(self, setting: TrainingSetting, chosen: list[int], guessable: Guessable) -> None:
        self._target, self._guessable = setting.target, guessable
        self._head = setting.target.head(guessable.tokens)
        self._chosen = chosen
        self.network = Layers(setting.target, chosen)
        self.parameters_per_guess = trained(self.network) + self._head.size

    def loss(self, row: Row, random: np.random.Generator) -> mx.array:
        places = counted(row, random)
        if not len(places):
            return mx.array(0.0)
        tokens, offsets = self._learnt(row, random)
        head = self._target.head(tokens)
        choices = wanted(mx.array(row.states[places, -1]) @ head.T + offsets, row.temperature)
        return loss(self._states(row, places) @ head.T + offsets, choices).mean()

    def hits(self, row: Row, places: np.ndarray, judge: Judge) -> np.ndarray:
        right = np.zeros(len(row.tokens), np.int8)
        right[places] = judge(places, self._states(row, places) @ self._head.T)
        chain, lengths = no_hits(places), np.minimum(reach(row)[places], CHAIN)
        for step in range(CHAIN):
            going = lengths > step
            chain[going, step] = right[places[going] + step]
        return windows(chain)

    def _states(self, row: Row, places: np.ndarray) -> mx.array:
        """(places, width): behind the norm."""
        slots = np.arange(len(row.tokens))
        visible: Any = (slots <= slots[:, None]) & (slots >= row.starts[:, None])
        return self.network(self._entering(row), mx.array(visible))[mx.array(places)]

    def _learnt(self, row: Row, random: np.random.Generator) -> tuple[mx.array, mx.array]:
        """Tokens among which the row is learnt, and what to add to their logits."""
        return self._guessable.drawn(random)

    @abstractmethod
    def _entering(self, row: Row) -> mx.array:
        """(slots, width): what the first layer reads."""


class ExitTraining(LayersTraining):
    """One layer behind the first of the target's."""

    def __init__(self, setting: TrainingSetting) -> None:
        target = setting.target
        super().__init__(setting, [target.layers - 1], Guessable(target, setting.head_tokens))
        self._layers = setting.layers or exit_layers(target.layers)
        self._column = setting.outputs.index(self._layers - 1)
        first = sum(weight.size for number in range(self._layers) for weight in target.layer(number).values())
        self.parameters_per_guess += first

    def _entering(self, row: Row) -> mx.array:
        return mx.array(row.states[:, self._column])

    def write(self, folder: Path) -> None:
        named = {f"exit_layer.{name}": array for name, array in _flat(self.network.layers[0])}
        named["exit_norm.weight"] = self.network.norm.weight
        config = {"model_type": "exit", "layers": self._layers, "num_target_layers": self._target.layers}
        save(folder, config, [(name, array.astype(mx.float16)) for name, array in named.items()])
        self._guessable.write(folder)


class LanguageTraining(LayersTraining):
    """A language model of a few of the target's layers, between its embedding and a part of its head."""

    def __init__(self, setting: TrainingSetting) -> None:
        count = setting.layers or _LANGUAGE_LAYERS
        last = setting.target.layers - 1
        chosen = sorted({*range(min(count - 1, last)), last})
        super().__init__(setting, chosen, Guessable(setting.target, setting.head_tokens, others=0))

    def _entering(self, row: Row) -> mx.array:
        return self._target.embed(mx.array(row.tokens))

    def _learnt(self, row: Row, random: np.random.Generator) -> tuple[mx.array, mx.array]:
        """A draft whose head is its embedding can also guess the tokens of its context."""
        context = row.tokens if self._target.tied else row.tokens[:0]
        tokens = mx.array(np.union1d(np.array(self._guessable.tokens), context))
        return tokens, mx.zeros(tokens.shape)

    def write(self, folder: Path) -> None:
        named = {f"model.{name}": array for name, array in _flat(self.network)}
        named["model.embed_tokens.weight"] = self._target.embed(mx.arange(self._target.vocabulary))
        if not self._target.tied:
            named["lm_head.weight"] = self._target.head()
        removed = {"quantization", "quantization_config"}
        config = {name: value for name, value in self._target.config.items() if name not in removed}
        config |= {"num_hidden_layers": len(self._chosen), "torch_dtype": "float16"}
        if config.get("layer_types"):
            config["layer_types"] = [config["layer_types"][number] for number in self._chosen]
        save(folder, config, [(name, array.astype(mx.float16)) for name, array in named.items()])
        self._guessable.write(folder)
        for file in self._target.folder.glob("tokenizer*.json"):
            shutil.copyfile(file, folder / file.name)


def _copied(target: Target, number: int) -> nn.Module:
    """A layer of the target in float32, to be trained."""
    try:
        layer = type(target.stack.layers[number])(target.model.args)
        layer.load_weights(list(target.layer(number).items()))
    except (TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"The layers of {target.folder} can't be trained one by one ({error}): choose the kind eagle3, dspark "
            "or dflash, or a target of the Llama or Qwen family."
        ) from error
    return layer


def _flat(module: nn.Module) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(module.parameters())
    return flat
