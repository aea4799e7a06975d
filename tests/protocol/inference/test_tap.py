"""Laws of the tap: what it records is what the stock model's layers return, and nothing else about a model changes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from protocol.inference.language_model import LanguageModel
from protocol.inference.tap import Recorded, proved_tap
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import Level
from protocol.messages.features import FINAL, Taps
from tests.protocol.inference.test_architecture_levels import tokens
from tests.support.models.architecture_sizes import LAYERS
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.models.tiny_models import ELEMENT, alike, tree_model
from tests.support.models.tiny_models import network as small_network

UNTAPPED = {
    "deepseek_v41": "a layer's result is several streams",
    "gemma3n": "the same",
    "iquestloopcoder": "its model computes with the parts of its layers",
    "kimi_k3": "the final norm gets a sum of several layers' results",
    "nanbeige": "it runs its layers twice",
    "nanochat": "the final norm is no module",
    "talkie": "the same",
}
"""Modules of mlx-lm whose layers' results are not the residual stream, or whose final norm can't be seen."""
TAPPED = sorted(set(modules()) - set(UNTAPPED) - set(IMPOSSIBLE) - set(UNSTABLE))
_NORMS = (
    "norm",
    "ln",
    "ln_f",
    "norm_f",
    "final_norm",
    "output_norm",
    "final_layernorm",
    "final_layer_norm",
    "embedding_norm",
)
_PARENTS: dict[Level, tuple[int, ...]] = {"tree": (-1, 0, 0, 1), "chain": (-1, 0, 1), "plain": (-1,)}
_OUTPUTS = (FINAL, 0, 2, LAYERS - 1)


@cache
def model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name), Path(name))


@contextmanager
def recording(of: LanguageModel, outputs: Sequence[int] = _OUTPUTS) -> Iterator[None]:
    of.record(tuple(outputs))
    yield
    of.record(())


def reference(name: str, text: Sequence[int]) -> mx.array:
    """(L, 4 * width): _OUTPUTS of a stock model, by a hook in the layers' classes."""
    network = model(name).network
    with _hooked(network.layers) as states:
        mx.eval(network(mx.array([list(text)]), cache=make_prompt_cache(network)))
    layers = [states[id(layer)] for layer in network.layers]
    return mx.concatenate([_norm(network)(layers[-1]), *(layers[i] for i in _OUTPUTS[1:])], axis=-1)[0]


@contextmanager
def _hooked(layers: Sequence[Any]) -> Iterator[dict[int, mx.array]]:
    states: dict[int, mx.array] = {}
    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(layer) for layer in layers}:
            call = kind.__call__

            def kept(self: Any, *arguments: Any, call: Any = call, **others: Any) -> Any:
                result = call(self, *arguments, **others)
                states[id(self)] = result[0] if isinstance(result, tuple) else result
                return result

            patch.setattr(kind, "__call__", kept)
        yield states


def _norm(network: Any) -> Any:
    """The final norm, by its name outside the layers."""
    inside = {id(module) for layer in network.layers for module in layer.modules()}
    named = {name.split(".")[-1]: module for name, module in network.named_modules() if id(module) not in inside}
    (norm,) = [named[name] for name in _NORMS if name in named]
    return norm


def assert_close(found: Recorded | None, expected: mx.array) -> None:
    assert found is not None
    assert found.rows.shape == expected.shape
    rows = mx.array(found.rows)
    # numpy has no bfloat16.
    assert alike(rows.view(ELEMENT) if rows.dtype == mx.uint16 else rows, expected)


def grown(sequence: TreeSequence, seed: int) -> list[int]:
    """Evaluates a tree of the level's kind; its tokens."""
    parents = _PARENTS[sequence.level]
    drawn, first = tokens(len(parents), seed), sequence.next_row
    sequence.evaluate(drawn, [parent if parent < 0 else first + parent for parent in parents])
    return drawn


def paths(level: Level, drawn: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for parent, token in zip(_PARENTS[level], drawn, strict=True):
        found.append([*([] if parent < 0 else found[parent]), token])
    return found


def expected_rows(name: str, prefix: Sequence[int], drawn: Sequence[int]) -> mx.array:
    rows = [reference(name, [*prefix, *path])[-1] for path in paths(model(name).level, drawn)]
    return mx.stack(rows)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TAPPED)
def test_recorded_rows_are_what_the_layers_return(name: str):
    """Of a prompt, of a tree or what the level allows of it, and after a part of that was kept."""
    sequence, prompt = model(name).sequence(), tokens(5, 1)
    with recording(model(name)):
        sequence.prefill(prompt)
        prefilled = sequence.recorded
        first = grown(sequence, 2)
        tree = sequence.recorded
        sequence.keep([0], ())
        second = grown(sequence, 3)

    assert_close(prefilled, reference(name, prompt))
    assert_close(tree, expected_rows(name, prompt, first))
    assert_close(sequence.recorded, expected_rows(name, [*prompt, first[0]], second))


