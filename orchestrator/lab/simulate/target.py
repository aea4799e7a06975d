"""A target worker without a model: the protocol's rules, a language, times from a device's pace. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.lab.simulate.language import Language
from orchestrator.lab.simulate.modelled_worker import CHUNK, CONTEXT, Work, modelled_hello
from protocol.messages.base import Level, NodeId, SequenceId
from protocol.messages.sampling import Likelihood
from protocol.messages.worker import (
    Fault,
    Forest,
    FromWorker,
    Hello,
    Ping,
    Pong,
    Prefilled,
    Prefilling,
    PromptLikelihoods,
    Start,
    Stop,
    ToWorker,
    Verdict,
    Verify,
)
from protocol.speculation.token_tree import fits, node_id
from protocol.worker.pacing import DevicePace, ForwardPart


@dataclass(slots=True)
class _ServedSequence:
    start: Start
    round: int
    root: NodeId
    position: int
    """Position of the root."""
    adopted: int
    """Tokens whose KV came from an arena."""
    evaluated: int
    """Tokens to prefill for this start."""
    unread: int
    """Tokens of them that are not prefilled yet."""
    verdict: Verdict | None = None
    prefill_seconds: float = 0.0

    def tell(self, tokens: int) -> tuple[PromptLikelihoods, ...]:
        """What the next `tokens` to be prefilled tell of the prompt, if it was asked for."""
        first = self.position - self.unread
        count = min(tokens, self.start.prompt_tokens - 1 - first)
        if not self.start.sampling.prompt_logprobs or count <= 0:
            return ()
        told = tuple(prompt_likelihood(first + place) for place in range(count))
        return (PromptLikelihoods(self.start.sequence, self.round, first, told),)


def prompt_likelihood(place: int) -> Likelihood:
    """Of the prompt's token behind `place` others and the first one."""
    return Likelihood(-float(place))


class ModelledTarget:
    """Verifies at once; between verifications it prefills prompts chunk by chunk, in turns."""

    def __init__(self, language: Language, pace: DevicePace, context: int = CONTEXT, level: Level = "tree") -> None:
        self.hello: Hello = modelled_hello("target", context, pace, level)
        self._language = language
        self._pace = pace
        self._sequences: dict[SequenceId, _ServedSequence] = {}

    def handle(self, message: ToWorker) -> Work:
        match message:
            case Start():
                return self._start(message)
            case Verify():
                return self._verify((message,))
            case Forest(trees):
                return self._verify(trees)
            case Stop(sequence):
                self._sequences.pop(sequence, None)
            case Ping(sent):
                return Work((Pong(sent),))
        return Work()

    def work(self) -> Work | None:
        id = next((id for id, served in self._sequences.items() if served.unread), None)
        if id is None:
            return None
        served = self._sequences.pop(id)
        self._sequences[id] = served
        tokens = min(CHUNK, served.unread)
        seconds = self._pace.prefill(tokens, served.position - served.unread)
        told = served.tell(tokens)
        served.unread -= tokens
        served.prefill_seconds += seconds
        reached = served.position - served.unread
        last = Prefilling(id, served.round, reached) if served.unread else _prefilled(served)
        return Work((*told, last), seconds)

    def _start(self, start: Start) -> Work:
        held = self._sequences.get(start.sequence)
        telling = start.sampling.prompt_logprobs
        if held is not None and held.start == start and held.round == start.round and (held.unread or not telling):
            return Work() if held.unread else Work((_prefilled(held),))
        if telling:
            held, start = None, replace(start, adopt=None)
        position = len(start.tokens) - 1
        known = 0 if held is None else min(held.position - held.unread, position)
        offered = 0 if start.adopt is None else start.adopt.tokens
        assert offered <= position, "an arena is adopted only up to the root"
        adopted = max(0, offered - known)
        missing = position - known - adopted
        served = _ServedSequence(start, start.round, start.root, position, adopted, missing, missing)
        self._sequences[start.sequence] = served
        return Work() if served.unread else Work((_prefilled(served),))

    def _verify(self, trees: Sequence[Verify]) -> Work:
        """One forward over all trees; faults and repeated verdicts need none."""
        settled = {verify.sequence: self._without_forward(verify) for verify in trees}
        pending = [verify for verify in trees if settled[verify.sequence] is None]
        parts = [ForwardPart(len(verify.tokens), verify.position) for verify in pending]
        seconds = self._pace.joint(parts) if parts else 0.0
        known = [reply for replies in settled.values() if replies is not None for reply in replies]
        verdicts = [self._verdict(self._sequences[verify.sequence], verify, seconds) for verify in pending]
        return Work((*known, *verdicts), seconds)

    def _without_forward(self, verify: Verify) -> tuple[FromWorker, ...] | None:
        served = self._sequences.get(verify.sequence)
        if served is None:
            return (Fault("lost", "This sequence is unknown here.", verify.sequence),)
        if verify.round < served.round:
            repeated = served.verdict is not None and served.verdict.round == verify.round
            return (served.verdict,) if repeated and served.verdict is not None else ()
        if served.unread or (verify.round, verify.position, verify.root) != (
            served.round,
            served.position,
            served.root,
        ):
            return (Fault("lost", "The target is out of step.", verify.sequence),)
        assert fits(verify.parents, self.hello.level), "a tree that the target can't verify"
        return None

    def _verdict(self, served: _ServedSequence, verify: Verify, seconds: float) -> Verdict:
        """Walk down from the root while the language's token is a node of the tree."""
        children = {
            (parent, token): i for i, (parent, token) in enumerate(zip(verify.parents, verify.tokens, strict=True))
        }
        at, path = 0, []
        while True:
            served.position += 1
            token = self._language.token(served.start.sampling.seed, served.position)
            served.root = node_id(served.root, token)
            below = children.get((at, token))
            if below is None:
                break
            at = below
            path.append(served.root)
        served.round += 1
        served.verdict = Verdict(verify.sequence, verify.round, tuple(path), token, seconds)
        return served.verdict


def _prefilled(served: _ServedSequence) -> Prefilled:
    return Prefilled(served.start.sequence, served.round, served.evaluated, served.prefill_seconds, served.adopted)
