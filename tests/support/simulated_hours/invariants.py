"""The invariants of a simulated state machine after every event. Pure.

Most are checked from outside the machine; one checks all objects that the machine holds.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from orchestrator.core.commands import Command, Emit, Finish, Reject, Release, SendMessage, TellReading
from orchestrator.core.phases import Phase
from orchestrator.lab.simulate.workers import prompt_token_logprob
from protocol.messages.base import Role
from protocol.messages.worker import Start
from tests.support.simulation import Simulation

_MAX_WAIT = 130.0
"""Maximum of seconds until the next tick while requests are live: a prefill worker may take long."""
_MAX_OBJECTS = 60_000
"""Objects that a machine without requests may hold: estimates, and a bounded index of arenas."""


class Violation(AssertionError):
    """An invariant does not hold; the text says which."""


class Invariants:
    """The invariants of one life of the orchestrator."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._machine = simulation.machine
        self._released: set[str] = set()
        """Arenas."""

    def allow(self, command: Command) -> None:
        """Check a command before it is performed: its worker is up, or its tokens are the target's."""
        match command:
            case SendMessage():
                self._check_send(command)
            case Release(name):
                self._released.add(name)
            case TellReading(sequence, tokens, total):
                _require(sequence in self._simulation.live, "a request that has ended is told how far it was read")
                _require(tokens <= total, f"{tokens} of {total} tokens were read")
            case Emit() | Finish() | Reject():
                self._check_output(command)
            case _:
                pass

    def hold(self) -> None:
        """Check the machine after an event."""
        machine, now = self._machine, self._simulation.now
        verifying = {id for id, sequence in machine.requests.items() if sequence.phase is Phase.VERIFYING}
        idle = machine.scheduler.under_verification - verifying
        _require(not idle, f"the target counts as busy with {sorted(idle)}, without a Verify")
        deadline = machine.deadline()
        if machine.requests and self._is_up("target"):
            _require(deadline is not None, "requests are live and no tick is due")
            assert deadline is not None
            _require(deadline <= now + _MAX_WAIT, f"the next tick is due in {deadline - now:.0f} s")
        served = sum(sequence.phase is not Phase.WAITING for sequence in machine.requests.values())
        places = min(len(machine.requests), self._simulation.options.concurrent)
        _require(served == places, f"{served} requests are decoded, and there are places for {places}")
        statuses = machine.drafts.statuses()
        standing = [*statuses.values()]
        _require(standing.count("active") == min(1, len(statuses)), f"of the drafts {statuses} not one drafts")
        _require(standing.count("on trial") <= 1, f"of the drafts {statuses} several are on trial")

    def empty(self) -> None:
        """After a quiet phase all requests have ended, nothing is due, and the machine holds none of them."""
        live = len(self._simulation.live) + len(self._machine.requests)
        _require(live == 0, "requests are still live after a quiet phase")
        _require(self._machine.deadline() is None, "no request is live and a tick is due")
        ended, held = self._simulation.clients.keys(), 0
        for item in reachable(self._machine):
            held += 1
            if type(item) is int and item in ended:
                raise Violation(f"sequence {item} has ended and is still held")
        _require(held <= _MAX_OBJECTS, f"a machine without requests holds {held} objects")

    def _check_send(self, command: SendMessage) -> None:
        role, message, incarnation = command.role, command.message, command.incarnation
        if not self._is_up(role, incarnation):
            raise Violation(f"{message} was sent to a {role} that is down.")
        _require(role != "draft" or incarnation is not None, "a message to a draft has no incarnation")
        if isinstance(message, Start) and message.adopt is not None:
            name = message.adopt.name
            _require(name not in self._released, f"arena {name} was released and is to be adopted")

    def _is_up(self, role: Role, incarnation: int | None = None) -> bool:
        hosts = self._simulation.hosts.values()
        return any(host.is_up and host.role == role and incarnation in (None, host.incarnation) for host in hosts)

    def _check_output(self, command: Emit | Finish | Reject) -> None:
        if command.request not in self._simulation.live:
            raise Violation(f"A command for a request that has ended: {command}.")
        client = self._simulation.clients[command.request]
        before, expected = len(client.tokens), len(client.reference)
        match command:
            case Emit(_, tokens):
                due = tuple(client.reference[before : before + len(tokens)])
                _require(tokens == due, f"after {before} tokens the client got {tokens} instead of {due}")
            case Finish(_, reason, statistics) if reason != "cancelled":
                _require(before == expected, f"a request ended ({reason}) after {before} of {expected} tokens")
                _require(statistics.generated_tokens == before, "the statistics have a wrong number of tokens")
                wanted = len(client.task.tokens) - 1 if client.task.sampling.prompt_logprobs else 0
                told = [prompt_token_logprob(place) for place in range(wanted)]
                _require(
                    client.prompt_token_logprobs == told, "the prompt's log-probabilities are not those of the target"
                )
            case _:
                pass


def reachable(thing: Any) -> Iterator[Any]:
    """All objects reachable from `thing`, itself included; plain values once for each reference."""
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
