"""What a request's penalties and grammar mean to a draft: it heeds them where it can, and guesses worse where not."""

from pathlib import Path
from typing import TYPE_CHECKING

from draft_worker.engine import LoadedModel
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.sampling.grammar import GrammarError, Grammars

if TYPE_CHECKING:
    from protocol.sampling.logits_processors import LogitsProcessors


class DraftLogitsProcessors:
    """For the sequences of one engine."""

    def __init__(self, engine: LoadedModel) -> None:
        self._logits = bool(engine.tokenizer)
        """Only a model has a tokenizer of its own, and logits."""
        self._grammars = Grammars(Path(engine.model), engine.vocabulary)

    def at(self, start: Start) -> "LogitsProcessors | None":
        """Of a sequence that is served from `start` on; None if there is none, or none that can be heeded."""
        if not self._logits or not restrains(start.sampling):
            return None
        from protocol.sampling.logits_processors import LogitsProcessors

        try:
            return LogitsProcessors.at(start, self._grammars)
        except GrammarError:
            # The target says what is wrong.
            return None


def restrains(sampling: Sampling) -> bool:
    """Whether a sequence's own past changes its logits."""
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.grammar is not None)
