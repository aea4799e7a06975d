"""The interface that vLLM made customary, over a pipeline of this program. Both models stay loaded until `close`."""

import os
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, overload

from orchestrator.api.client import Stream
from orchestrator.api.pipeline import Pipeline
from orchestrator.api.result import Result
from orchestrator.api.sampling import SamplingParams
from orchestrator.api.submission import Prompt, Prompts
from orchestrator.api.validation import warn
from orchestrator.core.options import Options
from orchestrator.text.chat_template import ChatMessage
from protocol.errors import InputError
from protocol.ineffective import declared, without_effect


@dataclass(frozen=True)
class TextEvent:
    """More of the text."""

    text: str


@dataclass(frozen=True)
class ResultEvent:
    """The last event of a stream: the whole generation with its figures."""

    result: Result


StreamEvent: TypeAlias = TextEvent | ResultEvent


class LLM:
    """`LLM(model, draft).generate(["def f("], SamplingParams(max_tokens=64))[0]["text"]`.

    The constructor starts `pipeline` and returns when both models are loaded. The pipeline ends with the `with` block,
    by `close`, with the last reference to the LLM, or with the program. Any number of threads may use it at once; their
    requests are decoded together.
    """

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = None,
        *,
        speculate: bool | None = None,
        speculate_k: int | None = None,
        **options: Any,
    ) -> None:
        """`model` and `draft`: as `target` and `draft` of `Pipeline`, whose other keywords are `options`.

        `speculate`: False decodes with the target alone; None speculates if a draft fits; True also warns if none does.
        `speculate_k`: the strategy ssd with chains of K tokens; without it, adaptive chooses what to verify.
        Raises InputError for what can't work, PipelineError if starting fails.
        """
        strategy = _strategy(speculate, speculate_k, options.pop("strategy", None))
        length: dict[str, Any] = {} if speculate_k is None else {"draft_tokens": speculate_k}
        facts = {**options, "strategy": strategy}
        if length and (sentence := without_effect("speculate_k", declared(Options)["draft_tokens"], facts)):
            warn(sentence)
            length = {}
        self.pipeline = Pipeline(model, draft, strategy=strategy, **options, **length)
        asked = "speculate" if speculate else "speculate_k" if length else ""
        if asked and self.pipeline.strategy == "ar":
            sentence = f"{asked} has no effect: without a draft the target decodes alone. {self.pipeline.note}"
            warn(sentence.rstrip())
        self._close = weakref.finalize(self, _close, self.pipeline, os.getpid())
        self.pipeline.start()

    @overload
    def generate(self, prompts: Prompt, sampling_params: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: Prompt | Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Result | list[Result]:
        """Continue each of a list of prompts, or one prompt, as `Client.generate` does."""
        return self.pipeline.generate(prompts, sampling_params)

    def chat(self, messages: str | Sequence[ChatMessage], sampling_params: SamplingParams | None = None) -> Result:
        """The answer to a conversation, by the target's own chat template: messages with `role` and `content`, or the
        text of its only message.

        Raises InputError if the target has no template, or refuses the messages.
        """
        return self.pipeline.generate(self.pipeline.chat_prompt(messages), sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamEvent, None, None]:
        """Continue `prompt`: TextEvents as the text comes, then one ResultEvent. Leaving the loop cancels the rest."""
        return self._events(self.pipeline.stream(prompt, sampling_params))

    def close(self) -> None:
        """End every process of the pipeline."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _events(self, stream: Stream) -> Generator[StreamEvent, None, None]:
        """A method, so that the pipeline lives as long as the iterator."""
        with stream:
            yield from map(TextEvent, stream)
            assert stream.result is not None
            yield ResultEvent(stream.result)


def _strategy(speculate: bool | None, speculate_k: int | None, strategy: str | None) -> str:
    """Raises InputError if `speculate` contradicts `strategy`."""
    if strategy is not None and speculate is not None and speculate != (strategy != "ar"):
        raise InputError(f"speculate={speculate} contradicts strategy={strategy!r}: give one of them.")
    if strategy is not None:
        return strategy
    if speculate is False:
        return "ar"
    return Options().strategy if speculate_k is None else "ssd"


def _close(pipeline: Pipeline, owner: int) -> None:
    """A forked child of the owner leaves the pipeline to the owner."""
    if os.getpid() == owner:
        pipeline.close()
