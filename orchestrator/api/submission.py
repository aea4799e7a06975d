"""From prompts and parameters to the requests of one call, checked before the first is sent. Knows no socket."""

import uuid
from collections.abc import Mapping, Sequence, Sized
from typing import Any, TypeAlias, cast

import msgspec

from orchestrator.api.result import OutputCollector, Result
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.validation import warn_ineffective
from protocol.errors import InputError, PipelineError
from protocol.messages.client import Cancel, Done, Output, Refused, Submit, ToClient
from protocol.messages.sampling import ModelSampling

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
Prompts: TypeAlias = list[str] | Sequence[Sequence[int]]
"""Texts, or lists of token ids; not both."""
_PLAIN = msgspec.structs.asdict(ModelSampling())
"""A filter that keeps all tokens is meant to change nothing."""


def is_batch(prompt: Prompt | Prompts) -> bool:
    """Whether it is a list of prompts: an empty list, or one that holds a text or a list.

    Raises InputError for what is neither text nor a list.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InputError(f"A prompt is text or a list of token ids, and not of type {type(prompt).__name__}.")
    if isinstance(prompt, str):
        return False
    return len(prompt) == 0 or any(isinstance(each, Sized) for each in prompt)


def one_submit(prompt: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None) -> Submit:
    """The request for one prompt. Warns the caller of the client's method about parameters without effect.

    Raises InputError for a list of prompts or of parameters, and for a value out of range.
    """
    if is_batch(prompt) and len(prompt):
        raise InputError("A stream continues one prompt: give one, or a list of prompts to `generate`.")
    if isinstance(params, Sequence):
        raise InputError("There is one prompt and a list of SamplingParams: give one, or a list of prompts.")
    chosen = _params(params)
    submit = chosen.submit(_name(), cast("Prompt", prompt))
    warn_ineffective(chosen, _PLAIN)
    return submit


def submits(prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Submit]:
    """A request for each prompt of a batch. Warns of parameters without effect.

    Raises InputError for prompts of different kinds, for another number of parameters than of prompts, and for a value
    out of range.
    """
    kinds = {_kind(prompt) for prompt in prompts}
    if len(kinds) > 1 or "else" in kinds:
        raise InputError("A batch is a list of texts or a list of lists of token ids: give prompts of one kind.")
    several = isinstance(params, Sequence)
    each = list(map(_params, params)) if several else [_params(params)] * len(prompts)
    if len(each) != len(prompts):
        raise InputError(
            f"There are {len(prompts)} prompts and {len(each)} SamplingParams: give one for all, or one for each."
        )
    found = [one.submit(_name(), prompt) for one, prompt in zip(each, prompts, strict=True)]
    for one in each if several else each[:1]:
        warn_ineffective(one, _PLAIN)
    return found


def _params(given: object) -> SamplingParams:
    """Raises InputError for another type."""
    if given is not None and not isinstance(given, SamplingParams):
        raise InputError(f"Parameters are SamplingParams(...), and not of type {type(given).__name__}.")
    return given or SamplingParams()


def _name() -> str:
    """A request's name, which no other client uses."""
    return uuid.uuid4().hex


def _kind(prompt: object) -> str:
    if isinstance(prompt, str):
        return "text"
    return "tokens" if isinstance(prompt, Sized) and not isinstance(prompt, bytes | Mapping) else "else"


# Several requests at a time -----------------------------------------------------------------------

MOST_AT_ONCE = 128
"""Requests of one batch that are open together: half of what a pipeline takes, so that other clients are served."""


class RequestBatch:
    """The requests of one call, in the order of their prompts, and what has come of them."""

    def __init__(self, submits: Sequence[Submit]) -> None:
        self._waiting = list(reversed(submits))
        self._open: dict[str, OutputCollector] = {}
        self._results: dict[str, Result] = {}
        self._order = [submit.request for submit in submits]

    @property
    def results(self) -> list[Result] | None:
        """One result a prompt, in the order of the prompts; None until all have come."""
        if len(self._results) < len(self._order):
            return None
        return [self._results[request] for request in self._order]

    def due(self) -> list[Submit]:
        """Requests to send now; each is open from then on."""
        due: list[Submit] = []
        while self._waiting and len(self._open) < MOST_AT_ONCE:
            submit = self._waiting.pop()
            self._open[submit.request] = OutputCollector(submit.request, submit.sampling.seed)
            due.append(submit)
        return due

    def feed(self, message: ToClient) -> None:
        """Take an answer in. Raises PipelineError, which names the prompt, if a request was refused."""
        match message:
            case Output(request) | Done(request) if request in self._open:
                collector = self._open[request]
                collector.feed(message)
                if collector.result is not None:
                    self._results[request] = collector.result
                    del self._open[request]
            case Refused(request) if request in self._open:
                collector = self._open.pop(request)
                try:
                    collector.feed(message)
                except PipelineError as error:
                    raise type(error)(f"Prompt {self._order.index(request)}: {error}") from None
            case Refused(""):
                OutputCollector("", 0).feed(message)
            case _:
                pass

    def cancellations(self) -> list[Cancel]:
        """What ends every request that is still open."""
        return [Cancel(request) for request in self._open]
