"""Finds the token sequences that share the longest prefix with another one. Pure; knows no KV.

A radix tree (Morrison 1968, PATRICIA) over tokens: an edge holds a run of tokens, and a common prefix is stored once.
A sequence ends at a node; the edges from the root to that node are its tokens.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)

MIN_SHARED_TOKENS = 32
"""A shorter shared prefix is not worth its KV: so few tokens take little more time than one forward."""
_CODE = "i"


class SharedPrefix(NamedTuple, Generic[Name]):
    """The length of the longest stored prefix, and the names of all sequences that begin with it, unordered."""

    tokens: int
    names: list[Name]


class PrefixIndex(Generic[Name]):
    """Append-only token sequences by name. Each call takes time linear in its own tokens, whatever else is stored."""

    def __init__(self) -> None:
        self._root: _Node[Name] = _Node(array(_CODE), None)
        self._ends: dict[Name, _Node[Name]] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._ends

    @property
    def stored(self) -> int:
        """Tokens in memory; a shared prefix counts once."""
        return sum(len(node.edge) for node in self._root.subtree())

    def extend(self, name: Name, tokens: Sequence[int]) -> None:
        """Append to the sequence of this name; a new name begins a sequence."""
        before = self._ends.get(name, self._root)
        before.names.pop(name, None)
        end = self._end_of(before, array(_CODE, tokens))
        end.names[name] = None
        self._ends[name] = end
        self._prune(before)

    def remove(self, name: Name) -> None:
        """Remove this sequence."""
        end = self._ends.pop(name)
        del end.names[name]
        self._prune(end)

    def longest(self, tokens: Sequence[int]) -> SharedPrefix[Name]:
        """The sequences that share the longest prefix with `tokens`. No sequence shares an empty prefix."""
        return next(self.shared(tokens), SharedPrefix[Name](0, []))

    def shared(self, tokens: Sequence[int]) -> Iterator[SharedPrefix[Name]]:
        """The sequences that share a prefix with `tokens`, by its falling length."""
        given, at, node = array(_CODE, tokens), 0, self._root
        passed: list[tuple[int, _Node[Name]]] = []
        while at < len(given) and (child := node.children.get(given[at])) is not None:
            common = _common(child.edge, given, at)
            node, at = child, at + common
            passed.append((at, node))
            if common < len(child.edge):
                break
        known: set[Name] = set()
        for length, each in reversed(passed):
            names = [name for below in each.subtree() for name in below.names if name not in known]
            known.update(names)
            if names:
                yield SharedPrefix(length, names)

    def covered(self, name: Name) -> bool:
        """Whether another sequence begins with all tokens of this one."""
        end = self._ends[name]
        return bool(end.children) or len(end.names) > 1

    def begins(self, name: Name, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begin with this sequence, or are it."""
        edges = [node.edge for node in self._ends[name].path_to_root()]
        stored = array(_CODE)
        for edge in reversed(edges):
            stored += edge
        return stored == array(_CODE, tokens[: len(stored)])

    def _end_of(self, node: "_Node[Name]", tokens: "array[int]") -> "_Node[Name]":
        """The node behind `node` by `tokens`, created if it does not exist."""
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                return self._extended(node, tokens[at:])
            common = _common(child.edge, tokens, at)
            node, at = (child if common == len(child.edge) else child.split(common)), at + common
        return node

    def _extended(self, node: "_Node[Name]", tokens: "array[int]") -> "_Node[Name]":
        if node is not self._root and not node.children and not node.names:
            # The node has no other sequence, so its edge is extended.
            node.edge += tokens
            return node
        child: _Node[Name] = _Node(tokens, node)
        node.children[tokens[0]] = child
        return child

    def _prune(self, node: "_Node[Name]") -> None:
        """Remove nodes where no sequence ends and none diverge."""
        while node.parent is not None and not node.names and len(node.children) < 2:
            parent = node.parent
            if node.children:
                node.join_child()
                return
            del parent.children[node.edge[0]]
            node = parent


class _Node(Generic[Name]):
    """A node with the run of tokens from its parent, which is empty for the root alone."""

    __slots__ = ("children", "edge", "names", "parent")

    def __init__(self, edge: "array[int]", parent: "_Node[Name] | None") -> None:
        self.edge = edge
        self.parent: _Node[Name] | None = parent
        self.children: dict[int, _Node[Name]] = {}
        """By the first token of their edges."""
        self.names: dict[Name, None] = {}
        """Sequences that end here. A dict, since the order of a set of strings differs between processes."""

    def subtree(self) -> "Iterator[_Node[Name]]":
        """This node and all nodes below it."""
        stack: list[_Node[Name]] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def path_to_root(self) -> "Iterator[_Node[Name]]":
        """This node and all nodes above it, the root last."""
        node: _Node[Name] | None = self
        while node is not None:
            yield node
            node = node.parent

    def split(self, length: int) -> "_Node[Name]":
        """A new node that takes the first `length` tokens of this edge, above this one."""
        assert self.parent is not None
        upper: _Node[Name] = _Node(self.edge[:length], self.parent)
        self.parent.children[self.edge[0]] = upper
        self.edge, self.parent = self.edge[length:], upper
        upper.children[self.edge[0]] = self
        return upper

    def join_child(self) -> None:
        """Replace this node by its only child, whose edge gets this node's tokens."""
        assert self.parent is not None
        (child,) = self.children.values()
        child.edge, child.parent = self.edge + child.edge, self.parent
        self.parent.children[child.edge[0]] = child


def _common(edge: "array[int]", tokens: "array[int]", at: int) -> int:
    """Tokens that `edge` shares with `tokens` from `at` on. A binary search, since comparing whole runs is fast."""
    low, high = 0, min(len(edge), len(tokens) - at)
    if edge[:high] == tokens[at : at + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low:middle] == tokens[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
