"""Laws of the block drafters' networks: they compute what their published files say."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.candidates.block_candidates import SelectorTables
from draft_worker.drafters.block import read_block
from draft_worker.drafters.block_forward import Block, BlockContext, BlockKv, BlockRows, MlxBlockRunner
from draft_worker.drafters.token_ends import target_ends
from tests.support.block_reference import BlockReference
from tests.support.models.block_files import latents
from tests.support.models.trained_drafters import (
    BLOCK_KINDS,
    block_form,
    block_network,
    random_features,
)

FEATURES = random_features(9, 64)
BLOCKS = [Block([5], 9), Block([7, 3, 8], 11), Block([2, 5], 10), Block([4], 15)]


def computed(folders: dict[str, Path], kind: str, blocks: list[Block], context: Any = None) -> list[BlockRows]:
    drafter = read_block(folders[kind])
    if context is None:
        context = BlockContext(BlockKv(drafter.network))
        context.feed(0, FEATURES)
    return MlxBlockRunner(drafter.network, target_ends(folders["target"])).forward([(context, blocks)])[0]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_forward_equals_the_reference(kind: str, folders: dict[str, Path]):
    reference = BlockReference(folders[kind], folders["target"])
    for block, rows in zip(BLOCKS, computed(folders, kind, BLOCKS), strict=True):
        expected = reference.rows(block.tokens, block.position, FEATURES.astype(np.float64), range(9))
        assert np.allclose(rows.states, expected, atol=1e-4)
        assert np.allclose(rows.logits, [reference.head_logits(state) for state in expected], atol=1e-3)


def test_a_sliding_layer_sees_what_specforge_trains_it_to_see():
    """SpecForge's tests/test_utils/test_dflash_mask.py: an anchor at 6, a window and a block of 4."""
    network = block_network(block_form("z-lab", windows=(None, 4)))
    at, numbers, known = mx.arange(6, 10)[None], mx.zeros((1, 4), mx.int32), mx.full((1, 4), 6)

    full, sliding = network.visibility(mx.arange(6)[None], at, numbers, known)

    def seen(mask: mx.array | None) -> list[list[int]]:
        return [np.flatnonzero(row).tolist() for row in np.array(mask)[0, 0]]

    assert seen(full) == [[*range(10)]] * 4
    assert seen(sliding) == [[3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_correction_equals_the_reference(kind: str, folders: dict[str, Path]):
    reference = BlockReference(folders[kind], folders["target"])
    network = read_block(folders[kind]).network
    rows = computed(folders, kind, BLOCKS[:1])[0]
    path = [5, 9, 4, 1]

    found = rows.logits + network.markov_head.correction(latents(network.markov_head, mx.array(path), rows.states))

    states = np.array(rows.states, np.float64)
    expected = [reference.logits(states, path[: row + 1]) for row in range(len(path))]
    assert np.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("element", [mx.float32, mx.float16, mx.bfloat16])
def test_the_host_reads_the_selector_s_codebooks_as_the_network_does(element: mx.Dtype):
    selector = block_network(block_form("DFlash2")).candidate_selector
    selector.set_dtype(element)
    tokens, projected = np.array([3, 40, 3]), random_features(3, 6)
    choices = np.array([[1, 2, 3, 66], [5, 6, 7, 8], [9, 1, 0, 65]])
    tables = SelectorTables.of(selector.predecessor_codebook, selector.successor_codebook)

    found = tables.corrections(tokens, projected, choices)

    before = selector.predecessor_codebook[mx.array(tokens)] * mx.array(projected)
    expected = (selector.successor_codebook[mx.array(choices)] @ before[..., None])[..., 0]
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("element", [mx.float32, mx.float16, mx.bfloat16])
def test_the_largest_features_give_finite_rows(element: mx.Dtype, folders: dict[str, Path]):
    drafter = read_block(folders["vanilla"])
    drafter.network.set_dtype(element)
    context = BlockContext(BlockKv(drafter.network))
    largest = FEATURES.copy()
    largest[0], largest[1], largest[3, 5] = 6e4, -6e4, 6e4
    context.feed(0, largest)

    for rows in MlxBlockRunner(drafter.network, target_ends(folders["target"])).forward([(context, BLOCKS)])[0]:
        assert mx.isfinite(rows.logits).all().item()
