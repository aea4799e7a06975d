"""Which workers fit together, which are up, and what they are to record. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from orchestrator.core.commands import Command, SendMessage
from orchestrator.core.events import Arrived, Task, WorkerDown, WorkerUp
from orchestrator.core.request import Request
from orchestrator.core.tuning import TUNING
from protocol.contracts.engines import DraftModel, offered_engines
from protocol.messages.base import Level, RequestId, Role
from protocol.messages.features import MAX_OUTPUTS, FeatureForm, Features, Output, Tap
from protocol.messages.worker import Hello
from protocol.shown_names import model_name

MAX_DRAFTS = 16


@dataclass(slots=True)
class _Worker:
    incarnation: int
    hello: Hello
    remote: bool
    last_message_at: float
    longest_gap: float = 0.0
    """Seconds between two of its messages, at most so far."""


class WorkerRegistry:
    """At most one target and one prefill worker, and any number of drafts."""

    def __init__(self, context: int = 0) -> None:
        """`context`: most tokens of a request; 0: what the target allows."""
        self._context = context
        self.target: Hello | None = None
        """Hello of the target that is up."""
        self.vocabulary = 0
        """Size of the target's vocabulary; 0 without a target."""
        self._workers: dict[tuple[Role, int], _Worker] = {}
        self._fingerprints: dict[str, str] = {}
        """Of the weights of each own target's folder, as the first one loaded them."""

    def __contains__(self, role: Role) -> bool:
        return self.target is not None if role == "target" else bool(self._of(role))

    def workers(self) -> list[tuple[int, Hello, bool]]:
        """Each worker that is up: its incarnation, its Hello, and whether it runs on another machine."""
        return [(worker.incarnation, worker.hello, worker.remote) for worker in self._workers.values()]

    def objection(self, event: WorkerUp, full: bool) -> str | None:
        """Why this worker can't serve here, as a sentence, or None. `full`: no further draft can be attached."""
        if event.hello.role == "target":
            return self._exchanged(event)
        if event.hello.role == "prefill":
            return None
        reason = None if self.target is None else mismatch(event.hello, self.target)
        if reason is None and full:
            return f"{MAX_DRAFTS} drafts are attached, which is the most: detach one of them first."
        return reason

    def target_mismatches(self, target: Hello) -> dict[int, str]:
        """The drafts that can't work with this target, by incarnation, each with a sentence that says why."""
        reasons = {draft.incarnation: mismatch(draft.hello, target) for draft in self._of("draft")}
        return {incarnation: reason for incarnation, reason in reasons.items() if reason is not None}

    def _exchanged(self, event: WorkerUp) -> str | None:
        """Why this target can't continue what an earlier one began, as a sentence, or None: its files have changed."""
        target = event.hello
        if event.remote or not target.model_fingerprint:
            return None
        if self._fingerprints.setdefault(target.model, target.model_fingerprint) == target.model_fingerprint:
            return None
        return (
            f"The files of {model_name(target.model)} were exchanged while the pipeline ran, and an answer would have "
            "two halves of two models: start the pipeline again."
        )

    def features_read(self) -> Tap:
        """What the target is to record: the outputs of its layers that the drafts read, ascending. Later drafts get no
        features where all together read more than a target records."""
        read: set[Output] = set()
        for form in (draft.hello.features for draft in self._of("draft") if draft.hello.features is not None):
            if len(read | set(form.outputs)) <= MAX_OUTPUTS:
                read |= set(form.outputs)
        return Tap(tuple(sorted(read)))

    def add(self, event: WorkerUp, now: float) -> None:
        role = event.hello.role
        if role != "draft":
            self._workers = {key: worker for key, worker in self._workers.items() if key[0] != role}
        hello = self._limited(event.hello) if role == "target" else event.hello
        self._workers[role, event.incarnation] = _Worker(event.incarnation, hello, event.remote, now)
        self._note_target()

    def lower(self, incarnation: int, level: Level) -> bool:
        """The target verifies less from now on. Returns False if it would not be less."""
        worker = self._workers["target", incarnation]
        if not lowers(level, worker.hello.level):
            return False
        worker.hello = replace(worker.hello, level=level)
        self._note_target()
        return True

    def remove(self, event: WorkerDown) -> bool:
        """Remove a worker. Returns whether it was up."""
        removed = self._workers.pop((event.role, event.incarnation), None)
        self._note_target()
        return removed is not None

    def note_message(self, event: Arrived, now: float) -> bool:
        """Note the time of a message. Returns whether it comes from a worker that is up."""
        worker = self._workers.get((event.role, event.incarnation))
        if worker is not None:
            worker.longest_gap = max(worker.longest_gap, now - worker.last_message_at)
            worker.last_message_at = now
        return worker is not None

    def heard_since(self, role: Role, time: float) -> bool:
        """Whether the worker of a role has sent anything since then."""
        return self._of(role)[0].last_message_at > time

    def listen_again(self, now: float) -> None:
        """Nobody listened for a while: from now on all are silent for as long as they send nothing."""
        for worker in self._workers.values():
            worker.last_message_at = now

    def silence(self, role: Role, now: float) -> float | None:
        """Seconds since the last message of the worker of a role, if it is silent for too long."""
        worker = self._of(role)[0]
        silence = now - worker.last_message_at
        allowed = min(TUNING.most_silence, max(TUNING.silence, TUNING.silence_gaps * worker.longest_gap))
        return silence if silence > allowed else None

    def incarnation(self, role: Role) -> int:
        return self._of(role)[0].incarnation

    def _limited(self, target: Hello) -> Hello:
        return replace(target, context=min(target.context, self._context or target.context))

    def _note_target(self) -> None:
        self.target = next((worker.hello for worker in self._of("target")), None)
        self.vocabulary = 0 if self.target is None else self.target.vocabulary

    def _of(self, role: Role) -> list[_Worker]:
        return [worker for key, worker in self._workers.items() if key[0] == role]


