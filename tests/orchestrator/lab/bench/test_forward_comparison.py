"""Laws of timing forwards beside mlx-lm's own: both compute the same, and both return to the context."""

import itertools

import mlx.core as mx
import pytest

from orchestrator.lab.bench import forwards_process
from orchestrator.lab.bench.forwards import LAYER_KINDS, Built, ComparisonOrder, LayerKind, Sampled
from orchestrator.lab.bench.forwards_process import OurSequence, StockSequence, compare, random_network, same_network
from protocol.inference.language_model import LanguageModel

CONTEXT = [token % 250 for token in range(1, 300)]
"""Longer than the window of the kind that has one."""
CHAIN = [5, 9, 2, 200]
BELOW_TREE = {"rwkv"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_both_sequences_give_the_same_logits_again_after_they_are_undone(kind: LayerKind):
    network = random_network(kind, "tiny")
    model = LanguageModel(same_network(network))
    stock, ours = StockSequence(network, CONTEXT), OurSequence(model, CONTEXT)
    expected = stock.evaluate(CHAIN)
    mx.eval(expected)
    for sequence, forward in ((stock, stock.evaluate), (ours, ours.chain)):
        for other in ([7], [8, 8, 8, 8, 8]):
            mx.eval(forward(other))
            sequence.undo()
        assert mx.allclose(forward(CHAIN), expected, atol=1e-3).item()

    assert model.level == ("chain" if kind in BELOW_TREE else "tree")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_a_context_that_repeats_a_prompt_is_the_same_for_both(kind: LayerKind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forwards_process, "PROMPT", len(CONTEXT))
    network = random_network(kind, "tiny")
    context = list(range(250)) * 3
    assert len(context) > 2 * len(CONTEXT)
    stock, ours = StockSequence(network, context), OurSequence(LanguageModel(same_network(network)), context)
    expected = stock.evaluate(CHAIN)
    mx.eval(expected)
    stock.undo()
    for logits in (ours.chain(CHAIN), stock.evaluate(CHAIN)):
        assert mx.allclose(logits, expected, atol=1e-3).item()
    ours.undo()
    assert mx.allclose(ours.chain(CHAIN), expected, atol=1e-3).item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", sorted(set(LAYER_KINDS) - BELOW_TREE))
def test_the_first_tokens_of_a_tree_and_of_a_chain_are_one_path(kind: LayerKind):
    ours = OurSequence(LanguageModel(random_network(kind, "tiny")), CONTEXT)
    chain = ours.chain(CHAIN)
    mx.eval(chain)
    ours.undo()
    tree = ours.tree(CHAIN)

    assert mx.allclose(tree[:2], chain[:2], atol=1e-3).item()
    assert not mx.allclose(tree[2:], chain[2:], atol=1e-3).item()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_a_kept_half_is_committed_and_can_be_undone(kind: LayerKind):
    ours = OurSequence(LanguageModel(random_network(kind, "tiny")), CONTEXT)
    whole = ours.chain(CHAIN)
    mx.eval(whole)
    ours.undo()
    mx.eval(ours.chain([*CHAIN[:2], 1, 1]))
    ours.keep(2)
    rest = ours.chain(CHAIN[2:])

    assert mx.allclose(rest, whole[2:], atol=1e-3).item()


def test_everyone_takes_turns_at_every_width_and_the_first_turn_is_not_reported():
    ticks = itertools.count()
    order = ComparisonOrder(size="tiny", contexts=(16,), widths=(1, 3), samples=2, round=4)
    built, *samples = compare("attention", order, lambda: float(next(ticks)))

    assert isinstance(built, Built)
    assert (built.architecture, built.level) == ("qwen3", "tree")
    assert len(samples) == 2
    for sample in samples:
        assert isinstance(sample, Sampled)
        assert sample.stock == sample.chain == sample.tree == {1: 1000.0, 3: 1000.0}
        assert (sample.round, sample.undo) == (1000.0, 1000.0)


def test_what_the_next_forward_repeats_counts_as_undoing():
    order = ComparisonOrder(size="tiny", contexts=(16,), widths=(1,), samples=1, round=4)
    # Of the clock, each pair is one time: two warm forwards, a round, its keep, and two next forwards.
    seconds = [1.0, 1.0, 1.0, 0.5, 3.0, 1.0, 2.0]
    ticks = itertools.accumulate(each for length in 2 * seconds for each in (0.0, length))
    _, sample = compare("rwkv", order, lambda: next(ticks))

    assert isinstance(sample, Sampled)
    assert sample.tree == {}
    assert sample.undo == pytest.approx(1e3 * (0.5 + 3.0 - 2.0))
