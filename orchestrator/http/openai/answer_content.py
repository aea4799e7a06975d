"""What the answers of all APIs have in common: the parts of a choice, log-probabilities, token counts. Pure."""

import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal

import msgspec

from orchestrator.api.result import Chosen, Result
from orchestrator.http.generation import ChoiceEnd, OutputEvent, TextPiece
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.http.openai.request import GenerationRequest
from orchestrator.text.answer.parts import Call, Part, Spoken, ThoughtSpan
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.sampling import TokenLogprob


class AnswerContent:
    """The content of an answer. White space between the text and a call is dropped."""

    def __init__(self, prompt: PreparedRequest, asked: GenerationRequest, codec: TextCodec) -> None:
        self.prompt = prompt
        self._parser = prompt.new_parser()
        self._calls = bool(asked.offered)
        self._called = False
        self._space = ""
        tells = asked.alternatives is not None
        self._transcript = LogprobTranscript("chat", codec, prompt.shown, prompt.marked) if tells else None

    @classmethod
    def events(cls, result: Result) -> tuple[OutputEvent, OutputEvent]:
        """Those of a whole answer."""
        chosen = tuple(map(Chosen, result.tokens, result.token_logprobs))
        return TextPiece(0, result.text, chosen), ChoiceEnd(0, result)

    def logprobs(self, event: OutputEvent) -> list[dict[str, Any]] | None:
        """The log-probabilities to send with an event that was parsed; None if the request asks for none."""
        if self._transcript is None:
            return None
        if not isinstance(event, TextPiece):
            return []
        ready = self._transcript.push(event.text, event.chosen, self._parser.thoughts)
        return [] if ready is None else ready["content"]

    def parse(self, event: OutputEvent) -> Sequence[Part]:
        """The new parts."""
        parts = self._parser.push(event.text) if isinstance(event, TextPiece) else self._parser.finish()
        if not self._calls:
            return parts
        kept = [kept for part in parts for kept in self._without_trailing_space(part)]
        if isinstance(event, TextPiece) or self._called or not self._space:
            return kept
        return [*kept, Spoken(self._space)]

    def _without_trailing_space(self, part: Part) -> list[Part]:
        """Holds white space back until text follows it."""
        if not isinstance(part, Spoken):
            self._called = self._called or isinstance(part, Call)
            self._space = ""
            return [part]
        text = self._space + part.text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return [Spoken(stripped)] if stripped else []


def call_id(call: Call) -> str:
    """A new one if the model gave it none. Mistral's templates read only ids of nine letters and digits."""
    return call.id or uuid.uuid4().hex[:9]


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call. Text that is no JSON, as of a call that was cut off, has a name that says so."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(text, type=dict[str, Any])
    return {"INVALID_JSON": text}


class LogprobTranscript:
    """The tokens of one choice. A token is sent when the first character of its text is sent, so neither tokens that a
    stop string cut off nor the end token are sent."""

    def __init__(
        self,
        kind: Literal["chat", "text"],
        codec: TextCodec,
        shown: frozenset[int] = frozenset(),
        marked: frozenset[int] = frozenset(),
    ) -> None:
        """`shown`, `marked`: as of the request."""
        self._format = _chat if kind == "chat" else _text
        self._codec = codec
        self._stream = codec.stream(shown, marked)
        self._decoded = 0
        """Characters of the tokens so far."""
        self._sent = 0
        """Characters that were sent to the client."""
        self._waiting: deque[tuple[int, Chosen]] = deque()
        """Tokens that were not sent, with the offset at which the text of each begins."""

    def push(self, text: str, chosen: Iterable[Chosen], thoughts: Sequence[ThoughtSpan] = ()) -> dict[str, Any] | None:
        """The log-probabilities to send with `text`, or None; `chosen` are the tokens that came with it.

        `thoughts`: of the output so far; their tokens are left out.
        """
        for one in chosen:
            self._waiting.append((self._decoded, one))
            self._decoded += len(self._stream.push([one.token]))
        self._sent += len(text)
        ready = []
        # Tokens of a thought that is open wait, since it may turn out to be text.
        known = min((span.begin for span in thoughts if span.end is None), default=self._sent)
        while self._waiting and self._waiting[0][0] < known:
            offset, one = self._waiting.popleft()
            if not any(span.begin <= offset < span.end for span in thoughts if span.end is not None):
                ready.append((offset, one))
        return self._format(ready, self._codec) if ready else None


