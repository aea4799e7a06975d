"""Which of many token sequences share the longest prefix with another one. Pure; knows not what the sequences are for.

A radix tree (Morrison 1968, PATRICIA) over tokens: an edge holds a run of tokens, and what sequences have in common
is held once. A sequence ends at a node; its path from the root spells it.
"""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)

MIN_SHARED_TOKENS = 32
"""A shorter shared prefix is not worth its KV: so few tokens take little more time than one forward."""
_CODE = "i"


class SharedPrefix(NamedTuple, Generic[Name]):
    """The longest prefix that is held, and all whose sequences begin with it, in no order that means anything."""

    tokens: int
    names: list[Name]


class PrefixIndex(Generic[Name]):
    """Append-only token sequences by name. All costs are in tokens handed in, whatever else is held."""

    def __init__(self) -> None:
        self._top: _Node[Name] = _Node(array(_CODE), None)
        self._ends: dict[Name, _Node[Name]] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._ends

    @property
    def stored(self) -> int:
        """Tokens in memory; what is shared counts once."""
        return sum(len(node.edge) for node in self._top.family())

    def extend(self, name: Name, tokens: Sequence[int]) -> None:
        """Append to the sequence of this name; one that is not held begins with them."""
        before = self._ends.get(name, self._top)
        before.names.pop(name, None)
        end = self._end_of(before, array(_CODE, tokens))
        end.names[name] = None
        self._ends[name] = end
        self._tidy(before)

    def remove(self, name: Name) -> None:
        """Forget this sequence."""
        end = self._ends.pop(name)
        del end.names[name]
        self._tidy(end)

    def longest(self, tokens: Sequence[int]) -> SharedPrefix[Name]:
        """What shares most with `tokens`; nothing shares a prefix of no tokens."""
        wanted, at, node = array(_CODE, tokens), 0, self._top
        while at < len(wanted) and (child := node.children.get(wanted[at])) is not None:
            common = _common(child.edge, wanted, at)
            node, at = child, at + common
            if common < len(child.edge):
                break
        return SharedPrefix(at, [name for each in node.family() for name in each.names] if at else [])

    def covered(self, name: Name) -> bool:
        """Whether another sequence begins with all of this one."""
        end = self._ends[name]
        return bool(end.children) or len(end.names) > 1

    def begins(self, name: Name, tokens: Sequence[int]) -> bool:
        """Whether `tokens` begin with this sequence, or are it."""
        edges = [node.edge for node in self._ends[name].line()]
        held = array(_CODE)
        for edge in reversed(edges):
            held += edge
        return held == array(_CODE, tokens[: len(held)])

    def _end_of(self, node: "_Node[Name]", tokens: "array[int]") -> "_Node[Name]":
        """The node whose path is that of `node` and `tokens`; made if there is none."""
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                return self._grown(node, tokens[at:])
            common = _common(child.edge, tokens, at)
            node, at = (child if common == len(child.edge) else child.split(common)), at + common
        return node

    def _grown(self, node: "_Node[Name]", tokens: "array[int]") -> "_Node[Name]":
        if node is not self._top and not node.children and not node.names:
            # Its only sequence goes on: so does its edge.
            node.edge += tokens
            return node
        child: _Node[Name] = _Node(tokens, node)
        node.children[tokens[0]] = child
        return child

    def _tidy(self, node: "_Node[Name]") -> None:
        """Nodes exist only where sequences end or part."""
        while node.parent is not None and not node.names and len(node.children) < 2:
            parent = node.parent
            if node.children:
                node.join_child()
                return
            del parent.children[node.edge[0]]
            node = parent


class _Node(Generic[Name]):
    """The run of tokens that leads here from the parent; only the root has none."""

    __slots__ = ("children", "edge", "names", "parent")

    def __init__(self, edge: "array[int]", parent: "_Node[Name] | None") -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node[Name]] = {}
        """By the first token of their edges."""
        self.names: dict[Name, None] = {}
        """Sequences that end here; a dict, since the order of a set of strings differs from process to process."""

    def family(self) -> "Iterator[_Node[Name]]":
        """This node and all below it."""
        waiting: list[_Node[Name]] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def line(self) -> "Iterator[_Node[Name]]":
        """This node and those above it, the root last."""
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
        """Give way to the only child, whose edge takes this one's tokens."""
        assert self.parent is not None
        (child,) = self.children.values()
        child.edge, child.parent = self.edge + child.edge, self.parent
        self.parent.children[child.edge[0]] = child


def _common(edge: "array[int]", tokens: "array[int]", at: int) -> int:
    """Tokens that `edge` shares with `tokens` from `at` on; by halves, since comparing runs is fast."""
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
