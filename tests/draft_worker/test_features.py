"""Laws of a draft that reads the target's features: which tokens they are fed for, and how long it waits for them."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_worker.features import HOLD_SECONDS
from draft_worker.sequence import AcceptanceCheck
from draft_worker.worker import DraftWorker
from protocol.features.blocks import shipments
from protocol.kv.arena_header import ElementType
from protocol.messages.features import Features
from protocol.messages.plans import BestFirst
from protocol.messages.worker import Grow, Stop, Unfit
from protocol.speculation.rolling_context import RollingContext
from protocol.worker.interface import WorkerReply
from protocol.worker.pacing import DevicePace, Pacer
from tests.support.conditioned_draft import FORM, ConditionedEngine, ConditionedFake, FakeRing, features
from tests.support.draft_conversation import ONE, TWO, Conversation, grows
from tests.support.fake_draft import VOCABULARY, oracle

PROMPT = tuple(token % VOCABULARY for token in range(3, 45))
LONG = tuple(token * 7 % VOCABULARY for token in range(900))
RING = "lp-00000000000000000000"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Target(Conversation):
    """One sequence, and the ring that the target writes."""

    def __init__(self, worker: DraftWorker, rings: dict[str, FakeRing], prompt=PROMPT, id=ONE, ring=RING) -> None:
        super().__init__(worker, prompt, id=id)
        self.rings = rings
        self.renew(FakeRing(self.tokens), ring)

    def renew(self, ring: FakeRing, name: str) -> None:
        self.ring = self.rings[name] = ring
        self.name = name

    def prefill(self, until: int | None = None, first: int | None = None) -> list[WorkerReply]:
        """The target has prefilled the tokens up to `until`, and announces them from `first` on."""
        begin = self.ring.written if first is None else first
        self.ring.written = len(self.tokens) - 1 if until is None else until
        return self.announce(begin)

    def announce(self, first: int, rows: int | None = None) -> list[WorkerReply]:
        rows = self.ring.written - first if rows is None else rows
        return self.tell(Features(self.id, self.round, self.name, first, rows))

    def commit(self, *tokens: int, missed: bool = True, **options: bool) -> list[WorkerReply]:
        return super().commit(*tokens, missed=missed, **options)


class Bench:
    """A worker of a conditioned engine on a clock that stands still."""

    def __init__(self, prompt=PROMPT, context: int = 10_000, prefix_cache: int = 0) -> None:
        self.engine = ConditionedEngine(context)
        self.clock = Clock()
        self.rings: dict[str, FakeRing] = {}
        self.worker = DraftWorker(
            self.engine, self.clock, prefill_chunk=32, prefix_cache=prefix_cache, attach=self.rings.get
        )
        self.target = Target(self.worker, self.rings, prompt)

    @property
    def rows(self) -> ConditionedFake:
        rows = self.engine.opened[-1]
        assert isinstance(rows, ConditionedFake)
        return rows

    def work(self, units: int = 100) -> list[Grow]:
        return grows(self.target.work(units))

    def fed(self) -> list[int]:
        """Positions of the tokens that were fed, in order."""
        return [self.rows.positions[index] for index in sorted(self.rows.positions)]


def drafting(prompt=PROMPT, **options) -> Bench:
    """A draft that has read the prompt and grown."""
    bench = Bench(prompt, **options)
    bench.target.start()
    bench.target.prefill()
    assert bench.work(40)
    return bench


def unguessed(bench: Bench) -> int:
    """A token that is no child of the root."""
    guesses = bench.rows.evaluated
    seen = {path[len(bench.target.tokens)] for path in guesses if len(path) > len(bench.target.tokens)}
    return next(token for token in range(VOCABULARY) if token not in seen)


# What is fed --------------------------------------------------------------------------------------


def test_the_prompt_is_fed_once_and_read_in_chunks_before_the_first_growth():
    bench = Bench()
    bench.target.start()
    bench.target.prefill()
    (first, *_) = bench.work(3)

    assert bench.fed() == list(range(len(PROMPT) - 1))
    assert bench.rows.reads == [32]
    assert first.staleness == 0


def test_a_lost_announcement_is_made_up_for_by_the_next_one():
    bench = drafting()
    bench.target.commit(5, 6)
    bench.target.ring.written = len(bench.target.tokens) - 1
    bench.target.commit(7)
    bench.target.prefill()

    assert bench.fed() == list(range(len(bench.target.tokens) - 1))


def test_reused_kv_of_the_target_leaves_the_first_tokens_without_features():
    bench = Bench()
    bench.target.start()
    bench.target.ring.begin = bench.target.ring.written = 30
    bench.target.prefill()
    bench.work()

    assert bench.fed() == list(range(30, len(PROMPT) - 1))


def test_a_new_ring_takes_the_place_of_the_old_one():
    bench = drafting()
    old = bench.target.ring
    bench.target.renew(FakeRing(bench.target.tokens, first=20), "lp-11111111111111111111")
    bench.target.commit(5)
    bench.target.prefill()

    assert old.closed == 1
    assert bench.fed() == list(range(len(PROMPT)))


def test_the_ring_is_closed_with_its_sequence():
    bench = drafting()
    bench.target.tell(Stop(ONE))

    assert bench.target.ring.closed == 1


def test_an_engine_that_reads_no_features_ignores_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ConditionedEngine, "features", None)
    bench = Bench()
    monkeypatch.setattr(ConditionedFake, "staleness", 0)
    monkeypatch.setattr(ConditionedFake, "unread", False)
    bench.target.start()

    assert bench.target.prefill() == []
    assert bench.target.ring.reads == []


# Anew ---------------------------------------------------------------------------------------------


def test_anew_drops_all_nodes_and_grows_from_the_root_with_fresh_features():
    bench = drafting()
    guess = bench.rows.evaluated[-1][len(PROMPT)]
    asked = len(bench.rows.evaluated)
    assert bench.target.commit(guess, anew=True) == []
    assert not bench.worker.has_work
    bench.target.prefill()
    (grow,) = bench.work(1)

    assert grow.staleness == 0
    assert set(grow.parents) == {bench.target.root}
    assert bench.rows.evaluated[asked] == tuple(bench.target.tokens)


# How long it waits --------------------------------------------------------------------------------


def test_the_draft_waits_for_the_features_of_the_prompt_as_long_as_the_target_prefills_it():
    bench = Bench()
    bench.target.start()
    for _ in range(3):
        bench.clock.now += 5.0
        assert not bench.worker.has_work
    bench.target.prefill(20)
    bench.work()
    assert bench.rows.stale_steps == []
    bench.target.prefill()
    bench.work(3)

    assert bench.rows.stale_steps[0] == 0


def test_the_first_reroot_ends_the_wait_for_the_prompt():
    bench = Bench()
    bench.target.start()
    bench.target.commit(5)
    assert not bench.worker.has_work
    bench.clock.now += HOLD_SECONDS

    assert bench.worker.has_work
    assert bench.work(1)[0].staleness == len(PROMPT)


def test_a_missed_root_waits_for_its_features_and_no_longer_than_it_should():
    for arrives in (True, False):
        bench = drafting()
        bench.target.commit(unguessed(bench))
        bench.clock.now += HOLD_SECONDS - 0.01
        assert not bench.worker.has_work
        if arrives:
            bench.target.prefill()
        else:
            bench.clock.now += 0.02
        assert bench.worker.has_work
        assert bench.work(1)[0].staleness == (0 if arrives else 1)


def test_a_root_with_candidates_does_not_wait():
    bench = drafting()
    bench.target.commit(bench.rows.evaluated[-1][len(PROMPT)])

    assert bench.worker.has_work
    assert bench.work(1)[0].staleness == 1


def test_roots_without_features_are_waited_for_once():
    """Rounds are shorter than the wait, which would otherwise never end."""
    bench = drafting()
    held = 0.0
    for _ in range(100):
        bench.target.commit(unguessed(bench))
        for _ in range(5):
            held += 0.01 * (not bench.worker.has_work)
            bench.clock.now += 0.01
        bench.work(3)

    assert HOLD_SECONDS - 0.01 < held < HOLD_SECONDS + 0.05


def test_a_paced_draft_takes_the_devices_time_to_read_features_and_none_to_note_tokens():
    bench = Bench()
    pace = DevicePace(steps=((1, 0.25),), prefill_rate=64.0)

    def sleep(seconds: float) -> None:
        bench.clock.now += seconds

    pacer = Pacer(pace, bench.clock, sleep)
    bench.worker = DraftWorker(bench.engine, bench.clock, prefill_chunk=32, pacer=pacer, attach=bench.rings.get)
    bench.target.worker = bench.worker
    began = bench.clock.now
    bench.target.start()
    bench.target.prefill()
    assert bench.clock.now == began
    bench.work(2)

    assert bench.rows.reads == [32]
    assert bench.clock.now == began + 32 / 64 + 0.25


# Faults -------------------------------------------------------------------------------------------


FAULTS: dict[str, Callable[[np.ndarray, int], np.ndarray | None]] = {
    "torn": lambda rows, first: None,
    "another form": lambda rows, first: rows[:, :1],
    "fewer rows": lambda rows, first: rows[:-1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_features_that_can_not_be_used_are_not_fed_and_not_waited_for(fault: str):
    bench = Bench()
    bench.target.ring.damage = FAULTS[fault]
    bench.target.start()
    bench.target.prefill()
    grown = bench.work(5)

    assert bench.fed() == []
    assert grown[0].staleness == len(PROMPT) - 1
    reads = len(bench.target.ring.reads)
    bench.target.commit(unguessed(bench))
    bench.target.prefill()
    assert bench.work(2)
    assert len(bench.target.ring.reads) == reads + 1


def test_rows_that_are_overwritten_during_the_reading_are_left_out_and_no_others():
    def overwriting(rows: np.ndarray, first: int) -> np.ndarray | None:
        bench.target.ring.begin = 10
        return rows if first >= 10 else None

    bench = Bench()
    bench.target.ring.damage = overwriting
    bench.target.start()
    bench.target.prefill()

    assert bench.fed() == list(range(10, len(PROMPT) - 1))


@pytest.mark.parametrize(
    "stray",
    [
        Features(TWO, 0, RING, 0, 10),
        Features(ONE, 0, RING, 5, 10),
        Features(ONE, 0, RING, 0, 0),
        Features(ONE, 40, RING, 500_000, 1_000),
    ],
    ids=["another sequence", "repeated", "none", "beyond"],
)
def test_stray_announcements_feed_nothing(stray: Features):
    bench = drafting()
    fed = bench.fed()
    assert bench.target.tell(stray) == []

    assert bench.fed() == fed


# From another machine -----------------------------------------------------------------------------


def test_blocks_from_another_machine_feed_like_a_ring():
    bench = Bench()
    bench.target.start()
    for first, stop in ((0, 30), (30, len(PROMPT) - 1)):
        assert not bench.worker.has_work or first
        rows = features(first, PROMPT[first:stop], FORM.outputs)
        for shipment in shipments(ONE, 0, first, FORM, ElementType.FLOAT32, rows):
            assert list(bench.worker.handle(shipment)) == []
    (grow, *_) = bench.work(3)

    assert bench.fed() == list(range(len(PROMPT) - 1))
    assert grow.staleness == 0


# Shared prefixes ----------------------------------------------------------------------------------


def test_the_next_request_of_a_chat_goes_on_from_the_rows_that_the_last_one_kept():
    bench = drafting(LONG[:200], prefix_cache=1 << 20)
    bench.target.tell(Stop(ONE))
    turn = Target(bench.worker, bench.rings, LONG[:240], TWO, "lp-22222222222222222222")
    turn.ring.begin = turn.ring.written = 199
    turn.start()
    assert bench.work() == []
    turn.prefill()
    sequence = bench.worker._sequences[TWO]
    assert isinstance(sequence.engine, ConditionedFake)

    assert sequence.engine.positions == {index: index for index in range(239)}
    assert bench.work(5)[0].staleness == 0
    assert sequence.engine.reads == [32]


# Any order ----------------------------------------------------------------------------------------


@given(st.data())
def test_features_are_fed_for_their_own_tokens_in_any_order_of_events(data: st.DataObject):
    """The engine checks each row that it is fed; here we check that none is missing that was still there."""
    source = random.Random(data.draw(st.integers(0, 1 << 30), label="seed"))
    context = data.draw(st.sampled_from([40, 64, 10_000]), label="context")
    prompt = tuple(source.randrange(VOCABULARY) for _ in range(data.draw(st.integers(2, 80), label="prompt")))
    bench = Bench(prompt, context)
    target = bench.target
    target.ring.window = data.draw(st.sampled_from([8, 50, 1 << 20]), label="window")
    target.round = data.draw(st.integers(0, 1), label="round")
    target.start()
    steps = st.sampled_from(["write", "announce", "hit", "miss", "anew", "restart", "work", "time", "new ring"])
    for step in data.draw(st.lists(steps, max_size=25), label="steps"):
        ring = target.ring
        if step == "write":
            ring.written = min(len(target.tokens) - 1, ring.written + source.randrange(1, 40))
        elif step == "announce":
            first = source.randrange(ring.available.start, ring.written + 1)
            target.announce(first, source.randrange(ring.written - first + 1))
        elif step in ("hit", "miss", "anew"):
            children = [path[len(target.tokens)] for path in bench.rows.evaluated if len(path) > len(target.tokens)]
            guesses = children if step != "miss" and children else range(VOCABULARY)
            tokens = [source.choice(guesses), *(source.randrange(VOCABULARY) for _ in range(source.randrange(3)))]
            target.commit(*tokens, anew=step == "anew", missed=step != "hit")
        elif step == "restart":
            target.round += 1
            target.start()
        elif step == "work":
            bench.work(source.randrange(1, 5))
        elif step == "time":
            bench.clock.now += source.choice([0.01, 0.3])
        else:
            renewed = FakeRing(target.tokens, ring.window, source.randrange(ring.written + 1))
            target.renew(renewed, f"lp-{source.randrange(10**20):020}")
        length, rolling = len(target.tokens) - 1, RollingContext(context)
        assert bench.rows.prefix == rolling.seen(target.tokens[:-1])
        assert all(rolling.run(index, length)[0] == position for index, position in bench.rows.positions.items())

    target.prefill()
    bench.clock.now += 1.0
    assert bench.work(10) or not bench.worker.has_work
    last = len(target.tokens) - 2
    assert target.ring.available.start > last or max(bench.rows.positions.values()) == last


# Whether the draft fits the target ----------------------------------------------------------------


REPEATED = [*range(10, 30)] * 8
Next = Callable[[Bench], int]
FITTING: dict[str, tuple[Next, bool, bool, list[WorkerReply]]] = {
    "it fits": (lambda bench: oracle(bench.target.tokens, 1).tokens[0], True, False, []),
    "never right": (unguessed, True, False, [Unfit(12, 0)]),
    "without features": (unguessed, False, False, []),
    "repeated text": (lambda bench: REPEATED[len(bench.target.tokens)], True, False, [Unfit(12, 0)]),
    "guessed by lookup": (lambda bench: REPEATED[len(bench.target.tokens)], True, True, []),
}


@pytest.mark.parametrize("case", FITTING)
def test_a_draft_that_is_never_right_with_fresh_features_is_reported_once(case: str):
    chosen, fed, lookup, reports = FITTING[case]
    bench = Bench(REPEATED[:40])
    bench.target.plan = BestFirst(2, 3, lookup=lookup)
    bench.target.start()
    bench.target.prefill()
    bench.work(40)
    replies: list[WorkerReply] = []
    for _ in range(100):
        replies += bench.target.commit(chosen(bench))
        if fed:
            bench.target.prefill()
        bench.clock.now += 2 * HOLD_SECONDS
        bench.work(20)

    assert [reply for reply in replies if isinstance(reply, Unfit)] == reports


@pytest.mark.parametrize(
    ("expected", "share", "least", "most"),
    [(0, 0.05, 0.95, 1.0), (0, 0.35, 0.0, 0.03), (0, 0.5, 0.0, 0.005), (0.8, 0.2, 0.85, 1.0), (0.8, 0.5, 0.0, 0.01)],
)
def test_a_draft_far_below_what_is_expected_is_found_and_one_that_fits_is_left_alone(
    expected: float, share: float, least: float, most: float
):
    source, reported = random.Random(7), 0
    for _ in range(2000):
        check = AcceptanceCheck(expected)
        for _ in range(100):
            check.observe(source.random() < share)
        reported += len([*check.report()])

    assert least <= reported / 2000 <= most
