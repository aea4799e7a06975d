"""Committed tokens whose rows are computed again: slots change, rows beside them stay, logits are the same."""

import mlx.core as mx
import pytest

from protocol.inference.slots import PREFIX, SlotTable
from protocol.inference.tree_sequence import TreeSequence
from tests.support.models.tiny_models import alike, stock_logits, tree_model

TOKENS = (4, 9, 1, 30, 22, 7)


def test_replaced_tokens_keep_their_order_when_rows_in_front_of_them_are_committed():
    table = SlotTable()
    table.append(3)
    table.add([PREFIX, 0, PREFIX])
    assert table.replace(1, 2) == 6
    table.keep([0], [1])

    assert table.committed_slots(0, 4).tolist() == [0, 6, 7, 3]
    assert table.row(1).position == 4
    assert table.positions().tolist() == [0, 0, 0, 3, 4, 0, 1, 2]
    table.compact()
    assert table.committed_slots(0, 4).tolist() == [0, 3, 4, 1]
    table.truncate(2)
    assert table.size == 4


@pytest.mark.parametrize("first", [0, 2, 5])
def test_replacing_tokens_by_themselves_changes_no_logits(first: int):
    model = tree_model("llama", seed=5)
    sequence = model.sequence()
    sequence.prefill(TOKENS)
    mx.eval(sequence.evaluate([11, 12], [PREFIX, 0]))

    replaced = sequence.evaluate([*TOKENS[first:], 13, 14], [1, 0], first)

    count = len(TOKENS) - first
    for row, path in ((count, [11, 12, 13]), (count + 1, [11, 14])):
        assert alike(replaced[row], stock_logits(model.network, [*TOKENS, *path]))
    assert alike(replaced[count - 1], stock_logits(model.network, list(TOKENS)))


def test_tokens_may_begin_at_any_position():
    network = tree_model("llama", seed=5).network
    shifted, plain = TreeSequence(network), TreeSequence(network)
    shifted.restart(40)

    logits = shifted.evaluate([*TOKENS, 11, 12], [PREFIX, 0], 0)

    assert shifted.position(1) == 40 + len(TOKENS) + 1
    assert alike(logits, plain.evaluate([*TOKENS, 11, 12], [PREFIX, 0], 0))
