"""Laws of layers that the library computes whole: they are mlx-lm's own, and no row depends on those beside it."""

import os
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import make_prompt_cache

from draft_worker.short_head import shorten_head
from orchestrator.machine.blas.library import blas_environment, fast_blas
from protocol.inference.joint_forward import ForwardPart, evaluate_together
from protocol.inference.language_model import LanguageModel
from protocol.inference.observed_modules import observing
from protocol.inference.tree_sequence import TreeSequence
from protocol.inference.whole_layers import _Layers, _Network
from protocol.sampling.threefry import gumbel, noise_bits, noise_row
from target_worker.disk_cache.snapshot import CHUNK, Snapshot
from tests.protocol.inference import test_processor_attention
from tests.protocol.inference.test_processor_attention import PRELOADED, with_the_library
from tests.support.paths import ROOT

_TEXT = [(7 * place * place + 3) % 90 for place in range(320)]
_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 90, "rope_theta": 1e4},
    **{"max_position_embeddings": 512, "tie_word_embeddings": True},
}


def model(code: Any = llama, **changes: Any) -> LanguageModel:
    mx.random.seed(5)
    network = code.Model(code.ModelArgs.from_dict({**_SIZES, "head_dim": 16, "model_type": "x", **changes}))
    mx.eval(network.parameters())
    return LanguageModel(network)


def begun(made: LanguageModel, tokens: int) -> TreeSequence:
    sequence = made.sequence()
    sequence.prefill(_TEXT[:tokens])
    return sequence


def chained(sequence: TreeSequence, begin: int, width: int) -> np.ndarray:
    """(40, V), behind tokens that are evaluated so many at a time and committed."""
    rows = []
    for at in range(begin, begin + 40, width):
        first = sequence.next_row
        rows.append(np.array(sequence.evaluate(_TEXT[at : at + width], [-1, *range(first, first + width - 1)])))
        sequence.keep(range(first, first + width), ())
    return np.concatenate(rows)


