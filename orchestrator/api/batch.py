"""Several prompts in one call: which requests to send now, and which answer belongs to which prompt. Pure."""

from collections.abc import Sequence

from orchestrator.api.result import OutputCollector, Result
from protocol.errors import PipelineError
from protocol.messages.client import Cancel, Done, Output, Refused, Submit, ToClient

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