def echoed_logprobs(
    codec: TextCodec,
    prompt: Sequence[int],
    token_logprobs: Sequence[TokenLogprob],
    text: str,
    chosen: Sequence[Chosen],
) -> dict[str, Any]:
    """Of a prompt and of the answer behind it, in the format of completions. Nothing precedes the first token, so it
    has no log-probability. All tokens of the answer are there, the end token too, so that clients can count them.

    `token_logprobs`: of `prompt` from the second token on; `text`: of the prompt.
    """
    first, *others = prompt
    told = list(map(Chosen, others, token_logprobs))
    offsets = _offsets(codec, prompt, 0)[1:] + _offsets(codec, [one.token for one in chosen], len(text))
    behind = _text(list(zip(offsets, [*told, *chosen], strict=True)), codec)
    best = behind["top_logprobs"]
    return {
        "tokens": [_readable(codec.spelt(first)), *behind["tokens"]],
        "token_logprobs": [None, *behind["token_logprobs"]],
        "top_logprobs": None if best is None else [None, *best],
        "text_offset": [0, *behind["text_offset"]],
    }


def _offsets(codec: TextCodec, tokens: Sequence[int], begin: int) -> list[int]:
    """Where the text of each token begins, if that of the first one begins at `begin`."""
    return list(accumulate(codec.lengths(tokens), initial=begin))[:-1]


def no_logprobs(kind: Literal["chat", "text"], codec: TextCodec) -> dict[str, Any]:
    """The log-probabilities of an answer without tokens."""
    return (_chat if kind == "chat" else _text)([], codec)


def _chat(ready: Sequence[tuple[int, Chosen]], codec: TextCodec) -> dict[str, Any]:
    content = [
        {
            **_entry(codec, one.token, one.token_logprob.chosen),
            "top_logprobs": [_entry(codec, token, value) for token, value in one.token_logprob.best],
        }
        for _, one in ready
    ]
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token: int, value: float) -> dict[str, Any]:
    spelt = codec.spelt(token)
    return {"token": _readable(spelt), "logprob": value, "bytes": list(spelt)}


def _text(ready: Sequence[tuple[int, Chosen]], codec: TextCodec) -> dict[str, Any]:
    token_logprobs = [(one.token, one.token_logprob) for _, one in ready]
    best = [_best(token, token_logprob, codec) for token, token_logprob in token_logprobs]
    return {
        "tokens": [_readable(codec.spelt(token)) for token, _ in token_logprobs],
        "token_logprobs": [token_logprob.chosen for _, token_logprob in token_logprobs],
        "top_logprobs": best if any(token_logprob.best for _, token_logprob in token_logprobs) else None,
        "text_offset": [offset for offset, _ in ready],
    }


def _best(token: int, token_logprob: TokenLogprob, codec: TextCodec) -> dict[str, float]:
    """The most probable tokens; the chosen token is always among them."""
    found = {_readable(codec.spelt(one)): value for one, value in token_logprob.best}
    return (
        found if token in dict(token_logprob.best) else {**found, _readable(codec.spelt(token)): token_logprob.chosen}
    )


def _readable(spelt: bytes) -> str:
    """The token's text; bytes of an incomplete character are escaped."""
    return spelt.decode("utf-8", "backslashreplace")


def usage(results: Sequence[Result], prompts: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """`results` are in the order of prompts; a prompt counts once for all its choices."""
    each = len(results) // prompts
    prompt = sum(result.statistics.prompt_tokens for result in results[::each])
    completion = sum(result.statistics.generated_tokens for result in results)
    cached = sum(min(result.statistics.adopted_tokens, result.statistics.prompt_tokens) for result in results[::each])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": min(reasoning_tokens, completion)},
    }
