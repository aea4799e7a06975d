"""What a worker may claim, and what the orchestrator believes: a lie costs the liar, and never a token or memory."""

import re
from typing import Any
from unicodedata import category

import msgspec
import pytest
from msgspec import convert

from orchestrator.core.commands import Emit, Finish, SendMessage
from orchestrator.core.events import Arrived, Submitted, Task, Tick, WorkerUp
from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import VOCABULARY
from orchestrator.lab.simulate.workers import ModelledTarget, modelled_hello
from protocol.errors import WireError
from protocol.messages.base import MAX_CONTEXT, MAX_NODES, MAX_SUPPORT, NodeId, PlainText, RequestId, plain
from protocol.messages.kv import KvOffer
from protocol.messages.plans import Distribution
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import (
    Fault,
    FromWorker,
    Grow,
    Paced,
    Ping,
    Pong,
    Prefilled,
    Start,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.speculation.token_tree import node_id
from protocol.transport import MAX_WORKER_FRAME, Stamp, decode, encode
from tests.support.paths import ROOT as PROJECT
from tests.support.scripted_simulation import LANGUAGE, TARGET

ONE = RequestId(1)
PROMPT = (1, 2, 3)
ROOT = node_id(NodeId(0), PROMPT[-1])
TOKENS = 40
_PACKAGES = ("protocol", "draft_worker", "target_worker", "orchestrator")
_STAMP = Stamp(7, 3)


class Request1:
    """A request whose target is honest, unless a test speaks in its name."""

    def __init__(self, verification: Any = "coupled", logprobs: int | None = None) -> None:
        self.machine = Machine(Options())
        self.target = ModelledTarget(LANGUAGE, TARGET)
        self.tokens: list[int] = []
        self.finished = False
        self.now = 0.0
        self.asked: list[Start | Verify] = []
        self.step(WorkerUp(1, modelled_hello("target")))
        self.step(WorkerUp(2, modelled_hello("draft")))
        self.step(Submitted(ONE, Task(PROMPT, Sampling(verification=verification, logprobs=logprobs), TOKENS)))

    @property
    def nodes(self) -> int:
        return len(self.machine.requests[ONE].tree)

    @property
    def stale(self) -> int:
        return self.machine.stale

    def step(self, event: Any) -> None:
        self.now += 0.01
        for command in self.machine.step(event, self.now).all():
            match command:
                case SendMessage(role="target", message=Start() | Verify() as message):
                    self.asked.append(message)
                case Emit(tokens=tokens):
                    self.tokens += tokens
                case Finish():
                    self.finished = True

    def claims(self, message: FromWorker, role: Any = "draft") -> None:
        self.step(Arrived(role, 1 if role == "target" else 2, message))

    def answer(self) -> None:
        """The honest target answers the oldest question; until there is one, time passes."""
        while not self.asked:
            self.now = max(self.now, self.machine.deadline() or 0.0)
            self.step(Tick())
        replies = self.target.handle(self.asked.pop(0)).replies
        while (work := self.target.work()) is not None:
            replies += work.replies
        for reply in replies:
            self.claims(reply, "target")

    def ends_as_it_should(self) -> bool:
        while not self.finished:
            self.answer()
        return self.tokens == [LANGUAGE.token(0, len(PROMPT) + index) for index in range(TOKENS)]


def grow(parents: list[NodeId], tokens: list[int], **more: Any) -> Grow:
    return Grow(ONE, 0, tuple(parents), tuple(tokens), (0.9,) * len(tokens), 1, 0.001, **more)


def test_a_verdict_beyond_the_vocabulary_is_dropped_and_counted():
    request = Request1()
    request.answer()
    for bonus in (VOCABULARY, (1 << 31) - 1):
        request.claims(Verdict(ONE, 0, (), bonus, 0.1), "target")

    assert (request.tokens, request.stale) == ([], 2)
    assert request.ends_as_it_should()


@pytest.mark.parametrize(("logprobs", "count"), [(None, 1), (0, 0), (0, 2)])
def test_a_verdict_that_tells_probabilities_of_more_or_fewer_tokens_is_dropped_and_counted(
    logprobs: int | None, count: int
):
    request = Request1(logprobs=logprobs)
    request.answer()
    request.claims(Verdict(ONE, 0, (), 1, 0.1, token_logprobs=(TokenLogprob(-1.0),) * count), "target")

    assert (request.tokens, request.stale) == ([], 1)


@pytest.mark.parametrize(("evaluated", "adopted"), [(3, 0), (0, 3), (2, 1), (MAX_CONTEXT, MAX_CONTEXT)])
def test_a_target_that_says_it_read_more_than_there_is_is_not_believed(evaluated: int, adopted: int):
    request = Request1()
    request.claims(Prefilled(ONE, 0, evaluated, 0.1, adopted), "target")

    assert request.stale == 1
    assert [type(message) for message in request.asked] == [Start]
    assert request.ends_as_it_should()


def test_a_chain_without_end_is_cut():
    request = Request1()
    tip = ROOT
    for _ in range(40):
        parents = []
        for _ in range(MAX_NODES):
            parents.append(tip)
            tip = node_id(tip, 1)
        request.claims(grow(parents, [1] * MAX_NODES))

    assert request.nodes == 1 << 13
    assert request.ends_as_it_should()


def test_a_node_with_more_children_than_any_plan_asks_for_is_cut():
    request = Request1()
    for begin in range(0, 4096, MAX_NODES):
        request.claims(grow([ROOT] * MAX_NODES, list(range(begin, begin + MAX_NODES))))

    assert request.nodes == 1 + 256


def test_growth_told_a_hundred_times_is_held_once():
    request = Request1()
    for _ in range(100):
        request.claims(grow([ROOT, ROOT, node_id(ROOT, 4)], [4, 5, 6]))

    assert request.nodes == 4
    assert request.ends_as_it_should()


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [([ROOT, ROOT], [VOCABULARY, (1 << 31) - 1]), ([NodeId(number) for number in range(500)], [1] * 500)],
    ids=["unknown tokens", "unknown nodes"],
)
def test_growth_that_there_can_not_be_is_not_held(parents: list[NodeId], tokens: list[int]):
    request = Request1()
    request.claims(grow(parents, tokens))

    assert request.nodes == 1


