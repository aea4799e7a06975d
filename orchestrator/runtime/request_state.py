"""One client request: converts between the client's text and the state machine's tokens."""

from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.core.events import Task
from orchestrator.core.request_stats import without_surplus
from orchestrator.text.stop_scanner import AnswerStops
from orchestrator.text.tokenizer import TextCodec, TextStream
from protocol.errors import InputError
from protocol.messages.base import RequestId
from protocol.messages.client import Done, Output, Statistics, Submit
from protocol.messages.sampling import ModelSampling, TokenLogprob
from protocol.transport import Stamp


@dataclass(slots=True)
class RequestState:
    """A request, its client, and the text that was sent so far."""

    id: RequestId
    peer: bytes
    stamp: Stamp
    request: str
    """The client's own id."""
    text: TextStream
    stops: AnswerStops
    stopped: bool = False
    """A stop string was found: no further text is sent."""
    sent_tokens: int = 0

    @classmethod
    def open(cls, sequence: RequestId, peer: bytes, stamp: Stamp, submit: Submit, codec: TextCodec) -> "RequestState":
        return cls(
            sequence,
            peer,
            stamp,
            submit.request,
            codec.stream(frozenset(submit.shown), frozenset(submit.marked)),
            AnswerStops(submit.stop, submit.thought),
        )

    def output(self, tokens: tuple[int, ...], token_logprobs: tuple[TokenLogprob, ...] = ()) -> Output:
        """The text that `tokens` complete, up to a stop string if there is one."""
        texts: list[str] = []
        used = 0
        for token in tokens:
            text, self.stopped = self.stops.push(self.text.push([token]))
            texts.append(text)
            used += 1
            if self.stopped:
                break
        self.sent_tokens += used
        return Output(self.request, "".join(texts), tokens[:used], token_logprobs[:used])

    def rest(self) -> Output | None:
        """The text that was held back as a possible part of a stop string or character, if any."""
        if self.stopped:
            return None
        text, self.stopped = self.stops.push(self.text.finish())
        text += self.stops.flush()
        return Output(self.request, text, ()) if text else None

    def done(self, reason: Literal["stop", "length", "cancelled"], statistics: Statistics) -> Done:
        """The last message. Tokens that a stop string cut off in the last commit are not counted."""
        sent = without_surplus(statistics, statistics.generated_tokens - self.sent_tokens)
        return Done(self.request, "stop" if self.stopped else reason, sent, self.stops.found)


def to_request(submit: Submit, codec: TextCodec, own: ModelSampling) -> Task:
    """The request in tokens, with the target's `own` sampling values for those that it leaves open. Raises InputError
    if it has no tokens."""
    if (submit.prompt is None) == (submit.tokens is None):
        raise InputError("A request needs either a prompt or tokens, not both.")
    tokens = tuple(codec.encode(submit.prompt)) if submit.prompt is not None else submit.tokens
    if not tokens:
        raise InputError("The prompt is empty: give at least one token to continue.")
    sampling = submit.sampling.resolved(own)
    task = Task(tokens, sampling, submit.max_tokens, codec.eos, submit.draft_tokens, submit.shared_prefix)
    return replace(task, background=submit.background, seeded=submit.seeded, name=submit.request)
