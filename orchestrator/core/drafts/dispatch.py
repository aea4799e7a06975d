"""What each draft is sent about the sequences that it serves: starts, reroots, requests for growth, stops. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from orchestrator.core.commands import Command, SendMessage
from orchestrator.core.drafts.election import Election
from orchestrator.core.drafts.history import DraftHistory
from orchestrator.core.phases import Phase
from orchestrator.core.policy.decision import Strategy, growth_timeout
from orchestrator.core.policy.estimates import Estimates
from orchestrator.core.policy.expected_rate import best_counts
from orchestrator.core.sequence import Sequence
from orchestrator.core.speculation import Speculation
from orchestrator.core.workers import WorkerRegistry, shares_first_layers
from protocol.messages.base import SequenceId
from protocol.messages.kv import KvReference
from protocol.messages.plans import BestFirst, GrowthPlan
from protocol.messages.worker import Extend, Hello, Reroot, Stop
from protocol.speculation.rolling_context import RollingContext

_GAIN_OF_TURNS, _LEAST_GAIN = 0.15, 0.01
"""Of the time of plain decoding, what drafting in turns saves before anything is measured, and at least: a long answer
is worth a try."""
_CERTAIN = 1.5
"""Times that the gain must be what the reading costs: the gain is an estimate, and the cost is certain."""
_GUESSES = 8
"""Of a growth step below each root."""
_SAVED_AT_ONCE = 128
"""Tokens whose KV a target saves between two rounds (target_worker.kv.checkpoint)."""
_PREFILL_SECONDS = 10.0
"""After so long without growth, a draft that prefills counts as silent too."""


@dataclass(slots=True)
class Draft:
    """`hello` is its own; `history` outlives it."""

    hello: Hello
    history: DraftHistory
    started: dict[SequenceId, int] = field(default_factory=dict)
    """Sequences that the draft serves, each with the round of its Start."""
    prefilling: set[SequenceId] = field(default_factory=set)
    """Those of them for which no growth has arrived yet."""
    _late_since: float | None = None
    """Since when the draft owes growth; None if it owes none."""

    def reads(self, tokens: int) -> int:
        """How many of so many tokens of a conversation it sees."""
        return tokens - RollingContext(self.hello.context).skipped(tokens)

    def start(self, sequence: SequenceId, round: int) -> None:
        self.started[sequence] = round
        self.prefilling.add(sequence)

    def stop(self, sequence: SequenceId) -> bool:
        """Returns whether the draft served the sequence."""
        self.prefilling.discard(sequence)
        self._late_since = None
        return self.started.pop(sequence, None) is not None

    def owes_growth(self, now: float) -> None:
        """A round missed, or the draft rested and was asked for a step."""
        if self._late_since is None:
            self._late_since = now

    def has_grown(self, sequence: SequenceId) -> None:
        self._late_since = None
        self.prefilling.discard(sequence)

    def silent(self, estimates: Estimates, now: float) -> bool:
        """The draft has owed growth for too long."""
        if self._late_since is None:
            return False
        limit = _PREFILL_SECONDS if self.prefilling else growth_timeout(estimates)
        return now - self._late_since > limit


class DraftDispatch:
    """The drafts that are up, by incarnation. Which of them are in use is the election's decision."""

    def __init__(
        self,
        strategy: Strategy,
        sequences: Mapping[SequenceId, Sequence],
        workers: WorkerRegistry,
        election: Election,
        written: Callable[[Sequence], KvReference | None],
    ) -> None:
        """`written`: the arena with the target's KV of a sequence."""
        self._written = written
        self.drafts: dict[int, Draft] = {}
        self._strategy = strategy
        self._sequences = sequences
        self._workers = workers
        self._election = election

    def start(self, id: int, speculation: Speculation, sequence: Sequence, now: float) -> list[Command]:
        """Start the sequence on a draft that does not serve it, unless guesses for it are not wanted.

        A draft that is the target's first layers starts once the target has saved their KV of the prompt.
        """
        draft, vocabulary = self.drafts[id], self._workers.vocabulary
        estimates = speculation.estimates
        unwanted = not speculation.wanted or estimates.usefulness.paused
        if not vocabulary or unwanted or _too_short(sequence, draft, estimates, self._sharing):
            return []
        adopt = draft.history.arenas.adopt(sequence.id)
        if adopt is None and self._shares(draft):
            written = self._written(sequence)
            if _comes_soon(sequence, written):
                return []
            adopt = draft.history.arenas.share(sequence.id, written)
        draft.start(sequence.id, sequence.round)
        adopted = adopt.tokens if adopt else 0
        speculation.start(max(0, draft.reads(len(sequence.tokens)) - adopted), now)
        plan = self._plan(speculation, sequence)
        start = sequence.start_message(plan, vocabulary, adopt, sequence.request.draft_sampling)
        return [SendMessage("draft", start, id)]

    def extend(self, id: int, sequence: Sequence, steps: int, now: float) -> list[Command]:
        """Ask a draft that rests to grow up to `steps` steps below the root."""
        draft = self.drafts[id]
        if sequence.id not in draft.started:
            return []
        draft.owes_growth(now)
        sequence.speculation.ask(steps, now)
        return [SendMessage("draft", Extend(sequence.id, sequence.round, steps), id)]

    def reroot(
        self, id: int, speculation: Speculation, sequence: Sequence, tokens: list[int], hit: bool, now: float
    ) -> list[Command]:
        """The sequence has committed `tokens`. `hit`: the draft's tree has the new root."""
        draft = self.drafts[id]
        if speculation.estimates.usefulness.paused:
            speculation.drafting = False
            return self.stop(id, sequence.id)
        if sequence.id not in draft.started:
            return self.start(id, speculation, sequence, now)
        plan = self._plan(speculation, sequence)
        if not hit and not speculation.resting:
            draft.owes_growth(now)
        # Guesses were given up of the active draft alone.
        anew = sequence.anew and speculation is sequence.speculation
        reroot = Reroot(
            sequence=sequence.id,
            round=sequence.round,
            position=sequence.position - len(tokens),
            tokens=tuple(tokens),
            root=sequence.tree.root.id,
            missed=not hit,
            plan=plan,
            anew=anew,
        )
        return [SendMessage("draft", reroot, id)]

    def stop(self, id: int, sequence: SequenceId) -> list[Command]:
        return [SendMessage("draft", Stop(sequence), id)] if self.drafts[id].stop(sequence) else []

    def _shares(self, draft: Draft) -> bool:
        """The draft adopts the KV of the target that is up."""
        target = self._workers.target
        return target is not None and shares_first_layers(draft.hello, target)

    def _plan(self, speculation: Speculation, sequence: Sequence) -> GrowthPlan | None:
        plan = self._strategy.plan(speculation.estimates, self._sharing, sequence.request.draft_tokens)
        if speculation is not sequence.speculation and isinstance(plan, BestFirst):
            # Only the active draft is asked for steps: one on trial grows by itself, or rests.
            plan = structs.replace(plan, steps=0 if self._election.alone else None)
        return speculation.follow(plan)

    @property
    def _sharing(self) -> int:
        """Requests whose trees a draft grows."""
        return max(1, sum(sequence.phase is not Phase.WAITING for sequence in self._sequences.values()))