@pytest.mark.parametrize(("verification", "kept"), [("coupled", 0), ("rejection", 1)])
def test_distributions_are_held_only_where_somebody_asks_for_them(verification: str, kept: int):
    request = Request1(verification)
    request.claims(grow([ROOT], [4], distributions=(Distribution(ROOT, (4, 5), (0.5, 0.5)),)))
    speculation = request.machine.requests[ONE].speculation

    assert len(speculation.distributions([node for node in speculation.tree if node.token == 4])) == kept


def body(message: FromWorker | ToWorker, **changes: Any) -> bytes:
    return msgspec.msgpack.encode((1, *_STAMP, msgspec.to_builtins(message) | changes))


HELLO = modelled_hello("draft")
NAN, ENDLESS = float("nan"), float("inf")
REFUSED: dict[str, tuple[bytes, Any]] = {
    "a name that clears the terminal": (body(HELLO, model="\x1b[2J"), FromWorker),
    "a name with a line of the log": (body(HELLO, model="m\n2026-11-28 INFO the machine mine joined"), FromWorker),
    "a name that turns a line around": (body(HELLO, device="\u202egpj.exe"), FromWorker),
    "an engine that begins a line of its own": (body(HELLO, engine="mlx\u2028local target ready"), FromWorker),
    "a fault on two lines": (body(Fault("fatal", ""), text="ended\nTraceback"), FromWorker),
    "a name of nothing": (body(HELLO, model="\u200b\u2066"), FromWorker),
    "a device that rings": (body(HELLO, device="\x07"), FromWorker),
    "a fault in C1 controls": (body(Fault("fatal", ""), text="\x9b2J"), FromWorker),
    "a warning with a line feed backwards": (body(Prefilled(ONE, 0, 0, 0.0), warning="\x8d"), FromWorker),
    "a vocabulary that noise can't be made for": (body(HELLO, vocabulary=(1 << 20) + 1), FromWorker),
    "no vocabulary": (body(HELLO, vocabulary=0), FromWorker),
    "a context without end": (body(HELLO, context=MAX_CONTEXT + 1), FromWorker),
    "a negative process": (body(HELLO, pid=-1), FromWorker),
    "a probability that is no number": (body(grow([ROOT], [1]), probabilities=[NAN]), FromWorker),
    "a probability without end": (body(grow([ROOT], [1]), probabilities=[ENDLESS]), FromWorker),
    "a step that never ended": (body(grow([ROOT], [1]), seconds=ENDLESS), FromWorker),
    "a step that took no number": (body(grow([ROOT], [1]), seconds=NAN), FromWorker),
    "more nodes than a context has": (body(grow([ROOT], [1]), evaluated=MAX_CONTEXT + 1), FromWorker),
    "more tokens than a context has": (body(Prefilled(ONE, 0, 0, 0.0), tokens=MAX_CONTEXT + 1), FromWorker),
    "fewer tokens than none": (body(Prefilled(ONE, 0, 0, 0.0), tokens=-1), FromWorker),
    "forwards without end": (
        body(Verdict(ONE, 0, (), 1, 0.1), paced=msgspec.to_builtins(Paced()) | {"forwards": 1 << 32}),
        FromWorker,
    ),
    "a clock that is no number": (body(Pong(1.0), sent=NAN), FromWorker),
    "a clock without end": (body(Pong(1.0), sent=ENDLESS), FromWorker),
    "a clock beyond 63 bits": (body(Pong(1.0), clock=1 << 63), FromWorker),
    "an arena that is a path": (
        body(KvOffer(ONE, "lp-0123456789abcdef0123", 1, 1, 0.0), name="../../../etc/passwd"),
        FromWorker,
    ),
    "an arena of another program": (
        body(KvOffer(ONE, "lp-0123456789abcdef0123", 1, 1, 0.0), name="psm_0123456789abcdef012"),
        FromWorker,
    ),
    "an orchestrator's clock that is no number": (body(Ping(1.0), sent=NAN), ToWorker),
}