@pytest.mark.parametrize("element", [mx.float32, mx.float16, mx.bfloat16])
def test_rows_equal_those_of_the_layers_by_hand(element: mx.Dtype):
    network = small_network()
    network.set_dtype(element)
    served, text = LanguageModel(network), mx.array([[3, 1, 4]])
    sequence = served.sequence()
    with recording(served, (FINAL, 0, 1)):
        sequence.prefill([3, 1, 4])

    first = network.model.layers[0](network.model.embed_tokens(text), "causal")
    second = network.model.layers[1](first, "causal")
    by_hand = mx.concatenate([network.model.norm(second), first, second], axis=-1)[0]
    assert sequence.recorded is not None
    assert served.tap is not None
    rows = np.array(sequence.recorded.rows)
    assert rows.dtype == served.tap.element.numpy_name
    found = mx.array(rows).view(mx.bfloat16) if element == mx.bfloat16 else mx.array(rows)
    assert found.dtype == element
    assert mx.allclose(found.astype(mx.float32), by_hand.astype(mx.float32), 1e-2, 1e-2).item()


def test_recording_changes_no_logits_and_nothing_remains_of_it():
    served = tree_model()
    classes = [type(module) for module in served.network.modules()]
    expected = served.sequence().evaluate([3, 1, 4], [-1, 0, 0])
    with recording(served, (FINAL, 1)):
        layer = served.network.layers[1]
        assert isinstance(layer, classes[served.network.modules().index(layer)])
        assert type(served.network.layers[0]) is type(layer).__base__
        recorded = served.sequence().evaluate([3, 1, 4], [-1, 0, 0])
    sequence = served.sequence()
    after = sequence.evaluate([3, 1, 4], [-1, 0, 0])

    assert mx.array_equal(recorded, expected).item()
    assert mx.array_equal(after, expected).item()
    assert sequence.recorded is None
    assert [type(module) for module in served.network.modules()] == classes


@pytest.mark.parametrize("drop", [lambda sequence: sequence.truncate(1), lambda sequence: sequence.prefill(())])
def test_what_was_recorded_of_dropped_rows_is_dropped_too(drop: Callable[[TreeSequence], None]):
    served = tree_model()
    sequence = served.sequence()
    with recording(served, (0, 1)):
        sequence.prefill([3])
        sequence.evaluate([1, 4], [-1, 0])
        assert sequence.recorded is not None
        drop(sequence)

    assert sequence.recorded is None


def test_a_forward_that_fails_leaves_no_rows_to_the_next_one():
    served = tree_model()
    sequence = served.sequence()
    with recording(served, (0, 1)):
        with pytest.raises(AttributeError):
            served.network(mx.array([[5]]), cache=[None, object()])
        sequence.prefill([3, 1, 4])

    assert sequence.recorded is not None
    assert sequence.recorded.rows.shape == (3, 64)


# What can't be recorded --------------------------------------------------------------------------


@pytest.mark.thorough
def test_every_other_module_can_be_recorded():
    untapped = {name for name in set(modules()) - set(IMPOSSIBLE) if model(name).tap is None}

    assert untapped == set(UNTAPPED)
    tap = model("llama").tap
    assert tap is not None
    assert tap.taps == Taps(LAYERS, 64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNTAPPED)
def test_a_model_without_a_tap_works_as_before(name: str):
    sequence = model(name).sequence()
    model(name).record((0,))
    sequence.prefill([1, 2, 3])

    assert sequence.recorded is None


class _Bypassed(llama.Model):
    """Logits that depend on more than the last state."""

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        return super().__call__(inputs, cache) + self.model.embed_tokens(inputs).sum(axis=-1, keepdims=True)


class _Shuffled(llama.Model):
    """Layers that run in another order than they are listed."""

    @property
    def layers(self) -> Any:
        return self.model.layers[::-1]


class _Shortened(llama.Model):
    """A layer that is listed and never runs."""

    @property
    def layers(self) -> Any:
        return [*self.model.layers, *self.model.layers[:1]]


@pytest.mark.parametrize("kind", [_Bypassed, _Shuffled, _Shortened])
def test_a_model_of_which_the_records_would_be_wrong_has_no_tap(kind: type):
    network = small_network()
    assert proved_tap(network) is not None
    network.__class__ = kind

    assert proved_tap(network) is None
