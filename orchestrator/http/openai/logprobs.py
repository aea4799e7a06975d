"""Log-probabilities in OpenAI's format, sent together with the text that they belong to. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from orchestrator.api.result import Chosen
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.sampling import Likelihood


class LogprobTranscript:
    """The tokens of one choice. A token is sent when the first character of its text is sent, so neither tokens that a
    stop string cut off nor the end token are sent."""

    def __init__(self, kind: Literal["chat", "text"], codec: TextCodec) -> None:
        self._format = _chat if kind == "chat" else _text
        self._codec = codec
        self._stream = codec.stream()
        self._decoded = 0
        """Characters of the tokens so far."""
        self._sent = 0
        """Characters that were sent to the client."""
        self._waiting: deque[tuple[int, Chosen]] = deque()
        """Tokens that were not sent, with the offset at which the text of each begins."""

    def push(self, text: str, chosen: Iterable[Chosen]) -> dict[str, Any] | None:
        """The log-probabilities to send with `text`, or None; `chosen` are the tokens that came with it."""
        for one in chosen:
            self._waiting.append((self._decoded, one))
            self._decoded += len(self._stream.push([one.token]))
        self._sent += len(text)
        ready = []
        while self._waiting and self._waiting[0][0] < self._sent:
            ready.append(self._waiting.popleft())
        return self._format(ready, self._codec) if ready else None


def whole(kind: Literal["chat", "text"], codec: TextCodec, text: str, chosen: Iterable[Chosen]) -> dict[str, Any]:
    """The log-probabilities of a finished answer."""
    return LogprobTranscript(kind, codec).push(text, chosen) or (_chat if kind == "chat" else _text)([], codec)


def _chat(ready: Sequence[tuple[int, Chosen]], codec: TextCodec) -> dict[str, Any]:
    content = [
        {
            **_entry(codec, one.token, one.likelihood.chosen),
            "top_logprobs": [_entry(codec, token, value) for token, value in one.likelihood.best],
        }
        for _, one in ready
    ]
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token: int, value: float) -> dict[str, Any]:
    spelt = codec.spelt(token)
    return {"token": _readable(spelt), "logprob": value, "bytes": list(spelt)}


def _text(ready: Sequence[tuple[int, Chosen]], codec: TextCodec) -> dict[str, Any]:
    likelihoods = [(one.token, one.likelihood) for _, one in ready]
    best = [_best(token, likelihood, codec) for token, likelihood in likelihoods]
    return {
        "tokens": [_readable(codec.spelt(token)) for token, _ in likelihoods],
        "token_logprobs": [likelihood.chosen for _, likelihood in likelihoods],
        "top_logprobs": best if any(likelihood.best for _, likelihood in likelihoods) else None,
        "text_offset": [offset for offset, _ in ready],
    }


def _best(token: int, likelihood: Likelihood, codec: TextCodec) -> dict[str, float]:
    """The most probable tokens; the chosen token is always among them."""
    found = {_readable(codec.spelt(one)): value for one, value in likelihood.best}
    return found if token in dict(likelihood.best) else {**found, _readable(codec.spelt(token)): likelihood.chosen}


def _readable(spelt: bytes) -> str:
    """The token's text; bytes of an incomplete character are escaped."""
    return spelt.decode("utf-8", "backslashreplace")
