"""Log-probabilities as OpenAI's clients read them, in step with the text that they belong to. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from orchestrator.api.result import Chosen
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.sampling import Likelihood


class LogprobTranscript:
    """One choice's tokens. Each is told when its text has begun to be: what a stop string cut off never is, nor the
    end token behind the text."""

    def __init__(self, kind: Literal["chat", "text"], codec: TextCodec) -> None:
        self._form = _chat if kind == "chat" else _text
        self._codec = codec
        self._stream = codec.stream()
        self._begun = 0
        """Characters that the tokens so far make."""
        self._said = 0
        """Characters that the client was told."""
        self._waiting: deque[tuple[int, Chosen]] = deque()
        """Each with the offset at which its text begins."""

    def push(self, text: str, chosen: Iterable[Chosen]) -> dict[str, Any] | None:
        """What goes out beside `text`, perhaps nothing; `chosen` are the tokens that came with it."""
        for one in chosen:
            self._waiting.append((self._begun, one))
            self._begun += len(self._stream.push([one.token]))
        self._said += len(text)
        told = []
        while self._waiting and self._waiting[0][0] < self._said:
            told.append(self._waiting.popleft())
        return self._form(told, self._codec) if told else None


def whole(kind: Literal["chat", "text"], codec: TextCodec, text: str, chosen: Iterable[Chosen]) -> dict[str, Any]:
    """Of a finished answer."""
    return LogprobTranscript(kind, codec).push(text, chosen) or (_chat if kind == "chat" else _text)([], codec)


def _chat(told: Sequence[tuple[int, Chosen]], codec: TextCodec) -> dict[str, Any]:
    content = [
        {
            **_entry(codec, one.token, one.likelihood.chosen),
            "top_logprobs": [_entry(codec, token, value) for token, value in one.likelihood.best],
        }
        for _, one in told
    ]
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token: int, value: float) -> dict[str, Any]:
    spelt = codec.spelt(token)
    return {"token": _readable(spelt), "logprob": value, "bytes": list(spelt)}


def _text(told: Sequence[tuple[int, Chosen]], codec: TextCodec) -> dict[str, Any]:
    likelihoods = [(one.token, one.likelihood) for _, one in told]
    best = [_best(token, likelihood, codec) for token, likelihood in likelihoods]
    return {
        "tokens": [_readable(codec.spelt(token)) for token, _ in likelihoods],
        "token_logprobs": [likelihood.chosen for _, likelihood in likelihoods],
        "top_logprobs": best if any(likelihood.best for _, likelihood in likelihoods) else None,
        "text_offset": [offset for offset, _ in told],
    }


def _best(token: int, likelihood: Likelihood, codec: TextCodec) -> dict[str, float]:
    """The chosen token is always among them."""
    found = {_readable(codec.spelt(one)): value for one, value in likelihood.best}
    return found if token in dict(likelihood.best) else {**found, _readable(codec.spelt(token)): likelihood.chosen}


def _readable(spelt: bytes) -> str:
    """A token may be part of a character."""
    return spelt.decode("utf-8", "backslashreplace")
