"""A modelled target that announces features, and modelled drafts that read them."""

from msgspec.structs import replace

from orchestrator.lab.simulate.acceptance import Language
from orchestrator.lab.simulate.worker_host import Work
from orchestrator.lab.simulate.workers import CONTEXT, ModelledDraft, ModelledTarget
from protocol.messages.base import Level
from protocol.messages.features import FeatureForm, Features, Tap, Taps
from protocol.messages.worker import FromWorker, ToWorker, Verdict
from protocol.worker.pacing import DevicePace

TAPS = Taps(layers=12, width=64)
RING = "lp-00000000000000000000"


class RecordingTarget(ModelledTarget):
    """Announces features behind each verdict while it records."""

    def __init__(
        self,
        language: Language,
        pace: DevicePace,
        context: int = CONTEXT,
        level: Level = "tree",
        taps: Taps | None = TAPS,
    ) -> None:
        super().__init__(language, pace, context, level)
        self.hello = replace(self.hello, taps=taps)
        self.recorded: tuple[int, ...] = ()

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Tap):
            self.recorded = message.outputs
        work = super().handle(message)
        return work._replace(replies=tuple(reply for each in work.replies for reply in self._followed(each)))

    def _followed(self, reply: FromWorker) -> tuple[FromWorker, ...]:
        if not isinstance(reply, Verdict) or not self.recorded:
            return (reply,)
        round, position = self.root(reply.request)
        rows = len(reply.path) + 1
        return reply, Features(reply.request, round, RING, position - rows, rows)


def reading(draft: ModelledDraft, form: FeatureForm | None) -> ModelledDraft:
    """The draft, which says that it reads features of this form."""
    draft.hello = replace(draft.hello, features=form)
    return draft