def _too_short(sequence: Sequence, draft: Draft, estimates: Estimates, sharing: int) -> bool:
    """Whether the answer can't gain what it costs that the target waits while the draft reads the prompt.

    A token costs each of the `sharing` requests its part of a forward over all of them.
    """
    if not (estimates.turns.in_turns and estimates.target.known):
        return False
    reading = draft.reads(len(sequence.tokens)) * estimates.prefill.get(0.0)
    plain = estimates.target(sharing) / sharing
    return _CERTAIN * reading > _gain_of_turns(estimates, sharing) * sequence.remaining * plain


def _gain_of_turns(estimates: Estimates, sharing: int) -> float:
    """What drafting in turns is expected to save of the time of plain decoding.

    Several requests share a forward already, and with their guesses it gets wide. So theirs follows from the expected
    rate after one growth step for all of them.
    """
    if not estimates.first_response.count:
        return _GAIN_OF_TURNS
    cost, hop, shares = estimates.target, estimates.hop.get(0.0), estimates.ranks.shares(_GUESSES)
    plain = sharing / (cost(sharing) + hop)
    gain = 1.0 - plain / best_counts([shares] * sharing, cost, hop + estimates.first_response.get(0.0)).rate
    return max(_LEAST_GAIN, gain)


def _comes_soon(sequence: Sequence, written: KvReference | None) -> bool:
    """Whether the target is still to save much of the prompt's KV, which takes it a round for each part."""
    missing = sequence.position - (0 if written is None else written.tokens)
    return missing > _SAVED_AT_ONCE and sequence.stats.rounds < 2 + sequence.position // _SAVED_AT_ONCE