def mismatch(one: Hello, other: Hello) -> str | None:
    """Why this draft and this target can't be a pair, or None. Vocabulary sizes and added tokens may differ."""
    target, draft = (one, other) if one.role == "target" else (other, one)
    if draft.tokenizer_fingerprint and draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        return foreign_tokenizer(model_name(draft.model), model_name(target.model))
    return None if draft.features is None else _unreadable(draft, draft.features, target)


def foreign_tokenizer(draft: str, target: str, difference: str = "") -> str:
    """That these models can't be a pair. `difference`: a clause that says where their tokenizers differ, if known."""
    where = f" ({difference})" if difference else ""
    return (
        f"The draft {draft} has another tokenizer than the target {target}{where}, so its guesses would be gibberish. "
        f"Choose a draft of the same model family, or the draft engine {_engines('none')}."
    )


def refusal(task: Task, target: Hello) -> str | None:
    """Why this target can't serve a request, or None. A draft whose context is shorter drafts on the last tokens."""
    length = len(task.tokens)
    if length >= target.context:
        return (
            f"The prompt has {length:,} tokens, but {model_name(target.model)} runs with a context of "
            f"{target.context:,}. Shorten the prompt, raise --context if it is set, or choose a target with a longer "
            "context."
        )
    if max(task.tokens) >= target.vocabulary:
        return (
            f"The prompt holds token {max(task.tokens)}, but {model_name(target.model)} knows only ids below "
            f"{target.vocabulary:,}. Encode the prompt with the target's own tokenizer."
        )
    return None


def _unreadable(draft: Hello, form: FeatureForm, target: Hello) -> str | None:
    """Why the draft can't read the hidden states of this target, or None."""
    reason = "it reads hidden states, and this target offers none" if target.taps is None else target.taps.lack(form)
    if not reason:
        return None
    name = model_name(draft.model) or draft.engine
    return (
        f"The draft {name} can't draft for the target {model_name(target.model)}: {reason}. "
        "Choose a draft that was trained for this target."
    )


def _engines(model: DraftModel) -> str:
    """The offered engines that draft with this."""
    return " or ".join(name for name, engine in offered_engines().items() if engine.model == model)


def lowers(level: Level, before: Level) -> bool:
    """Whether a target of this level verifies less than one of the level before."""
    levels: list[Level] = ["tree", "chain", "plain"]
    return levels.index(level) > levels.index(before)


class FeatureRelay:
    """The target records the outputs that at least one of the drafts reads."""

    def __init__(self, requests: Mapping[RequestId, Request], workers: WorkerRegistry) -> None:
        self._requests = requests
        self._workers = workers
        self._recorded = Tap(())
        """What the target that is up was told to record."""

    def target_changed(self) -> None:
        """A target that has just come up records nothing."""
        self._recorded = Tap(())

    def tap(self) -> list[Command]:
        """Tell the target what to record, if that has changed. A target that verifies no guesses records nothing.

        A change ends all rings. So outputs that no draft reads any more are recorded while requests run: the next life
        of a draft that died goes on with what its ring holds.
        """
        target = self._workers.target
        if target is None:
            return []
        wanted = Tap(()) if target.level == "plain" else self._workers.features_read()
        fewer = set(wanted.outputs) < set(self._recorded.outputs)
        if wanted == self._recorded or (self._requests and fewer):
            return []
        self._recorded = wanted
        return [SendMessage("target", wanted)]

    def relay(self, features: Features, readers: Iterable[int]) -> list[Command] | None:
        """Send features on to the drafts `readers`, unchanged; None if they belong to no tokens that are committed."""
        request = self._requests.get(features.request)
        if request is None or features.round > request.round:
            return None
        if features.first + features.rows > request.position:
            return None
        return [SendMessage("draft", features, incarnation) for incarnation in readers]
