"""What must be true of the state machine after every event, whatever happened. Pure.

Looks at the machine from outside and, where nothing else will do, at all that it holds on to.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from orchestrator.core.commands import Command, Emit, Finish, Reject, Release, SendMessage
from orchestrator.core.machine import Machine
from orchestrator.core.phases import Phase
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import Start

_LONGEST_REST = 130.0
"""Seconds until the next tick at most while something is owed: a prefill worker that reads a long prompt."""
_MOST_HELD = 60_000
"""Objects that a machine without requests may hold: estimates, and a bounded library of arenas."""


class Violation(AssertionError):
    """A promise was broken; the text says which and how."""


class Invariants:
    """Of one life of the orchestrator."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.up: set[tuple[Role, int]] = set()
        """Workers that the machine was told of."""
        self._given_up: set[str] = set()

    def performed(self, command: Command, reference: Iterable[int] | None, before: int) -> None:
        """A command goes to workers that are up, and tokens are the target's own.

        `reference`: what target-only decoding says, if the command is about tokens; `before`: how many of them
        the client has.
        """
        match command:
            case SendMessage():
                self._reaches(command)
            case Release(name):
                self._given_up.add(name)
            case Emit(_, tokens):
                expected = tuple(reference or ())[before : before + len(tokens)]
                _require(tokens == expected, f"{tokens} went to the client after {before} tokens instead of {expected}")
            case Finish(_, reason, statistics) if reason != "cancelled":
                expected = len(tuple(reference or ()))
                _require(before == expected, f"a request ended ({reason}) after {before} of {expected} tokens")
                _require(statistics.generated_tokens == before, "the statistics miscount")
            case Finish() | Reject():
                pass

    def hold(self, now: float) -> None:
        """After each event."""
        machine = self._machine
        verifying = {id for id, sequence in machine.sequences.items() if sequence.phase is Phase.VERIFYING}
        idle = machine.under_verification - verifying
        _require(not idle, f"the target is taken to be busy with {sorted(idle)}, of which it was asked nothing")
        deadline = machine.deadline()
        if machine.sequences and any(role == "target" for role, _ in self.up):
            _require(deadline is not None, "requests are live and nothing is ever due")
            assert deadline is not None
            _require(deadline <= now + _LONGEST_REST, f"the next tick is due in {deadline - now:.0f} s")

    def empty(self, sequences: Iterable[SequenceId]) -> None:
        """No request is live: nothing is due, and nothing remembers those that were."""
        _require(not self._machine.sequences, "a request is still live")
        _require(self._machine.deadline() is None, "no request is live and something is still due")
        ended, held = set(sequences), 0
        for item in reachable(self._machine):
            held += 1
            if type(item) is int and item in ended:
                raise Violation(f"sequence {item} ended and is still remembered")
        _require(held <= _MOST_HELD, f"a machine without requests holds {held} objects")

    def _reaches(self, tell: SendMessage) -> None:
        present = any(role == tell.role and tell.incarnation in (None, incarnation) for role, incarnation in self.up)
        _require(present, f"a {tell.role} that is down was told {tell.message}")
        _require(tell.role != "draft" or tell.incarnation is not None, "a draft was told something, and not which one")
        if isinstance(tell.message, Start) and tell.message.adopt is not None:
            name = tell.message.adopt.name
            _require(name not in self._given_up, f"arena {name} was given up and is to be adopted")


def reachable(thing: Any) -> Iterator[Any]:
    """Everything that `thing` holds, directly or not, itself included; plain values as often as they are held."""
    seen: set[int] = set()
    waiting: deque[Any] = deque([thing])
    while waiting:
        item = waiting.popleft()
        if isinstance(item, int | float | str | bytes | None):
            yield item
            continue
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        yield item
        waiting.extend(_parts(item))


def _parts(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.keys()
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset | deque):
        yield from item
    else:
        yield from vars(item).values() if hasattr(item, "__dict__") else ()
        fields = getattr(item, "__struct_fields__", ()) or _slots(type(item))
        yield from (getattr(item, name) for name in fields if hasattr(item, name))


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise Violation(otherwise[0].upper() + otherwise[1:] + ".")
