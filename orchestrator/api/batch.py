"""Several prompts in one call: which lists are batches, and which answer belongs to which prompt. Pure."""

from collections.abc import Sequence, Sized
from typing import Any, TypeAlias

from orchestrator.api.result import OutputCollector, Result
from orchestrator.api.sampling_params import SamplingParams
from protocol.errors import InputError, PipelineError
from protocol.messages.client import Cancel, Done, Output, Refused, Submit, ToClient

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
Prompts: TypeAlias = list[str] | Sequence[Sequence[int]]
"""Texts, or lists of token ids; not both."""

MOST_AT_ONCE = 128
"""Requests of one batch that are open together: half of what a pipeline takes, so that other clients are served."""


class Batch:
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


def is_batch(prompt: Prompt | Prompts) -> bool:
    """Whether it is a list of prompts: an empty list, or one that holds a text or a list."""
    if isinstance(prompt, str):
        return False
    return len(prompt) == 0 or any(isinstance(each, Sized) for each in prompt)


def submits(
    prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None, names: Sequence[str]
) -> list[Submit]:
    """A request with each of these names, all checked before the first is sent.

    Raises InputError for prompts of different kinds, for another number of parameters than of prompts, and for a value
    out of range.
    """
    kinds = {_kind(prompt) for prompt in prompts}
    if len(kinds) > 1 or "else" in kinds:
        raise InputError("A batch is a list of texts or a list of lists of token ids: give prompts of one kind.")
    each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
    if len(each) != len(prompts):
        raise InputError(
            f"There are {len(prompts)} prompts and {len(each)} SamplingParams: give one for all, or one for each."
        )
    return [one.submit(name, prompt) for one, name, prompt in zip(each, names, prompts, strict=True)]


def _kind(prompt: object) -> str:
    return "text" if isinstance(prompt, str) else "tokens" if isinstance(prompt, Sized) else "else"
