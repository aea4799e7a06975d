"""The file of recorded texts: what a target generated after given prompts. Knows no model, process or clock.

A generated token is a function of the target, the prompt, the sampling parameters and the seed. So a text is recorded
once, and a replaying target generates it again without the model.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from protocol.errors import InputError
from protocol.messages.base import MAX_CONTEXT, Token, Vocabulary
from protocol.messages.sampling import Sampling
from protocol.security.private_files import open_private

_VERSION = 1

Tokens: TypeAlias = Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_CONTEXT)]


class RecordedText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt and the tokens that the target generated after it, with no filter and no penalty."""

    prompt: Tokens
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]
    tokens: Tokens

    @property
    def whole(self) -> tuple[int, ...]:
        """The prompt and the generated tokens."""
        return self.prompt + self.tokens

    @property
    def sampling(self) -> Sampling:
        return request_sampling(self.temperature, self.seed)


class RecordedTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of the file: the target that generated the texts, and the number of texts."""

    version: int = _VERSION
    model_fingerprint: str
    vocabulary: Vocabulary
    """Width of its logits."""
    context: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    texts: Annotated[int, Meta(ge=1)]


class RecordedTexts:
    """The texts of one target."""

    def __init__(self, target: RecordedTarget, texts: Sequence[RecordedText]) -> None:
        self.target = target
        self.texts = tuple(texts)

    @classmethod
    def read(cls, path: Path, model_fingerprint: str) -> "RecordedTexts":
        """Raises InputError for a file that is absent, cut off, of another version or of another target."""
        try:
            first, *lines = path.read_bytes().splitlines() or [b""]
            target = msgspec.json.decode(first, type=RecordedTarget)
            texts = [msgspec.json.decode(line, type=RecordedText) for line in lines]
        except OSError as error:
            raise _refusal(path, error.strerror or "it can't be read") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _refusal(path, str(error)) from error
        if target.version != _VERSION:
            raise _refusal(path, f"it has version {target.version}, and this program reads version {_VERSION}")
        if target.model_fingerprint != model_fingerprint:
            raise _refusal(path, "another target generated its texts")
        if len(texts) != target.texts:
            raise _refusal(path, f"it holds {len(texts)} of {target.texts} texts")
        if any(max(text.whole) >= target.vocabulary for text in texts):
            raise _refusal(path, "a token is beyond the target's vocabulary")
        return cls(target, texts)

    def write(self, path: Path) -> None:
        lines = [msgspec.json.encode(each) for each in (self.target, *self.texts)]
        with open_private(path) as file:
            file.write(b"\n".join(lines) + b"\n")

    def of_prompt(self, prompt: Sequence[int], sampling: Sampling) -> RecordedText | None:
        """The text of this prompt and these parameters. The seed has no effect at temperature 0."""
        return self._by_request.get((tuple(prompt), _seedless(sampling)))

    def beginning_with(self, tokens: Sequence[int], sampling: Sampling) -> RecordedText | None:
        """A text that begins with `tokens`: a prompt, and tokens that were generated after it."""
        found = self.of_prompt(tokens, sampling)
        if found is not None:
            return found
        wanted, length = _seedless(sampling), len(tokens)
        fitting = (text for text in self.texts if _seedless(text.sampling) == wanted)
        return next((text for text in fitting if text.whole[:length] == tuple(tokens)), None)

    @cached_property
    def _by_request(self) -> dict[tuple[tuple[int, ...], Sampling], RecordedText]:
        return {(text.prompt, _seedless(text.sampling)): text for text in self.texts}


def request_sampling(temperature: float, seed: int) -> Sampling:
    """The parameters of a request whose text can be recorded."""
    return Sampling(temperature=temperature, seed=seed)


def _seedless(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, seed=0) if sampling.greedy else sampling


def _refusal(path: Path, reason: str) -> InputError:
    return InputError(f"The recorded texts in {path} can't be replayed ({reason}): delete the file and record again.")
