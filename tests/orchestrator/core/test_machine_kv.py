"""What a target saved serves the next life and the next request; a prefill worker is a shortcut. In virtual time."""

import random

import pytest
from msgspec.structs import replace

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.options import Options
from orchestrator.lab.simulate.worker_host import SimulatedWorker, Work
from orchestrator.lab.simulate.workers import ModelledTarget
from protocol.messages.base import RequestId, Role
from protocol.messages.kv import KvOffer, KvRelease
from protocol.messages.worker import FromWorker, Prefill, Prefilled, Start, Stop, ToWorker, Verdict
from protocol.worker.pacing import DevicePace
from tests.support.scripted_simulation import CONTEXT, LANGUAGE, ONE, TARGET, THREE, TWO, ScriptedSimulation
from tests.support.simulated_hours.faulty_workers import ModelledPrefill

PROMPT = tuple(range(40))
LONG = tuple(range(40)) * 6
SIZE = 1 << 20
PREFILL = DevicePace(steps=((1, 0.0005),), prefill_rate=2000.0)


class Arenas:
    """The shared memory of a simulated machine: the tokens that each arena holds."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.torn = False


class SavingTarget(ModelledTarget):
    """Saves after its prefill and then every eight tokens; adopts only what is what it should be."""

    def __init__(self, arenas: Arenas) -> None:
        super().__init__(LANGUAGE, TARGET, CONTEXT)
        self.arenas = arenas
        self.tokens: dict[RequestId, list[int]] = {}
        self.names: dict[RequestId, str] = {}
        self.given_up: set[str] = set()

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, KvRelease):
            self.given_up.add(message.name)
        if isinstance(message, Start):
            self.tokens[message.request] = list(message.tokens)
            if message.adopt is not None:
                held = self.arenas.tokens[message.adopt.name][: message.adopt.tokens]
                assert held == list(message.tokens[: message.adopt.tokens])
            message = replace(message, adopt=None) if self.arenas.torn else message
        return self._saved(super().handle(message))

    def work(self) -> Work | None:
        work = super().work()
        return None if work is None else self._saved(work)

    def _saved(self, work: Work) -> Work:
        return work._replace(replies=tuple(each for reply in work.replies for each in self._with_offer(reply)))

    def _with_offer(self, reply: FromWorker) -> list[FromWorker]:
        if isinstance(reply, Prefilled) and self.arenas.torn:
            reply = replace(reply, warning="torn")
        if not isinstance(reply, Prefilled | Verdict):
            return [reply]
        tokens = self.tokens[reply.request]
        if isinstance(reply, Verdict):
            end = len(tokens) + len(reply.path) + 1
            tokens += [LANGUAGE.token(reply.request, position) for position in range(len(tokens), end)]
        name = self.names.setdefault(reply.request, f"lp-{len(self.arenas.tokens):010x}{reply.request:010x}")
        held = self.arenas.tokens.get(name, [])
        if name in self.given_up or len(tokens) - 1 < max(32, len(held) + 8):
            return [reply]
        self.arenas.tokens[name] = tokens[:-1]
        return [reply, KvOffer(reply.request, name, len(tokens) - 1, SIZE, 0.0)]


class ArenaPrefill(ModelledPrefill):
    """Prefills into the arenas that the target adopts."""

    def __init__(self, arenas: Arenas) -> None:
        super().__init__(PREFILL, random.Random(1), share=0.0)
        self.arenas = arenas

    def handle(self, message: ToWorker) -> Work:
        work = super().handle(message)
        for reply in work.replies:
            if isinstance(reply, KvOffer) and isinstance(message, Prefill):
                self.arenas.tokens[reply.name] = list(message.tokens)
        return work


class KvSimulation(ScriptedSimulation):
    """Workers share KV; no arena that was released may be used again."""

    def __init__(self, **options) -> None:
        super().__init__(Options(strategy="ar", **options), self._worker)
        self.arenas = Arenas()
        self.released: list[str] = []
        self.start("target")

    def _worker(self, role: Role) -> SimulatedWorker:
        return SavingTarget(self.arenas) if role == "target" else ArenaPrefill(self.arenas)

    def perform(self, command: Command) -> None:
        if isinstance(command, SendMessage) and isinstance(command.message, Start) and command.message.adopt:
            assert command.message.adopt.name not in self.released
        if isinstance(command, Release):
            self.released.append(command.name)
            del self.arenas.tokens[command.name]
        super().perform(command)

    def serve(self, number: int, max_tokens: int, prompt: tuple[int, ...] = PROMPT) -> None:
        """A request from its beginning until nothing is due; its tokens are the target's own."""
        client = self.clients[self.submit(number, max_tokens, prompt=prompt)]
        self.settle()
        assert client.tokens == client.reference


