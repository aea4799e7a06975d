"""What must be true of a simulated state machine after every event, whatever happened. Pure.

Looks at the machine from outside and, where nothing else will do, at all that it holds on to.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from orchestrator.core.commands import Command, Emit, Finish, Reject, Release, SendMessage
from orchestrator.core.phases import Phase
from orchestrator.tools.simulate.simulation import Simulation
from protocol.messages.base import Role
from protocol.messages.worker import Start

_LONGEST_REST = 130.0
"""Seconds until the next tick at most while something is owed: a prefill worker that reads a long prompt."""
_MOST_HELD = 60_000
"""Objects that a machine without requests may hold: estimates, and a bounded library of arenas."""


class Violation(AssertionError):
    """A promise was broken; the text says which and how."""


class Invariants:
    """Of one life of the orchestrator."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._machine = simulation.machine
        self._released: set[str] = set()
        """Arenas."""

    def allow(self, command: Command) -> None:
        """Before a command is performed: it goes to a worker that is up, or tells a client what the target says."""
        match command:
            case SendMessage():
                self._reaches(command)
            case Release(name):
                self._released.add(name)
            case Emit() | Finish() | Reject():
                self._is_true(command)
            case _:
                pass

    def hold(self) -> None:
        """After each event."""
        machine, now = self._machine, self._simulation.now
        verifying = {id for id, sequence in machine.sequences.items() if sequence.phase is Phase.VERIFYING}
        idle = machine.under_verification - verifying
        _require(not idle, f"the target is taken to be busy with {sorted(idle)}, of which it was asked nothing")
        deadline = machine.deadline()
        if machine.sequences and self._is_up("target"):
            _require(deadline is not None, "requests are live and nothing is ever due")
            assert deadline is not None
            _require(deadline <= now + _LONGEST_REST, f"the next tick is due in {deadline - now:.0f} s")

    def empty(self) -> None:
        """Nothing is in the way of any request: all have ended, nothing is due, and the machine remembers none."""
        live = len(self._simulation.live) + len(self._machine.sequences)
        _require(live == 0, "requests are still live although nothing is in their way")
        _require(self._machine.deadline() is None, "no request is live and something is still due")
        ended, held = self._simulation.clients.keys(), 0
        for item in reachable(self._machine):
            held += 1
            if type(item) is int and item in ended:
                raise Violation(f"sequence {item} ended and is still remembered")
        _require(held <= _MOST_HELD, f"a machine without requests holds {held} objects")

    def _reaches(self, command: SendMessage) -> None:
        role, message, incarnation = command.role, command.message, command.incarnation
        if not self._is_up(role, incarnation):
            raise Violation(f"A {role} that is down was told {message}.")
        _require(role != "draft" or incarnation is not None, "a draft was told something, and not which one")
        if isinstance(message, Start) and message.adopt is not None:
            name = message.adopt.name
            _require(name not in self._released, f"arena {name} was given up and is to be adopted")

    def _is_up(self, role: Role, incarnation: int | None = None) -> bool:
        hosts = self._simulation.hosts.values()
        return any(host.up and host.role == role and incarnation in (None, host.incarnation) for host in hosts)

    def _is_true(self, command: Emit | Finish | Reject) -> None:
        if command.sequence not in self._simulation.live:
            raise Violation(f"Something was said of a request that is over: {command}.")
        client = self._simulation.clients[command.sequence]
        before, expected = len(client.tokens), len(client.reference)
        match command:
            case Emit(_, tokens):
                due = tuple(client.reference[before : before + len(tokens)])
                _require(tokens == due, f"{tokens} went to the client after {before} tokens instead of {due}")
            case Finish(_, reason, statistics) if reason != "cancelled":
                _require(before == expected, f"a request ended ({reason}) after {before} of {expected} tokens")
                _require(statistics.generated_tokens == before, "the statistics miscount")
            case _:
                pass


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
