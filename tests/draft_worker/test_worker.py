"""Laws of the draft's message handling, over an engine that checks how its rows are used."""

import random

import msgspec
import pytest

from draft_worker.worker import DraftWorker
from protocol.messages.base import MAX_NODES, NodeId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Extend, Fault, Reroot, Start, Stop
from protocol.speculation.prompt_lookup import PromptLookup
from protocol.speculation.token_tree import node_id
from protocol.worker.interface import WorkerReply
from tests.support.draft_conversation import ONE, ROOT, TWO, Conversation, grows
from tests.support.fake_draft import VOCABULARY, FakeEngine, FakeSequence, oracle

PROMPT = (3, 1, 4, 1, 5)


class Ticking:
    """A clock that advances half a second at each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


class Bench(Conversation):
    """A worker of the fake engine, and one of its sequences."""

    def __init__(self, plan: GrowthPlan | None = None, prompt: tuple[int, ...] = PROMPT, context: int = 10_000) -> None:
        self.engine = FakeEngine(context)
        super().__init__(DraftWorker(self.engine, Ticking(), prefill_chunk=32), prompt, plan)
        self.start()

    @property
    def rows(self) -> FakeSequence:
        return self.engine.opened[-1]


def only_fault(replies: list[WorkerReply]) -> Fault:
    (fault,) = replies
    assert isinstance(fault, Fault)
    return fault


def test_the_first_growth_is_what_follows_the_prompt_and_growth_states_its_cost_by_the_given_clock():
    bench = Bench()
    grow, later = grows(bench.work(2))
    expected = oracle(PROMPT, 3)

    assert (grow.request, grow.round, grow.parents) == (ONE, 0, (ROOT,) * 3)
    assert (list(grow.tokens), list(grow.probabilities)) == (expected.tokens, expected.probabilities)
    assert (later.evaluated, later.seconds) == (2, 0.5)


def test_a_plan_with_lookup_gives_each_node_what_followed_its_last_tokens():
    bench = Bench(BestFirst(width=2, fan=3, lookup=True), prompt=(1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2))
    bench.work(2)
    before = len(bench.rows.evaluated)
    lookup = PromptLookup()
    lookup.extend(bench.tokens[:-1])
    assert bench.rows.followers[0] == lookup.continuations([*bench.tokens], 1) == [(3, pytest.approx(2 / 3))]

    bench.commit(3, 4)
    bench.work(2)

    lookup.extend([2, 3])
    expected = [lookup.continuations(path, 8) for path in bench.rows.evaluated[before:]]
    assert bench.rows.followers[before:] == expected
    assert {token for token, _ in expected[0]} == {8, 9}


def test_a_long_prompt_is_prefilled_in_chunks_before_the_first_growth():
    bench = Bench(prompt=tuple(range(45)) + tuple(range(45)))
    silent = bench.work(3)

    assert silent == []
    assert bench.rows.forwards == [-32, -32, -25]
    assert grows(bench.work())[0].evaluated == 1


def test_a_re_root_along_the_tree_keeps_what_was_evaluated():
    bench = Bench()
    bench.work(6)
    before = len(bench.rows.evaluated)
    main = bench.tree.root.main_child
    assert main is not None
    replies = bench.commit(main.token)
    bench.work(6)

    assert replies == []
    assert len(set(bench.rows.evaluated)) == len(bench.rows.evaluated) > before
    assert bench.rows.prefix == list(PROMPT)


def test_a_miss_costs_one_forward():
    bench = Bench()
    bench.work(3)
    unseen = next(token for token in range(VOCABULARY) if token not in bench.tree.root.children)
    bench.commit(unseen, 7, 8, missed=True)
    forwards = len(bench.rows.forwards)
    (grow,) = grows(bench.work())

    assert bench.rows.forwards[forwards:] == [3]
    assert list(grow.tokens) == oracle([*PROMPT, unseen, 7, 8], 3).tokens
    assert not bench.rows.followers, "the plan has no lookup"


def test_a_missed_root_with_children_is_published_again():
    bench = Bench()
    bench.work(8)
    main = bench.tree.root.main_child
    assert main is not None
    assert main.children
    bench.tree.advance([main.token])
    expected = {node.id for node in bench.tree}
    (again,) = grows(bench.commit(main.token, missed=True))

    assert (again.evaluated, again.seconds, again.round) == (0, 0.0, 1)
    assert {node.id for node in bench.tree} == expected


def test_a_repeated_start_changes_nothing():
    bench = Bench()
    bench.work(3)
    evaluated = list(bench.rows.evaluated)

    assert bench.start() == []
    bench.work(3)
    assert bench.rows.evaluated[: len(evaluated)] == evaluated
    assert len(set(bench.rows.evaluated)) == len(bench.rows.evaluated)


def test_a_start_reuses_the_prefix_that_it_shares():
    bench = Bench(prompt=tuple(range(40)))
    bench.work(3)
    bench.tokens[35:] = [1, 1, 1]
    bench.round = 4
    bench.start()
    forwards = len(bench.rows.forwards)
    (grow,) = grows(bench.work())

    assert bench.rows.forwards[forwards:] == [3]
    assert list(grow.tokens) == oracle(bench.tokens, 3).tokens


def test_a_start_with_other_sampling_begins_anew():
    bench = Bench()
    bench.work()
    other = Start(ONE, 0, PROMPT, ROOT, Sampling(temperature=1.0), bench.plan)
    bench.tell(other)
    bench.work()

    assert len(bench.engine.opened) == 2
    assert bench.rows.evaluated == [PROMPT]


@pytest.mark.parametrize("missed", [False, True])
def test_a_repeated_re_root_is_ignored(missed: bool):
    bench = Bench()
    bench.work(6)
    message = bench.reroot(5, 6, missed=missed)
    bench.tell(message)
    bench.work()

    assert bench.tell(message) == []
    assert list(grows(bench.work())[0].parents) != []


SKIPS_ONE = Reroot(ONE, 2, len(PROMPT), (6,), node_id(node_id(ROOT, 5), 6), False)
ANOTHER_ROOT = Reroot(ONE, 1, len(PROMPT) - 1, (5,), NodeId(12345), False)
UNKNOWN = Reroot(TWO, 1, 4, (5,), NodeId(1), False)


@pytest.mark.parametrize("message", [SKIPS_ONE, ANOTHER_ROOT, UNKNOWN], ids=["skips one", "another root", "unknown"])
def test_a_re_root_that_does_not_follow_is_lost(message: Reroot):
    fault = only_fault(Bench().tell(message))

    assert (fault.kind, fault.request) == ("lost", message.request)


def test_a_start_restores_a_lost_sequence():
    bench = Bench()
    bench.work(4)
    bench.reroot(5)
    bench.commit(6)
    bench.start()
    (grow,) = grows(bench.work())

    assert grow.round == 2
    assert list(grow.tokens) == oracle([*PROMPT, 5, 6], 3).tokens


def test_a_re_root_while_prefilling_means_more_to_prefill():
    bench = Bench(prompt=tuple(range(50)) * 2)
    bench.work()
    replies = bench.commit(7, 8, 9, missed=True)
    grow = grows(bench.work(5))[0]

    assert replies == []
    assert list(grow.tokens) == oracle(bench.tokens, 3).tokens


def test_a_new_plan_comes_with_a_re_root():
    bench = Bench(BestFirst(width=2, fan=3))
    bench.work(2)
    bench.commit(48, plan=Chain(2))
    replies = grows(bench.work(10))

    assert [len(grow.tokens) for grow in replies] == [1, 1]


def test_a_resting_draft_grows_when_it_is_asked_also_before_the_re_root_and_not_below_an_old_root():
    bench = Bench(BestFirst(width=2, fan=3, steps=0))
    assert not grows(bench.work(3))
    bench.tell(Extend(ONE, bench.round, 2))
    assert len(grows(bench.work(5))) == 2

    bench.tell(Extend(ONE, bench.round + 1, 1))
    assert not grows(bench.work(3))
    bench.commit(7)
    assert len(grows(bench.work(3))) == 1

    assert not bench.tell(Extend(ONE, bench.round - 1, 9))
    assert not bench.tell(Extend(TWO, bench.round, 9))
    assert not grows(bench.work(3))


def test_bonus_guesses_that_need_no_forward_follow_the_re_root_at_once():
    bench = Bench(FanOut(depth=2, fan=(1, 1, 1)))
    bench.work(3)
    main = next(bench.tree.main_chain())
    (at_once,) = grows(bench.tell(bench.reroot(main.token, plan=FanOut(depth=1, fan=(2, 1)))))

    assert (at_once.evaluated, at_once.parents) == (0, (bench.root,))


@pytest.mark.parametrize("start", [True, False])
def test_a_token_beyond_the_vocabulary_is_refused_in_a_start_and_in_a_re_root(start: bool):
    bench = Bench()
    message = bench.reroot(VOCABULARY)
    fault = only_fault(bench.tell(bench.started() if start else message))

    assert (fault.kind, fault.request) == ("refused", ONE)
    assert str(VOCABULARY) in fault.text
    assert not bench.worker.has_work


def test_a_tree_that_reaches_the_end_of_the_context_parks_the_sequence_until_the_root_moves():
    bench = Bench(context=len(PROMPT) + 3)
    bench.work(100)

    assert not bench.worker.has_work
    assert max(node.depth for node in bench.tree) == len(PROMPT) + 2
    bench.commit(1, 2, 3, 4, 5, 6)
    assert bench.worker.has_work


def test_a_stopped_sequence_is_forgotten():
    bench = Bench()
    assert bench.tell(Stop(TWO)) == bench.tell(Stop(ONE)) == []

    assert not bench.worker.has_work
    assert only_fault(bench.commit(5)).kind == "lost"


def test_a_parked_sequence_leaves_its_turn_to_others():
    bench = Bench(Chain(1))
    bench.plan = BestFirst(width=1, fan=1)
    bench.tell(msgspec.structs.replace(bench.started(), request=TWO))
    order = [grow.request for _ in range(4) for grow in grows(bench.worker.work())]

    assert order == [ONE, TWO, TWO, TWO]


def test_a_large_publication_is_split_and_its_cost_reported_once():
    bench = Bench(FanOut(depth=29, fan=(40,) * 30))
    bench.work(29)
    replies = grows(bench.work())

    assert [len(grow.tokens) for grow in replies] == [MAX_NODES, 30 * 40 - MAX_NODES]
    assert [grow.evaluated for grow in replies] == [1, 0]
    assert [grow.seconds for grow in replies] == [0.5, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_growth_after_any_verdict_equals_that_of_a_new_start(seed: int):
    source = random.Random(seed)
    bench = Bench(source.choice([BestFirst(3, 2), Chain(3), FanOut(2, (1, 2, 1))]), prompt=tuple(range(30)))
    for _ in range(25):
        bench.work(source.randrange(4))
        tokens, node = [], bench.tree.root
        for _ in range(source.randint(1, 4)):
            likely = [*node.children] if node and source.random() < 0.8 else []
            tokens.append(source.choice(likely) if likely else source.randrange(VOCABULARY))
            node = node.children.get(tokens[-1]) if node else None
        assert not [reply for reply in bench.commit(*tokens, missed=True) if isinstance(reply, Fault)]

    assert bench.work(50)
    for node in bench.tree:
        path, up = [], node
        while up is not None:
            path.append(up.token)
            up = up.parent
        expected = oracle([*bench.tokens[:-1], *path[::-1]], 4)
        assert [*node.children] == expected.tokens[: len(node.children)]


def test_the_hello_names_the_role_draft():
    hello = Bench().worker.hello()

    assert (hello.role, hello.engine, hello.vocabulary, hello.context) == ("draft", "fake", VOCABULARY, 10_000)
