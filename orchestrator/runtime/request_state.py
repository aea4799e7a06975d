"""Clients' requests: text in, text out, around the token ids that the state machine deals in."""

from dataclasses import dataclass
from typing import Literal

from orchestrator.core.events import Request
from orchestrator.core.options import Options, StrategyName
from orchestrator.text.stop_scanner import StopScanner
from orchestrator.text.tokenizer import TextCodec, TextStream
from protocol.errors import InputError
from protocol.messages.base import SequenceId, Verification
from protocol.messages.client import Done, Output, Statistics, Submit
from protocol.messages.sampling import Likelihood
from protocol.transport.codec import Stamp


@dataclass(slots=True)
class RequestState:
    """One request and the client that waits for it."""

    sequence: SequenceId
    peer: bytes
    stamp: Stamp
    request: str
    text: TextStream
    stops: StopScanner
    stopped: bool = False
    """A stop string was found: whatever follows is not for the client."""
    told: int = 0
    """Tokens that the client has been told."""

    @classmethod
    def open(cls, sequence: SequenceId, peer: bytes, stamp: Stamp, submit: Submit, codec: TextCodec) -> "RequestState":
        return cls(sequence, peer, stamp, submit.request, codec.stream(), StopScanner(submit.stop))

    def piece(
        self, tokens: tuple[int, ...], hit: bool | None = None, likelihoods: tuple[Likelihood, ...] = ()
    ) -> Output:
        """The text that `tokens` complete, up to a stop string if there is one."""
        texts: list[str] = []
        taken = 0
        for token in tokens:
            text, self.stopped = self.stops.push(self.text.push([token]))
            texts.append(text)
            taken += 1
            if self.stopped:
                break
        self.told += taken
        return Output(self.request, "".join(texts), tokens[:taken], hit, likelihoods[:taken])

    def rest(self) -> Output | None:
        """Text that was held back in case more came, if any."""
        if self.stopped:
            return None
        text, self.stopped = self.stops.push(self.text.finish())
        text += self.stops.flush()
        return Output(self.request, text, ()) if text else None

    def done(self, reason: Literal["stop", "length", "cancelled"], statistics: Statistics) -> Done:
        return Done(self.request, "stop" if self.stopped else reason, statistics, self.stops.found)


def to_request(submit: Submit, codec: TextCodec, options: Options) -> Request:
    """The request in tokens. Raises InputError for one without any, or one that the options rule out."""
    require_compatible(submit.sampling.verification, options.strategy)
    if (submit.prompt is None) == (submit.tokens is None):
        raise InputError("A request needs either a prompt or tokens, and not both.")
    tokens = tuple(codec.encode(submit.prompt)) if submit.prompt is not None else submit.tokens
    if not tokens:
        raise InputError("The prompt is empty: give at least one token to continue.")
    return Request(tokens, submit.sampling, submit.max_tokens, codec.eos)


def require_compatible(verification: Verification, strategy: StrategyName) -> None:
    """Raise InputError for rejection verification of trees, for which no exact rule is built in."""
    if verification == "rejection" and strategy == "adaptive":
        raise InputError("Rejection verification drafts chains of a fixed length: add --strategy sd or --strategy ssd.")
