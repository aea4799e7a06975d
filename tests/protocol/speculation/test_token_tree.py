"""Laws of the token tree: content addresses, best-first order, and what survives a commit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from protocol.messages.base import NodeId
from protocol.speculation.token_tree import Node, TokenTree, end_of_path, flatten, node_id

paths = some.lists(some.lists(some.integers(0, 4), min_size=1, max_size=5), max_size=20)


def grown(paths: list[list[int]]) -> TokenTree:
    tree = TokenTree(NodeId(1), token=9, position=10)
    for path in paths:
        node = tree.root
        for token in path:
            node = tree.add(node, token, (token + 1) / 6)
    return tree


def path_of(node: Node) -> tuple[int, ...]:
    return () if node.parent is None else (*path_of(node.parent), node.token)


@given(paths)
def test_every_distinct_path_is_one_node(paths: list[list[int]]):
    prefixes = {tuple(path[:length]) for path in paths for length in range(len(path) + 1)} | {()}

    assert sorted(path_of(node) for node in grown(paths)) == sorted(prefixes)


@given(paths)
def test_the_same_paths_have_the_same_ids_in_whatever_order_they_came(paths: list[list[int]]):
    forward = {path_of(node): node.id for node in grown(paths)}
    backward = {path_of(node): node.id for node in grown(paths[::-1])}

    assert forward == backward


@given(paths)
def test_best_gives_parents_first_and_falling_path_probability(paths: list[list[int]]):
    tree = grown(paths)
    order = list(tree.best())

    assert len(order) == len(tree) - 1
    seen = {tree.root.id}
    for node in order:
        assert node.parent is not None
        assert node.parent.id in seen
        seen.add(node.id)
    chances = [tree.path_probability(node) for node in order]
    assert chances == sorted(chances, reverse=True)


@given(paths, some.lists(some.integers(0, 4), min_size=1, max_size=4))
def test_advance_keeps_exactly_what_lies_below_the_new_root(paths: list[list[int]], tokens: list[int]):
    tree = grown(paths)
    below = {path_of(node)[len(tokens) :] for node in tree if path_of(node)[: len(tokens)] == tuple(tokens)}

    committed = tree.advance(tokens)

    assert [node.token for node in committed] == [9, *tokens[:-1]]
    assert tree.root.token == tokens[-1]
    assert tree.root.depth == 10 + len(tokens)
    assert {path_of(node) for node in tree} == below | {()}


def test_advance_keeps_ids_that_name_the_whole_path():
    tree = grown([[1, 2, 3]])
    deepest = list(tree.main_chain())[-1].id

    tree.advance([1, 2])

    assert deepest in tree
    assert node_id(tree.root.id, 3) == deepest


def test_dropped_nodes_are_in_no_reference_cycle():
    tree = grown([[1, 2], [3, 4], [3, 5]])
    before = list(tree)

    tree.advance([1])

    assert len(before) == 6
    assert all(node.parent is None for node in before if node.id not in tree)


def test_path_probability_is_relative_to_the_present_root():
    tree = grown([])
    node = tree.root
    for token, chance in ((1, 0.5), (2, 0.4), (3, 0.3)):
        node = tree.add(node, token, chance)

    tree.advance([1])

    assert tree.path_probability(tree.root) == 1.0
    assert tree.path_probability(node) == pytest.approx(0.12)


def test_the_main_child_is_the_first_one_added():
    tree = grown([])
    tree.add(tree.root, 1, 0.2)
    tree.add(tree.root, 2, 0.7)

    assert [node.token for node in tree.main_chain()] == [1]


def test_adding_a_child_again_changes_nothing():
    tree = grown([])
    first = tree.add(tree.root, 1, 0.2)

    assert tree.add(tree.root, 1, 0.9) is first
    assert first.probability == 0.2
    assert len(tree) == 2


@given(paths)
def test_flatten_points_every_entry_at_its_parent(paths: list[list[int]]):
    tree = grown(paths)
    nodes = list(tree.best())

    tokens, parents = flatten(tree.root, nodes)

    assert (tokens[0], parents[0]) == (9, -1)
    entries: list[Node] = [tree.root, *nodes]
    for entry, token, parent in itertools.islice(zip(entries, tokens, parents, strict=True), 1, None):
        assert entry.token == token
        assert entry.parent is entries[parent]


@given(paths, some.data())
def test_every_path_of_a_flattened_tree_ends_at_its_own_entry(paths: list[list[int]], data: some.DataObject):
    tree = grown(paths)
    nodes = list(tree.best())
    tokens, parents = flatten(tree.root, nodes)
    entry = data.draw(some.integers(0, len(nodes)))

    assert end_of_path(tokens, parents, path_of(tree.root if entry == 0 else nodes[entry - 1])) == entry
