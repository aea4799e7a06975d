"""What a client makes of the orchestrator's answers to one request. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from protocol.errors import blaming
from protocol.messages.client import Done, Output, Pace, Reading, Refused, Statistics, ToClient
from protocol.messages.sampling import TokenLogprob

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Result:
    """A finished generation. `result["text"]` is `result.text`; so are the other fields."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    statistics: Statistics
    seed: int
    stop: str | None = None
    """The stop string that ended it; None for the model's own end."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """One a token, if they were requested."""
    prompt_token_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens from the second one on, if they were requested."""

    def __getitem__(self, field: str | int) -> Any:
        """A field by its name. Raises KeyError, which lists the fields, for any other name, and TypeError for a number:
        the caller takes the result for a list."""
        if isinstance(field, int):
            raise TypeError(
                "One prompt gives one result, which is no list: give a list of prompts for a list of results."
            )
        if field not in self.__dataclass_fields__:
            raise KeyError(f"A result has no {field!r}, but {', '.join(self.__dataclass_fields__)}.")
        return getattr(self, field)

    def __contains__(self, field: object) -> bool:
        return field in self.__dataclass_fields__

    def summary(self) -> str:
        """Speed and acceptance as text, a line a figure."""
        lines = list(figures(self.statistics))
        width = max(len(name) for name, _ in lines)
        return "\n".join([speed(self.statistics), *(f"{name:{width}}  {value}" for name, value in lines)])

    def to_json(self) -> dict[str, Any]:
        """The object that `generate --json` prints."""
        token_logprobs = {"logprobs": self.token_logprobs, "prompt_logprobs": self.prompt_token_logprobs}
        asked = {name: msgspec.to_builtins(told) for name, told in token_logprobs.items() if told}
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            **asked,
            "stats": msgspec.to_builtins(self.statistics),
        }


class Chosen(NamedTuple):
    """A token, and how probable the target found it and others."""

    token: int
    token_logprob: TokenLogprob


OnReading: TypeAlias = Callable[[int, int, int], None]
"""Is called while the target reads a prompt: tokens that it has read, tokens of the prompt, and 0; or with the place in
the queue, of a request that waits for its turn."""


class OutputCollector:
    """Collects one request's pieces."""

    def __init__(self, request: str, seed: int) -> None:
        self.result: Result | None = None
        """The whole generation with its figures, once the last piece was fed."""
        self.request = request
        """The request's name, which is also in telemetry."""
        self._seed = seed
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self.chosen: list[Chosen] = []
        """Tokens so far with their token_logprobs, if they were asked for."""
        self._prompt: list[TokenLogprob] = []
        self._on_reading: OnReading = lambda *_: None

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._tokens)

    def watch_reading(self, on_reading: OnReading) -> None:
        """Call `on_reading` while the prompt is read: not for short prompts, and at most four times a second."""
        self._on_reading = on_reading

    def feed(self, message: ToClient) -> str:
        """The text that `message` adds, perhaps none. Raises PipelineError if the request was refused."""
        match message:
            case Output() if message.request == self.request:
                self._texts.append(message.text)
                self._tokens.extend(message.tokens)
                self.chosen.extend(map(Chosen, message.tokens, message.token_logprobs))
                self._prompt.extend(message.prompt_token_logprobs)
                return message.text
            case Reading() if message.request == self.request:
                self._on_reading(message.tokens, message.total, message.queued)
            case Done() if message.request == self.request:
                self.result = Result(
                    "".join(self._texts),
                    tuple(self._tokens),
                    message.finish_reason,
                    message.statistics,
                    self._seed,
                    message.stop,
                    tuple(one.token_logprob for one in self.chosen),
                    tuple(self._prompt),
                )
            case Refused() if message.request in (self.request, ""):
                raise blaming(message.blame, message.text)
            case _:
                pass
        return ""


# Its figures in words -----------------------------------------------------------------------------


BRIEF = ("tokens", "rounds", "pace", "speed-up")
"""The figures that are told unless all are asked for."""


def figures(statistics: Statistics) -> Iterator[tuple[str, str]]:
    """Name and value of each figure that exists, beside the tokens a second."""
    yield "tokens", f"{statistics.generated_tokens} after a prompt of {statistics.prompt_tokens}"
    if statistics.adopted_tokens:
        yield "adopted", f"{statistics.adopted_tokens} tokens whose KV was there already"
    yield "time to first token", f"{statistics.time_to_first_token * 1000:.0f} ms"
    yield "rounds", f"{statistics.rounds}, {statistics.tokens_per_round:.2f} tokens a round"
    if (hits := statistics.overlapped_hit_rate) is not None:
        yield "hit rate", f"{hits:.0%}"
    if statistics.acceptance_rate is not None:
        yield "acceptance", f"{statistics.acceptance_rate:.0%}"
    if statistics.acceptance_by_depth:
        yield "  by depth", " ".join(f"{share:.0%}" for share in statistics.acceptance_by_depth[:12])
    yield "target busy", f"{statistics.target_busy:.0%}"
    if statistics.wasted_draft_share is not None:
        yield "draft busy", f"{statistics.draft_busy:.0%}, {statistics.wasted_draft_share:.0%} of its nodes unused"
    yield "overhead a round", f"{statistics.overhead_per_round * 1e6:.0f} µs (median)"
    if statistics.pace is not None:
        yield "pace", _pace(statistics.pace)
    speedup, plain = statistics.speedup, statistics.plain_tokens_per_second
    if speedup is not None:
        yield "speed-up", f"about {speedup:.1f} times plain decoding (about {plain:.1f} tokens/s, estimated)"


def speed(statistics: Statistics) -> str:
    return f"{statistics.tokens_per_second:.1f} tokens/s"


def _pace(pace: Pace) -> str:
    """Whether the figures of a run can stand for its profile's device."""
    kept = f"{pace.profile}: {pace.overruns} of {pace.forwards} forwards overran, {pace.stretch:.1%} longer in all"
    return kept if pace.valid else f"{kept}. Invalid: this machine is too slow for the profile, or too busy."