@pytest.mark.parametrize(("frame", "union"), REFUSED.values(), ids=[*REFUSED])
def test_a_claim_beyond_all_bounds_is_no_message(frame: bytes, union: Any):
    with pytest.raises(WireError):
        decode(frame, union)


def test_our_own_texts_are_made_fit_to_be_told():
    said = Fault("fatal", plain("\x1b[31mno\x1b[0m\n\tstill no\x9b " + "x" * 9000))

    assert said.text.startswith("?[31mno?[0m  still no? xxx")
    assert decode(encode(said, _STAMP), FromWorker) == (_STAMP, said)


def test_a_text_of_a_worker_has_exactly_the_characters_that_are_seen():
    unseen = [chr(code) for code in range(0x110000) if category(chr(code)) in ("Cc", "Cf", "Zl", "Zp")]
    text = "".join(map(plain, unseen))

    assert convert(text, PlainText) == text
    for character in unseen:
        with pytest.raises(msgspec.ValidationError):
            convert(f"a{character}b", PlainText)


def test_the_largest_growth_fits_the_cap_of_a_workers_frame():
    most = Distribution(NodeId((1 << 63) - 1), ((1 << 31) - 1,) * MAX_SUPPORT, (0.1,) * MAX_SUPPORT)
    growth = Grow(
        request=RequestId((1 << 53) - 1),
        round=(1 << 53) - 1,
        parents=(NodeId((1 << 63) - 1),) * MAX_NODES,
        tokens=((1 << 31) - 1,) * MAX_NODES,
        probabilities=(0.1,) * MAX_NODES,
        evaluated=MAX_CONTEXT,
        seconds=0.1,
        distributions=(most,) * MAX_NODES,
        paced=Paced(forwards=(1 << 32) - 1, overruns=(1 << 32) - 1, seconds=0.1, excess=0.1),
    )
    frame = encode(growth, _STAMP)

    assert 0.9 * MAX_WORKER_FRAME < len(frame) <= MAX_WORKER_FRAME
    assert decode(frame, FromWorker, MAX_WORKER_FRAME)[1] == growth


_DANGERS = re.compile(
    r"^\s*(import|from) (c?[Pp]ickle|dill|cloudpickle|marshal|shelve|jsonpickle|yaml|joblib)\b"
    r"|(?<![.\w])(eval|exec|compile|__import__)\(|\btorch\.load\(|_pyobj\(|recv_serialized"
    r"|\b(allow_pickle|trust_remote_code)=True",
    re.MULTILINE,
)


def test_nothing_that_arrives_is_ever_run():
    """No unpickling, no evaluation, no loader that does either, anywhere in the program."""
    files = [file for package in _PACKAGES for file in (PROJECT / package).rglob("*.py")]

    assert len(files) > 100
    assert [(str(file), found[0]) for file in files for found in _DANGERS.finditer(file.read_text())] == []
    for text in ("import pickle", "eval(x)", "torch.load(x)", "np.load(x, allow_pickle=True)", "socket.recv_pyobj()"):
        assert _DANGERS.search(text)