@pytest.mark.skipif(PRELOADED, reason="this is the process that it starts")
def test_all_this_holds_where_the_library_computes_it():
    blas = fast_blas()
    if sys.platform != "linux" or blas is None or not blas.reads_16_bits:
        pytest.skip("no bridge for this processor")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [__file__, test_processor_attention.__file__]
    variables = {**os.environ, **blas_environment(), "OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout


@with_the_library
@pytest.mark.parametrize(
    ("code", "changes", "layers"),
    [
        (llama, {}, 3),
        (llama, {"tie_word_embeddings": False}, 3),
        (llama, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 3),
        (llama, {"rope_traditional": True}, 0),
        (llama, {"mlp_bias": True}, 0),
        (llama, {"head_dim": 24}, 0),
        (llama, {"intermediate_size": 100}, 0),
        (qwen2, {}, 0),
        (qwen3, {}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("begin", [0, 1, 230])
def test_it_is_mlx_lm_own_layer_where_it_has_the_form(
    code: Any, changes: dict[str, Any], layers: int, begin: int, monkeypatch: pytest.MonkeyPatch
):
    """Across a growth of the KV, too."""
    made, called, own = model(code, **changes), list[int](), _Layers.__call__
    monkeypatch.setattr(
        _Layers, "__call__", lambda self, *given: called.append(len(self._held[0])) or own(self, *given)
    )
    made.sequence().evaluate([1, 2], [-1, 0])
    assert called == ([layers] if layers else [])
    stock = make_prompt_cache(made.network)
    if begin:
        made.network(mx.array(_TEXT[:begin])[None], cache=stock)
    right = [np.array(made.network(mx.array([[token]]), cache=stock)[0, -1]) for token in _TEXT[begin : begin + 40]]

    assert np.allclose(chained(begun(made, begin), begin, 5), np.stack(right), rtol=1e-4, atol=1e-4)


@with_the_library
@pytest.mark.parametrize("begin", [0, 230])
def test_a_row_does_not_depend_on_those_beside_it(begin: int):
    made = model()
    alone = chained(begun(made, begin), begin, 1)

    for width in (2, 4, 5, 8, 20):
        assert np.array_equal(chained(begun(made, begin), begin, width), alone), width
    one, other = begun(made, begin), begun(made, 17)
    joint = evaluate_together(
        made.network, [ForwardPart(one, _TEXT[begin : begin + 3], [-1, 0, 1]), ForwardPart(other, [3, 4], [-1, -1])]
    )
    assert np.array_equal(np.array(joint[0]), alone[:3])
    assert np.array_equal(np.array(joint[1]), np.array(begun(made, 17).evaluate([3, 4], [-1, -1])))


@with_the_library
def test_observed_layers_have_the_same_bits():
    """A drafter that reads them may attach at any time."""
    made = model()
    alone = chained(begun(made, 30), 30, 4)
    for module in (made.network.layers[1], made.network.model.norm):
        seen = list[mx.array]()
        with observing([module], lambda _, __, result, seen=seen: seen.append(result) or result):
            assert np.array_equal(chained(begun(made, 30), 30, 4), alone)
        assert len(seen) == 1 + 40 // 4


@with_the_library
@pytest.mark.parametrize("tied", [True, False])
def test_a_short_head_has_its_rows_of_the_whole_one(tied: bool):
    made, tokens = model(tie_word_embeddings=tied), np.array([3, 8, 21, 40], np.int32)
    whole = chained(begun(made, 30), 30, 4)
    head = shorten_head(made.network, tokens)
    assert np.array_equal(chained(begun(made, 30), 30, 4), whole[:, tokens])
    if tied:
        head.widen([7, 2])
        assert np.array_equal(chained(begun(made, 30), 30, 4), whole[:, [*tokens, 7, 2]])


@with_the_library
def test_a_prompt_has_no_logits_until_somebody_reads_them(monkeypatch: pytest.MonkeyPatch):
    made, heads, own = model(), list[int](), _Network._head
    right = np.array(made.network(mx.array(_TEXT[:30])[None])[0])
    monkeypatch.setattr(_Network, "_head", lambda self: heads.append(1) or own(self))
    sequence = made.sequence()
    logits = sequence.prefill(_TEXT[:30])

    assert not heads
    assert np.allclose(np.array(logits), right, rtol=1e-4, atol=1e-4)
    sequence.evaluate([1], [-1])
    assert heads == [1]


@with_the_library
@pytest.mark.parametrize("vocabulary", [90, 49_152])
def test_noise_is_that_of_the_generator(vocabulary: int):
    for seed, position in ((0x9E3779B9, 1234), (0, 0), ((1 << 40) + 5, (1 << 24) - 1)):
        row = noise_row(seed, position, vocabulary)
        assert row is not None
        right = gumbel(noise_bits(seed, position, np.arange(vocabulary), vocabulary))
        assert np.abs(row - right).max() < 4e-6


@with_the_library
def test_noise_of_the_least_and_the_greatest_number_is_finite():
    rows = np.concatenate([row for at in range(400) if (row := noise_row(7, at, 1 << 16)) is not None])
    assert np.isfinite(rows).all()
    assert rows.max() > 15
    assert rows.min() < -2.6


def test_without_the_library_there_is_no_row_of_noise():
    assert PRELOADED or noise_row(1, 2, 90) is None


@with_the_library
def test_a_tree_row_sees_its_path():
    made = model()
    tree = np.array(begun(made, 250).evaluate([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2]))
    [joint] = evaluate_together(made.network, [ForwardPart(begun(made, 250), [5, 6, 7, 8, 9], [-1, 0, 0, 1, 2])])
    assert np.array_equal(np.array(joint), tree)
    for path, row in (([5], 0), ([5, 6], 1), ([5, 7], 2), ([5, 6, 8], 3), ([5, 7, 9], 4)):
        alone = begun(made, 250).evaluate(path, [-1, *range(len(path) - 1)])[-1]
        assert np.allclose(tree[row], np.array(alone), rtol=1e-4, atol=1e-4), path


@with_the_library
def test_copies_stay_as_they_are_when_their_original_goes_on():
    made = model()
    sequence = begun(made, CHUNK)
    copied, kept = sequence.copy(CHUNK), Snapshot(sequence, 0, ()).chunk(0)
    right = [rows.copy() for rows in sequence.export(0, CHUNK)[0]]
    mx.eval(kept.arrays)
    sequence.truncate(CHUNK - 50)
    chained(sequence, CHUNK - 48, 4)

    assert all(np.array_equal(*rows) for rows in zip(copied.export(0, CHUNK)[0], right, strict=True))
    assert all(np.array_equal(kept.arrays[f"{layer}.keys"][0], rows) for layer, rows in enumerate(right))


@with_the_library
def test_a_shortened_sequence_goes_on_as_if_it_had_always_been_so_short():
    made = model()
    sequence = begun(made, 300)
    sequence.shorten(280)
    sequence.truncate(100)

    assert np.array_equal(chained(sequence, 100, 5), chained(begun(made, 100), 100, 5))
