"""Laws of the modelled draft: the order of its work, prefill, and answers to a new root."""

from itertools import chain

import pytest

from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.workers import ModelledDraft
from protocol.messages.base import NodeId, Round, SequenceId
from protocol.messages.plans import BestFirst, Chain, GrowthPlan
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Grow, Reroot, Start
from protocol.speculation.rolling_context import RollingContext
from protocol.speculation.token_tree import node_id
from protocol.worker.pacing import DevicePace

ONE, TWO = SequenceId(1), SequenceId(2)
SERIAL = BestFirst(width=1, fan=2)
PACE = DevicePace(steps=((1, 0.01), (101, 1.01)), prefill_rate=1e3)
ROOT = NodeId(1)


def draft(context: int = 4000) -> ModelledDraft:
    return ModelledDraft(ModelledLanguage(AcceptanceModel(accept=0.9), seed=3), PACE, context)


def start(sequence: SequenceId = ONE, length: int = 1, plan: GrowthPlan = SERIAL) -> Start:
    return Start(sequence, 0, (7,) * length, ROOT, Sampling(), plan)


def reroot(tokens: tuple[int, ...], round: Round = 1, position: int = 0, missed: bool = False) -> Reroot:
    root = ROOT
    for token in tokens:
        root = node_id(root, token)
    return Reroot(ONE, round, position, tokens, root, missed)


def growth(draft: ModelledDraft, steps: int) -> list[Grow]:
    works = [draft.work() for _ in range(steps)]
    return [reply for work in works if work for reply in work.replies if isinstance(reply, Grow)]


def test_sequences_are_served_in_turns():
    worker = draft()
    worker.handle(start(ONE))
    worker.handle(start(TWO))

    assert [grow.sequence for grow in growth(worker, 4)] == [ONE, TWO, ONE, TWO]


def test_a_long_prompt_is_prefilled_in_chunks_before_anything_grows():
    worker = draft()
    worker.handle(start(length=1025))
    chunks = [worker.work(), worker.work()]

    assert [(work.replies, work.seconds) for work in chunks if work] == [((), 0.512)] * 2
    assert [grow.evaluated for grow in growth(worker, 1)] == [1]


def test_a_prompt_beyond_the_context_is_prefilled_as_far_as_the_draft_sees_it():
    worker = draft(context=64)
    worker.handle(start(length=200))
    prefill = worker.work()

    assert prefill is not None
    assert prefill.seconds == pytest.approx((199 - RollingContext(64).skipped(199)) / PACE.prefill_rate)
    assert [grow.parents for grow in growth(worker, 1)] == [(ROOT, ROOT)]


def test_a_conversation_that_outgrows_the_context_is_read_again_in_part_and_grows_on():
    worker, root, prefills = draft(context=64), ROOT, 0
    worker.handle(start(length=40))
    for position in range(39, 120):
        work = worker.work()
        while work is not None and not work.replies:
            prefills += 1
            work = worker.work()
        assert work is not None, f"silent at {position}"
        token, root = 9, node_id(root, 9)
        worker.handle(Reroot(ONE, position - 38, position, (token,), root, missed=False))

    assert prefills == 1 + len({RollingContext(64).skipped(length) for length in range(39, 120)} - {0})


def test_a_short_backlog_is_evaluated_in_a_growth_step():
    worker = draft()
    worker.handle(start(length=17))
    work = worker.work()

    assert work is not None
    assert work.seconds == pytest.approx(0.17)
    assert [reply.evaluated for reply in work.replies if isinstance(reply, Grow)] == [17]


def test_a_plan_that_is_fulfilled_leaves_no_work_until_the_root_moves():
    worker = draft()
    worker.handle(start(plan=Chain(3)))
    main = growth(worker, 3)
    assert worker.work() is None
    worker.handle(reroot((main[0].tokens[0],)))

    assert len(growth(worker, 2)) == 1


def test_after_a_miss_the_surviving_nodes_are_sent_again():
    worker = draft()
    worker.handle(start())
    sent = growth(worker, 6)
    token = sent[0].tokens[0]
    root = node_id(ROOT, token)
    (again,) = worker.handle(reroot((token,), missed=True)).replies

    assert isinstance(again, Grow)
    below = {root}
    for grow in sent:
        children = zip(grow.parents, grow.tokens, strict=True)
        below |= {node_id(parent, token) for parent, token in children if parent in below}
    assert {node_id(parent, token) for parent, token in zip(again.parents, again.tokens, strict=True)} == below - {root}
    assert again.evaluated == 0


def test_a_repeated_start_or_an_old_reroot_changes_nothing():
    worker, undisturbed = draft(), draft()
    for each in (worker, undisturbed):
        each.handle(start())
    first = growth(worker, 1)
    worker.handle(start())
    replies = worker.handle(reroot((5,), round=0)).replies

    assert replies == ()
    assert first + growth(worker, 3) == growth(undisturbed, 4)


@pytest.mark.parametrize("message", [reroot((5,), position=1), Reroot(ONE, 1, 0, (5,), NodeId(9), False)])
def test_a_reroot_that_does_not_continue_from_the_root_is_answered_with_a_fault(message: Reroot):
    worker = draft()
    worker.handle(start())
    unknown = draft().handle(message).replies

    faults = [reply for reply in chain(worker.handle(message).replies, unknown) if isinstance(reply, Fault)]
    assert [fault.kind for fault in faults] == ["lost", "lost"]
