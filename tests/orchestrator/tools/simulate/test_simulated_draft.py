"""The modelled draft says what the real draft worker says, message for message, whatever it is told."""

from collections.abc import Iterable

import hypothesis.strategies as st
import msgspec
from hypothesis import given, settings

from draft_worker.engine import Batch
from draft_worker.worker import DraftWorker
from orchestrator.tools.simulate.acceptance import AcceptanceModel, InventedLanguage
from orchestrator.tools.simulate.draft import ModelledDraft
from orchestrator.tools.simulate.language import VOCABULARY
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst, Chain, FanOut
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, FromWorker, Grow, Reroot, Start, Stop, ToWorker
from protocol.speculation.candidates import Candidates
from protocol.speculation.token_tree import node_id
from protocol.worker.pacing import DevicePace
from tests.support.fake_draft import FakeEngine, FakeSequence

CONTEXT = 200
PACE = DevicePace(steps=((1, 0.01),), prefill_rate=1e3)
PLANS = [
    BestFirst(4, 3),
    BestFirst(1, 2),
    BestFirst(8, 4),
    Chain(4),
    FanOut(3, (2, 1, 0, 3)),
    FanOut(2, (1, 1, 1)),
    FanOut(4, (0, 2)),
    FanOut(2, (6, 7, 9)),
]


class LanguageSequence(FakeSequence):
    """Guesses what the language says of a path that begins with its prompt."""

    def __init__(self, language: InventedLanguage, request: int) -> None:
        super().__init__()
        self.language, self.request = language, request
        self.first = len(language.prompt(request))

    def evaluate(self, batch: Batch) -> list[Candidates]:
        super().evaluate(batch)
        return [self.guesses(path, batch.limit) for path in self.evaluated[-len(batch.tokens) :]]

    def guesses(self, path: tuple[int, ...], limit: int) -> Candidates:
        node = node_id(NodeId(0), path[self.first - 1])
        for token in path[self.first :]:
            node = node_id(node, token)
        positions = range(self.first, len(path))
        on_truth = all(path[position] == self.language.token(self.request, position) for position in positions)
        found = self.language.guesses(self.request, node, len(path), on_truth, limit)
        return Candidates([guess.token for guess in found], [guess.claim for guess in found])


class LanguageEngine(FakeEngine):
    vocabulary = VOCABULARY

    def __init__(self, language: InventedLanguage) -> None:
        super().__init__(CONTEXT)
        self.language = language

    def open(self, sampling: Sampling, vocabulary: int) -> FakeSequence:
        self.opened.append(LanguageSequence(self.language, sampling.seed))
        return self.opened[-1]


class Pair:
    """The real worker and the modelled one, told the same."""

    def __init__(self, language: InventedLanguage) -> None:
        self.language = language
        self.real = DraftWorker(LanguageEngine(language), lambda: 0.0, prefill_chunk=512)
        self.modelled = ModelledDraft(language, PACE, CONTEXT)
        self.committed: dict[SequenceId, list[int]] = {}
        self.rounds: dict[SequenceId, int] = {}

    def tell(self, message: ToWorker) -> None:
        assert bare(self.real.handle(message)) == bare(self.modelled.handle(message).replies)

    def work(self) -> None:
        work = self.modelled.work()
        assert self.real.has_work == (work is not None)
        if work is not None:
            assert bare(self.real.work()) == bare(work.replies)

    def start(self, id, plan) -> None:
        tokens = self.committed.setdefault(id, list(self.language.prompt(id)))
        self.rounds.setdefault(id, 0)
        self.tell(Start(id, self.rounds[id], tuple(tokens), self.root(id), Sampling(seed=id), plan))

    def reroot(self, id, count, missed, plan, skip) -> None:
        """Tell of `count` more tokens, of which the last `skip` were told of before or never will be."""
        if id not in self.committed:
            return
        tokens = self.committed[id]
        position = len(tokens) - 1
        if position + count >= CONTEXT - 2:
            return
        new = [self.language.token(id, len(tokens) + index) for index in range(count)]
        tokens += new
        self.rounds[id] += 1
        if not skip:
            self.tell(Reroot(id, self.rounds[id], position, tuple(new), self.root(id), missed, plan))

    def root(self, id) -> NodeId:
        first = len(self.language.prompt(id))
        tokens = self.committed[id]
        root = node_id(NodeId(0), tokens[first - 1])
        for token in tokens[first:]:
            root = node_id(root, token)
        return root


def bare(messages: Iterable[FromWorker]) -> list[FromWorker | tuple[str, SequenceId | None]]:
    """Without what differs by nature: measured seconds and the wording of faults."""
    return [
        msgspec.structs.replace(message, seconds=0.0)
        if isinstance(message, Grow)
        else (message.kind, message.sequence)
        if isinstance(message, Fault)
        else message
        for message in messages
    ]


ids = st.sampled_from([SequenceId(1), SequenceId(1), SequenceId(2)])
plans = st.sampled_from(PLANS)
work = st.tuples(st.just("work"), st.integers(1, 8))
counts = st.sampled_from([1, 1, 2, 3, 4, 17, 20])
skips = st.integers(0, 15).map(lambda drawn: drawn == 15)
reroot = st.tuples(st.just("reroot"), ids, counts, st.booleans(), st.none() | plans, skips)
start = st.tuples(st.just("start"), ids, plans)
stop = st.tuples(st.just("stop"), ids)
orders = st.one_of(work, reroot, work, reroot, start, stop)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(plan=plans, orders=st.lists(orders, min_size=10, max_size=40), prompt_tokens=st.sampled_from([1, 17, 40]))
def test_the_modelled_draft_grows_as_the_real_one(plan, orders, prompt_tokens):
    acceptance = AcceptanceModel(accept=0.7, exponent=0.8, spread=1.5, claim_slope=1.3)
    pair = Pair(InventedLanguage(acceptance, seed=3, prompt_tokens=prompt_tokens))
    pair.start(SequenceId(1), plan)
    for order, *arguments in orders:
        match order:
            case "work":
                for _ in range(arguments[0]):
                    pair.work()
            case "start":
                pair.start(*arguments)
            case "reroot":
                pair.reroot(*arguments)
            case "stop":
                pair.tell(Stop(arguments[0]))


def test_what_is_hardly_possible_is_not_grown_by_either():
    pair = Pair(InventedLanguage(AcceptanceModel(accept=0.99), seed=1))
    pair.start(SequenceId(1), BestFirst(8, 2))
    for _ in range(300):
        pair.work()

    assert pair.modelled.work() is None
    assert not pair.real.has_work


def test_a_cap_on_nodes_ends_growth_alike():
    pair = Pair(InventedLanguage(AcceptanceModel(accept=1.0), seed=1))
    pair.start(SequenceId(1), BestFirst(8, 4))
    for _ in range(300):
        pair.work()

    assert pair.modelled.work() is None
    assert not pair.real.has_work
