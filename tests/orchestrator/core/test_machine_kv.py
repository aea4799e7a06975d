"""What a target saved serves the next life and the next request; a prefill worker is a shortcut. No process."""

from dataclasses import dataclass, field

import pytest

from orchestrator.core.commands import Command, Release, SendMessage
from orchestrator.core.events import Arrived, Ended, Tick, WorkerDown, WorkerUp
from orchestrator.core.options import Options
from protocol.messages.base import Role, SequenceId
from protocol.messages.worker import (
    Fault,
    FromWorker,
    KvOffer,
    KvRelease,
    Prefill,
    Prefilled,
    Start,
    Stop,
    ToWorker,
    Verdict,
)
from tests.orchestrator.core.test_machine import Bench, told
from tests.support.simulated_workers import SimulatedTarget, hello, reference

PROMPT = tuple(range(40))
LONG = tuple(range(40)) * 6
SIZE = 1 << 20


@dataclass
class Shelf:
    """The shared memory of a simulated machine: what each arena holds."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    broken: bool = False

    def new(self) -> str:
        return f"lp-{len(self.tokens):020x}"


@dataclass
class SavingTarget(SimulatedTarget):
    """Saves after its prefill and then every eight tokens; adopts only what is what it should be."""

    shelf: Shelf = field(default_factory=Shelf)
    saved: dict[SequenceId, str] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    life: int = 0

    def handle(self, message: ToWorker) -> list[FromWorker]:
        if isinstance(message, KvRelease):
            self.given_up.add(message.name)
        replies = super().handle(message)
        if isinstance(message, Start):
            replies = [self._started(message)]
        return [*replies, *(offer for reply in replies for offer in self._save(reply))]

    def _started(self, start: Start) -> Prefilled:
        before = len(start.tokens) - 1
        if start.adopt is None:
            return Prefilled(start.sequence, start.round, before, 0.001 * before)
        assert start.adopt.tokens <= before
        if self.shelf.broken:
            return Prefilled(start.sequence, start.round, before, 0.001 * before, 0, "torn")
        held = self.shelf.tokens[start.adopt.name][: start.adopt.tokens]
        assert held == list(start.tokens[: start.adopt.tokens])
        return Prefilled(start.sequence, start.round, before - len(held), 0.001, len(held))

    def _save(self, reply: FromWorker) -> list[KvOffer]:
        if not isinstance(reply, Prefilled | Verdict):
            return []
        tokens, _ = self.sequences[reply.sequence]
        name = self.saved.setdefault(reply.sequence, f"lp-{self.life:010x}{reply.sequence:010x}")
        held = self.shelf.tokens.get(name, [])
        if name in self.given_up or len(tokens) - 1 < max(32, len(held) + 8):
            return []
        self.shelf.tokens[name] = tokens[:-1]
        return [KvOffer(reply.sequence, name, len(tokens) - 1, SIZE, 0.0)]


@dataclass
class SimulatedPrefiller:
    shelf: Shelf
    seconds_a_token: float = 0.0005
    refuses: bool = False

    def handle(self, message: ToWorker) -> list[FromWorker]:
        if not isinstance(message, Prefill):
            return []
        if self.refuses:
            return [Fault("refused", "too long", message.sequence)]
        name = f"lp-{0xFFFF:010x}{len(self.shelf.tokens):010x}"
        self.shelf.tokens[name] = list(message.tokens)
        seconds = self.seconds_a_token * len(message.tokens)
        return [KvOffer(message.sequence, name, len(message.tokens), SIZE, seconds)]


class KvBench(Bench):
    """A bench whose workers share KV; no name that was released may be used again."""

    def __init__(self, **options) -> None:
        super().__init__(Options(strategy="ar", **options))
        self.shelf = Shelf()
        self.released: list[str] = []
        self.up("target")

    def up(self, role: Role, tokenizer: str = "same") -> list[Command]:
        life = self.incarnations[role] = self.incarnations.get(role, 0) + 1
        workers = {"target": SavingTarget(shelf=self.shelf, life=life), "prefill": SimulatedPrefiller(self.shelf)}
        self.workers[role] = workers[role]
        return self.step(WorkerUp(life, hello(role, tokenizer)))

    def kill(self, role: Role) -> list[Command]:
        self.queue = [item for item in self.queue if item[2] != role]
        return self.step(WorkerDown(role, self.incarnations[role]))

    def _perform(self, command: Command) -> None:
        if isinstance(command, SendMessage) and isinstance(command.message, Start) and command.message.adopt:
            assert command.message.adopt.name not in self.released
        if isinstance(command, Release):
            self.released.append(command.name)
            del self.shelf.tokens[command.name]
        super()._perform(command)


def prefilled(bench: KvBench) -> list[tuple[int, int]]:
    """Tokens evaluated and adopted by each start."""

    return [(len(start.tokens) - 1, start.adopt.tokens if start.adopt else 0) for start in told(bench, Start)]


def test_a_restarted_target_adopts_what_the_old_one_saved():
    bench = KvBench()
    bench.submit(max_tokens=60, prompt=PROMPT)
    bench.run(30)
    generated = len(bench.tokens[1])
    bench.kill("target")
    bench.up("target")
    bench.run()

    (first, none), (resumed, adopted) = prefilled(bench)
    assert (first, none) == (39, 0)
    assert resumed == 39 + generated
    assert resumed - 8 <= adopted <= resumed
    assert bench.tokens[1] == reference(PROMPT, 60, seed=1)
    assert bench.finished[1].statistics.adopted_tokens == adopted


@pytest.mark.parametrize("turns", range(0, 40, 3))
def test_a_target_may_die_at_any_moment(turns):
    bench = KvBench()
    bench.submit(max_tokens=30, prompt=PROMPT)
    bench.run(turns)
    bench.kill("target")
    bench.up("target")
    bench.run()

    assert bench.tokens[1] == reference(PROMPT, 30, seed=1)


def test_a_later_request_adopts_the_longest_common_prefix():
    bench = KvBench()
    bench.submit(1, max_tokens=20, prompt=PROMPT)
    bench.run()
    bench.submit(2, max_tokens=20, prompt=(*PROMPT[:35], 1, 2, 3))
    bench.run()
    bench.submit(3, max_tokens=20, prompt=PROMPT)
    bench.run()

    assert prefilled(bench) == [(39, 0), (37, 35), (39, 39)]
    assert bench.tokens[2] == reference((*PROMPT[:35], 1, 2, 3), 20, seed=2)
    assert bench.tokens[3] == reference(PROMPT, 20, seed=3)


def test_little_in_common_is_not_worth_an_adoption():
    bench = KvBench()
    bench.submit(1, max_tokens=5, prompt=PROMPT)
    bench.run()
    bench.submit(2, max_tokens=5, prompt=(*PROMPT[:31], 1, 2, 3))
    bench.run()

    assert prefilled(bench) == [(39, 0), (33, 0)]


def test_what_the_target_can_not_rely_on_is_released_and_costs_a_prefill_only():
    bench = KvBench()
    bench.submit(1, max_tokens=5, prompt=PROMPT)
    bench.run()
    bench.shelf.broken = True
    bench.submit(2, max_tokens=20, prompt=PROMPT)
    bench.run()

    assert bench.tokens[2] == reference(PROMPT, 20, seed=2)
    assert bench.finished[2].statistics.adopted_tokens == 0
    assert bench.machine.prefills.warnings == 1
    assert bench.released == [f"lp-{1:010x}{1:010x}"]


def test_memory_is_bounded_and_the_writer_lets_go_first():
    bench = KvBench(arena_memory=3)
    for id in range(1, 7):
        bench.submit(id, max_tokens=5, prompt=(id, *PROMPT))
        bench.run()

    assert len(bench.shelf.tokens) == 3
    assert len(bench.released) == 3
    last = max(index for index, command in enumerate(bench.log) if isinstance(command, Release))
    assert bench.log[last - 1] == SendMessage("target", KvRelease(bench.released[-1]))


def test_without_memory_nothing_is_kept():
    bench = KvBench(arena_memory=0)
    bench.submit(1, max_tokens=40, prompt=PROMPT)
    bench.run()

    assert bench.shelf.tokens == {}
    assert bench.tokens[1] == reference(PROMPT, 40, seed=1)


def test_an_arena_that_comes_after_its_sequence_ended_is_released():
    bench = KvBench()
    bench.submit(1, max_tokens=40, prompt=PROMPT)
    bench.step(Ended(SequenceId(1), "cancelled"))
    bench.run()

    assert bench.shelf.tokens == {}
    assert len(bench.released) == 1
    assert [message.name for message in told(bench, KvRelease)] == bench.released


def test_of_a_conversation_only_the_last_turn_keeps_an_arena():
    bench = KvBench()
    prompt = PROMPT
    for turn in range(1, 8):
        bench.submit(turn, max_tokens=20, prompt=prompt)
        bench.run()
        assert bench.tokens[turn] == reference(prompt, 20, seed=turn)
        prompt = (*prompt, *bench.tokens[turn], turn, 0, 1)

    assert len(bench.shelf.tokens) == 1
    assert [adopted >= before - 24 for before, adopted in prefilled(bench)[1:]] == [True] * 6


def test_what_is_being_adopted_is_not_given_up_meanwhile():
    bench = KvBench(arena_memory=1)
    bench.submit(1, max_tokens=5, prompt=PROMPT)
    bench.run()
    (kept,) = bench.shelf.tokens
    bench.submit(2, max_tokens=5, prompt=PROMPT)
    waiting, bench.queue = bench.queue, []
    bench.submit(3, max_tokens=5, prompt=(9, *PROMPT))
    bench.run()
    assert kept not in bench.released

    bench.queue = waiting
    bench.run()
    assert bench.tokens[2] == reference(PROMPT, 5, seed=2)
    assert len(bench.shelf.tokens) == 1


def reading(mode: str = "always", **options) -> KvBench:
    bench = KvBench(prefill=mode, **options)
    bench.up("prefill")
    return bench


def test_a_prefill_worker_reads_and_the_target_adopts():
    bench = reading()
    bench.submit(1, max_tokens=20, prompt=LONG)
    bench.run()

    assert [message.tokens for message in told(bench, Prefill)] == [LONG[:-1]]
    assert prefilled(bench) == [(239, 239)]
    assert bench.tokens[1] == reference(LONG, 20, seed=1)
    assert bench.finished[1].statistics.adopted_tokens == 239


def test_the_faster_reader_is_found_by_measuring():
    bench = reading("auto")
    for id in range(1, 9):
        bench.submit(id, max_tokens=3, prompt=(id, *LONG))
        bench.run()
    assert len(told(bench, Prefill)) == 7

    bench.workers["prefill"].seconds_a_token = 1.0
    for id in range(9, 17):
        bench.submit(id, max_tokens=3, prompt=(id, *LONG))
        bench.run()

    assert len(told(bench, Prefill)) == 8
    assert all(bench.tokens[id] == reference((id, *LONG), 3, seed=id) for id in range(1, 17))


@pytest.mark.parametrize("failing", ["dies", "refuses", "is silent", "is not there"])
def test_without_the_prefill_worker_the_target_reads(failing):
    bench = reading()
    if failing == "refuses":
        bench.workers["prefill"].refuses = True
    if failing == "is not there":
        bench.kill("prefill")
    bench.submit(1, max_tokens=20, prompt=LONG)
    if failing == "dies":
        bench.kill("prefill")
    if failing == "is silent":
        bench.queue.clear()
    bench.run()

    assert prefilled(bench) == [(239, 0)]
    assert bench.tokens[1] == reference(LONG, 20, seed=1)


def test_a_prefill_worker_that_was_silent_is_told_to_stop_and_not_asked_again_until_it_is_another():
    bench = reading()
    bench.submit(1, max_tokens=5, prompt=LONG)
    bench.queue.clear()
    bench.now = bench.machine.deadline() or 0.0
    commands = bench.step(Tick())
    bench.run()
    assert SendMessage("prefill", Stop(SequenceId(1))) in commands

    bench.submit(2, max_tokens=5, prompt=(7, *LONG))
    bench.run()
    assert len(told(bench, Prefill)) == 1
    bench.kill("prefill")
    bench.up("prefill")
    bench.submit(3, max_tokens=5, prompt=(8, *LONG))

    assert len(told(bench, Prefill)) == 2


def test_kv_of_a_prefill_worker_that_the_target_refuses_ends_its_use():
    bench = reading()
    bench.shelf.broken = True
    for id in (1, 2):
        bench.submit(id, max_tokens=5, prompt=(id, *LONG))
        bench.run()

    assert len(told(bench, Prefill)) == 1
    assert [bench.tokens[id] for id in (1, 2)] == [reference((id, *LONG), 5, seed=id) for id in (1, 2)]


def test_a_target_that_dies_while_another_reads_starts_with_what_was_read():
    bench = reading()
    bench.submit(1, max_tokens=20, prompt=LONG)
    (offer,) = [item for item in bench.queue if item[2] == "prefill"]
    bench.kill("target")
    bench.queue.remove(offer)
    bench.step(Arrived("prefill", 1, offer[4]))
    bench.up("target")
    bench.run()

    assert prefilled(bench) == [(239, 239)]
    assert bench.tokens[1] == reference(LONG, 20, seed=1)


def test_a_cancelled_request_is_read_no_further_and_leaves_nothing():
    bench = reading()
    bench.submit(1, max_tokens=20, prompt=LONG)
    commands = bench.step(Ended(SequenceId(1), "cancelled"))
    bench.run()

    assert SendMessage("prefill", Stop(SequenceId(1))) in commands
    assert bench.shelf.tokens == {}
    assert bench.machine.deadline() is None
