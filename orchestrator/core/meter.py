"""What a pipeline measures: every figure of its devices, its drafts and its requests is written here. Pure.

Policies, the election and statistics only read the figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from orchestrator.core.estimates import ChosenNode, Estimates, GrowthStep, MeasuredRound
from orchestrator.core.phases import COMPARING, IN_TURNS, Mode
from orchestrator.core.request import Request
from orchestrator.core.speculation import Speculation
from orchestrator.core.tuning import TUNING
from protocol.messages.base import RequestId
from protocol.messages.worker import Grow, Prefilled, Verdict, Verify
from protocol.speculation.token_tree import Node, end_of_path


@dataclass(slots=True)
class Comparison:
    """A draft's guesses beside what the target chose, as they were when it chose."""

    _estimates: Estimates
    _path: list[ChosenNode]
    _bonus: tuple[int, bool] | None
    """The number of guesses for the bonus token, and whether one was right; None of a request's last round."""

    def calibrate(self) -> None:
        """Calibrate the draft's claims. No decision about the next round needs it."""
        for node, guesses, token in self._path:
            # The commit may have added a child behind the guesses.
            for rank, child in enumerate(islice(node.children.values(), guesses)):
                self._estimates.calibration.observe(child.probability, rank, child.token == token)
        if self._bonus is not None:
            self._estimates.hits.observe(*self._bonus)


@dataclass(frozen=True, slots=True)
class Answer:
    """A round that the target has answered, and what is counted of it once the next round is on its way."""

    verified: Verify
    verdict: Verdict
    chosen: list[int]
    """The accepted tokens and the bonus token."""
    at: float
    round: MeasuredRound
    alone: bool
    """No other request shared the forward."""
    overlapped: bool
    """A draft grew meanwhile."""
    reading: bool
    """It had not read the prompt."""
    comparison: Comparison