def prefilled(simulation: KvSimulation) -> list[tuple[int, int]]:
    """Tokens before the root of each start, and how many of them were to be adopted."""
    return [(len(start.tokens) - 1, start.adopt.tokens if start.adopt else 0) for start in simulation.sent(Start)]


def exact(simulation: KvSimulation) -> bool:
    """After everything has happened."""
    simulation.settle()
    return all(client.tokens == client.reference for client in simulation.clients.values())


def test_a_restarted_target_adopts_what_the_old_one_saved():
    simulation = KvSimulation()
    simulation.submit(1, 60, prompt=PROMPT)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 20)
    generated = len(simulation.clients[ONE].tokens)
    simulation.kill("target")
    simulation.start("target")
    assert exact(simulation)

    (first, none), (resumed, adopted) = prefilled(simulation)
    assert (first, none) == (39, 0)
    assert resumed == 39 + generated
    assert resumed - 8 <= adopted <= resumed
    assert simulation.statistics(ONE).adopted_tokens == adopted


@pytest.mark.parametrize("events", range(0, 40, 3))
def test_a_target_may_die_at_any_moment(events):
    simulation = KvSimulation()
    simulation.submit(1, 30, prompt=PROMPT)
    simulation.run_events(events)
    simulation.kill("target")
    simulation.start("target")

    assert exact(simulation)


def test_an_arena_that_two_targets_did_not_survive_adopting_is_not_adopted_again():
    simulation = KvSimulation()
    simulation.submit(1, 60, prompt=PROMPT)
    simulation.run_while(lambda: len(simulation.clients[ONE].tokens) < 20)
    for starts in (2, 3, 4):
        simulation.kill("target")
        simulation.start("target")
        simulation.run_while(lambda starts=starts: len(simulation.sent(Start)) < starts)
    _, one, two, after = (start.adopt for start in simulation.sent(Start))

    assert one is not None
    assert one == two
    assert after is None
    assert simulation.released == [one.name]
    assert simulation.machine.prefills.warnings == 1
    assert exact(simulation)


def test_a_later_request_adopts_the_longest_common_prefix_that_is_worth_it():
    simulation = KvSimulation()
    simulation.serve(1, 20)
    simulation.serve(2, 20, (*PROMPT[:35], 1, 2, 3))
    simulation.serve(3, 20)
    simulation.serve(4, 5, (*PROMPT[:31], 1, 2, 3))

    assert prefilled(simulation) == [(39, 0), (37, 35), (39, 39), (33, 0)]


def test_what_the_target_can_not_rely_on_is_released_and_costs_a_prefill_only():
    simulation = KvSimulation()
    simulation.serve(1, 5)
    (saved,) = simulation.arenas.tokens
    simulation.arenas.torn = True
    simulation.serve(2, 20)

    assert simulation.statistics(TWO).adopted_tokens == 0
    assert simulation.machine.prefills.warnings == 1
    assert simulation.released == [saved]


def test_memory_is_bounded_and_the_writer_lets_go_first():
    simulation = KvSimulation(arena_memory=3)
    for id in range(1, 7):
        simulation.serve(id, 5, (id, *PROMPT))

    assert len(simulation.arenas.tokens) == 3
    assert len(simulation.released) == 3
    commands = simulation.commands
    last = max(index for index, command in enumerate(commands) if isinstance(command, Release))
    assert commands[last - 1] == SendMessage("target", KvRelease(simulation.released[-1]))


@pytest.mark.parametrize("memory", [{"arena_memory": 0}, {}])
def test_without_memory_and_of_a_sequence_that_has_ended_nothing_is_kept(memory: dict[str, int]):
    simulation = KvSimulation(**memory)
    simulation.submit(1, 40, prompt=PROMPT)
    if not memory:
        simulation.run_while(lambda: not simulation.arenas.tokens)
        simulation.cancel(ONE)
    simulation.settle()

    assert simulation.arenas.tokens == {}
    assert [message.name for message in simulation.sent(KvRelease)] == simulation.released
    assert memory or len(simulation.released) == 1


def test_what_the_target_saves_of_an_ended_sequence_serves_the_next_turn():
    simulation = KvSimulation()
    simulation.serve(1, 5)
    name, tokens = "lp-" + "f" * 20, (*PROMPT, 1, 2, 3)
    simulation.arenas.tokens[name] = list(tokens)
    simulation.machine.prefills.add_arena("target", None, KvOffer(ONE, name, len(tokens), SIZE, 0.0, tokens), 0.0)
    simulation.serve(2, 5, (*tokens, 4, 5))

    assert prefilled(simulation)[-1] == (len(tokens) + 1, len(tokens))


