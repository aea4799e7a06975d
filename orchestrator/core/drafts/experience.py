"""What outlives a draft's process: what was measured of such a draft, and the caches that it left. Pure."""

from orchestrator.core.commands import Command
from orchestrator.core.drafts.caches import DraftCaches
from orchestrator.core.events import Request
from orchestrator.core.policy.estimates import Estimates
from protocol.messages.base import SequenceId
from protocol.messages.worker import Hello

_MOST_ABSENT = 16


class DraftHistory:
    """Of one draft. Greedy and sampled requests are told apart."""

    def __init__(self, base: "DraftHistory | None" = None) -> None:
        """`base`: whose measurements of the target it shares."""
        self.caches = DraftCaches()
        kinds = {"greedy": Estimates(), "sampled": Estimates()} if base is None else base._kinds
        self._kinds = {kind: known.with_another_draft() for kind, known in kinds.items()}

    def of(self, request: Request) -> Estimates:
        return self._kinds["greedy" if request.sampling.temperature == 0 else "sampled"]


class DraftHistories:
    """A draft that comes back, which is one of the same model on a device of the same name, goes on where it left.
    Two that are alike and up at once share nothing."""

    def __init__(self) -> None:
        self.without_draft = DraftHistory()
        self._absent: dict[tuple[str, str, str], DraftHistory] = {}
        """Least recently seen first."""
        self._present: list[DraftHistory] = []

    @property
    def warnings(self) -> int:
        """Arenas that drafts which are up, or were, refused to rely on."""
        return sum(one.caches.warnings for one in (*self._present, *self._absent.values()))

    def take(self, hello: Hello) -> DraftHistory:
        experience = self._absent.pop(_identity(hello), None) or DraftHistory(self.without_draft)
        self._present.append(experience)
        return experience

    def give_back(self, hello: Hello, experience: DraftHistory) -> list[Command]:
        """This draft is gone."""
        self._present.remove(experience)
        commands = experience.caches.left()
        doubled = self._absent.pop(_identity(hello), None)
        self._absent[_identity(hello)] = experience
        if doubled is None and len(self._absent) > _MOST_ABSENT:
            doubled = self._absent.pop(next(iter(self._absent)))
        return commands if doubled is None else [*commands, *doubled.caches.forgotten()]

    def ended(self, sequence: SequenceId) -> None:
        for experience in (*self._present, *self._absent.values()):
            experience.caches.ended(sequence)


def _identity(hello: Hello) -> tuple[str, str, str]:
    return hello.engine, hello.model, hello.device