class Meter:
    """`answered`, `grew`, `asked` and `ended` write the figures; `counted` those that can wait."""

    def __init__(self, requests: Mapping[RequestId, Request]) -> None:
        self._requests = requests

    # Of the target ----------------------------------------------------------------------------

    def prefilled(self, request: Request, message: Prefilled, now: float) -> None:
        """The target has read the prompt: later waits of the target count as decoding."""
        stats = request.stats
        if message.tokens < request.position:
            request.costs_from = stats.rounds + TUNING.settling
        stats.prefill_seconds += message.seconds
        stats.adopted += message.adopted
        stats.add_paced(message.paced)
        stats.begin_decoding(now)

    def answered(
        self,
        request: Request,
        verdict: Verdict,
        chosen: list[int],
        last: bool,
        width: int | None,
        mode: Mode,
        now: float,
    ) -> Answer:
        """The target has chosen tokens; the request still stands where it was. `last`: they are its last ones.

        `width`: tokens of the forward, if this is its first verdict. `mode`: of the pipeline during the forward.
        """
        estimates, verified = request.speculation.estimates, request.outstanding
        assert verified is not None
        # Whether or not these guesses were verified.
        for place, ((guess, claimed), token) in enumerate(zip(request.lookup_chain(len(chosen)), chosen, strict=False)):
            estimates.lookup.observe(claimed, place, guess == token)
            if guess != token:
                break
        round = request.measured(verdict, now)
        # A draft that takes turns and was at work all the same has slowed the forward down.
        disturbed = mode in IN_TURNS and any(
            each.speculation.at_work_since(request.sent_at) for each in self._requests.values()
        )
        settled = request.stats.rounds >= request.costs_from and not verdict.root_alone
        if width is not None and settled and not disturbed:
            estimates.target.observe(width, verdict.seconds)
        alone = len(self._requests) == 1
        if alone:
            # Rounds of several requests overlap, so their times do not show what one costs.
            self._learn(request, verdict, round, undisturbed=mode not in COMPARING)
        draft = request.speculation
        overlapped, reading = draft.drafting and not draft.in_turns, draft.reading
        comparison = self.compare(draft, chosen, last)
        return Answer(verified, verdict, chosen, now, round, alone, overlapped, reading, comparison)

    def _learn(self, request: Request, verdict: Verdict, round: MeasuredRound, undisturbed: bool) -> None:
        """A request that had the target for itself has ended a round. `undisturbed`: no other draft grew."""
        draft, estimates = request.speculation, request.speculation.estimates
        turns, gate, rests = estimates.turns, estimates.gate, draft.drafting and draft.can_rest
        if undisturbed and rests and draft.in_turns == turns.in_turns:
            turns.observe(round, estimates.beside_draft, estimates.step.get(0.0), estimates.ranks.all)
        beside = rests and not (draft.in_turns or turns.in_turns)
        if gate.measuring or (undisturbed and (beside or gate.paused)):
            plain = estimates.plain_rate
            lookup = request.rate_without_draft() / plain
            gate.observe_gain(round.tokens, round.seconds, draft.reading, plain, lookup)
        if request.began_with_hit and estimates.freshness is not None:
            estimates.freshness.observe(request.anew, len(verdict.path) + 1, round.waited + round.forward)
        if not (request.began_early and draft.wanted):
            estimates.hop.observe(round.overhead)
        estimates.usual.add(round.tokens, round.seconds)
        if request.instead is not None and undisturbed:
            guessed_by, expected = request.instead
            brought = 1 + (request.drafted(verdict.path) if guessed_by == "nobody" else len(verdict.path))
            estimates.asked[guessed_by].observe(brought, round.seconds, expected)

    def compare(self, speculation: Speculation, chosen: Sequence[int], last: bool = False) -> Comparison:
        """Compare a draft's guesses with the tokens that the target chose below the root, before the root moves."""
        estimates = speculation.estimates
        node: Node | None = speculation.tree.root
        path: list[ChosenNode] = []
        for token in chosen:
            if node is None:
                break
            path.append(ChosenNode(node, len(node.children), token))
            node = node.children.get(token)
        estimates.observe_guesses(path, unasked=not last and speculation.in_turns)
        complete = len(path) == len(chosen) and not last
        return Comparison(estimates, path, (path[-1].guesses, node is not None) if complete else None)

    def counted(self, request: Request, answer: Answer, emitted: int, hit: bool | None) -> None:
        """Count a round in the request's statistics, and calibrate its draft. `hit`: None for the last round."""
        stats, verified, verdict = request.stats, answer.verified, answer.verdict
        if hit is not None and request.level != "plain":
            stats.hit_chances += 1
            stats.hits += hit
            stats.overlapped_rounds += answer.overlapped
        stats.add_tokens(emitted, answer.at)
        if answer.alone:
            stats.add_forward(len(verified.tokens), verdict.seconds, answer.round.waited, not answer.reading)
            stats.add_overhead(answer.round.overhead)
        # One more token could have been accepted where the end of the path had a child under verification.
        accepted = len(verdict.path)
        end = end_of_path(verified.tokens, verified.parents, answer.chosen[:-1])
        stats.saving_seconds += verdict.saving
        stats.add_round(accepted, accepted + (end in verified.parents), verdict.seconds)
        stats.add_paced(verdict.paced)
        answer.comparison.calibrate()

    # Of drafts --------------------------------------------------------------------------------

    def grew(self, request: Request, estimates: Estimates, step: GrowthStep | None, growth: Grow, active: bool) -> None:
        """A draft has grown. `active`: its work counts in the request's statistics."""
        if step is not None:
            estimates.observe_growth(step)
        if active:
            request.stats.add_growth(growth.evaluated, growth.seconds)
            request.stats.add_paced(growth.paced)

    def asked(self, request: Request) -> None:
        """The draft was asked for steps."""
        request.speculation.estimates.unasked = 0

    def ended(self, request: Request) -> None:
        """The request has ended: a short answer may not be worth the reading of its prompt."""
        request.speculation.estimates.gate.request_ended()