def test_of_a_conversation_only_the_last_turn_keeps_an_arena():
    simulation = KvSimulation()
    prompt = PROMPT
    for turn in range(1, 8):
        simulation.serve(turn, 20, prompt)
        prompt = (*prompt, *simulation.clients[RequestId(turn)].tokens, turn, 0, 1)

    assert len(simulation.arenas.tokens) == 1
    assert [adopted >= before - 24 for before, adopted in prefilled(simulation)[1:]] == [True] * 6


def test_what_is_being_adopted_is_not_given_up_meanwhile():
    simulation = KvSimulation(arena_memory=1)
    simulation.serve(1, 5)
    (kept,) = simulation.arenas.tokens
    simulation.holds = lambda message: isinstance(message, Prefilled) and message.request == TWO
    simulation.submit(2, 5, prompt=PROMPT)
    simulation.submit(3, 5, prompt=(9, *PROMPT))
    simulation.run_while(lambda: THREE in simulation.live)
    assert kept not in simulation.released

    simulation.release()
    assert exact(simulation)
    assert len(simulation.arenas.tokens) == 1


def with_prefill(mode: str = "always", **options) -> KvSimulation:
    simulation = KvSimulation(prefill=mode, **options)
    simulation.start("prefill")
    return simulation


def test_a_prefill_worker_reads_and_the_target_adopts():
    simulation = with_prefill()
    simulation.serve(1, 20, LONG)

    assert [message.tokens for message in simulation.sent(Prefill)] == [LONG[:-1]]
    assert prefilled(simulation) == [(239, 239)]
    assert simulation.statistics(ONE).adopted_tokens == 239


def test_the_faster_reader_is_found_by_measuring():
    simulation = with_prefill("auto")
    for id in range(1, 9):
        simulation.serve(id, 3, (id, *LONG))
    assert len(simulation.sent(Prefill)) == 7

    worker = simulation.hosts[simulation.own["prefill"]].worker
    assert isinstance(worker, ModelledPrefill)
    worker.pace = DevicePace(steps=((1, 1.0),), prefill_rate=1.0)
    for id in range(9, 17):
        simulation.serve(id, 3, (id, *LONG))

    assert len(simulation.sent(Prefill)) == 8


@pytest.mark.parametrize("failing", ["dies", "refuses", "is silent", "is not there"])
def test_without_the_prefill_worker_the_target_reads(failing):
    simulation = with_prefill()
    host = simulation.hosts[simulation.own["prefill"]]
    if failing == "refuses":
        assert isinstance(host.worker, ModelledPrefill)
        host.worker.share = 1.0
    if failing == "is not there":
        simulation.kill("prefill")
    if failing == "is silent":
        host.freeze()
    simulation.submit(1, 20, prompt=LONG)
    if failing == "dies":
        simulation.kill("prefill")

    assert exact(simulation)
    assert prefilled(simulation) == [(239, 0)]
    assert simulation.machine.prefills.warnings == (failing == "refuses")


def test_a_prefill_worker_that_was_silent_is_told_to_stop_and_not_asked_again_until_it_is_another():
    simulation = with_prefill()
    silent = simulation.own["prefill"]
    simulation.hosts[silent].freeze()
    simulation.submit(1, 5, prompt=LONG)
    simulation.run_while(lambda: not simulation.sent(Stop, silent))
    assert simulation.sent(Stop, silent) == [Stop(ONE)]

    assert exact(simulation)
    simulation.serve(2, 5, (7, *LONG))
    assert len(simulation.sent(Prefill)) == 1
    simulation.kill("prefill")
    simulation.start("prefill")
    simulation.submit(3, 5, prompt=(8, *LONG))

    assert len(simulation.sent(Prefill)) == 2


def test_kv_of_a_prefill_worker_that_the_target_refuses_ends_its_use():
    simulation = with_prefill()
    simulation.arenas.torn = True
    for id in (1, 2):
        simulation.serve(id, 5, (id, *LONG))

    assert len(simulation.sent(Prefill)) == 1


def test_a_target_that_dies_while_another_reads_starts_with_what_was_read():
    simulation = with_prefill()
    simulation.submit(1, 20, prompt=LONG)
    simulation.kill("target")
    simulation.run_while(lambda: not simulation.arenas.tokens)
    simulation.run_until(simulation.now + 1.0)
    simulation.start("target")

    assert exact(simulation)
    assert prefilled(simulation) == [(239, 239)]


def test_a_cancelled_request_is_read_no_further_and_leaves_nothing():
    simulation = with_prefill()
    simulation.submit(1, 20, prompt=LONG)
    simulation.cancel(ONE)
    simulation.settle()

    assert simulation.sent(Stop, simulation.own["prefill"]) == [Stop(ONE)]
    assert simulation.arenas.tokens == {}
    assert simulation.machine.deadline() is None
