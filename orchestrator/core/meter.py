"""What a pipeline measures: every figure of its devices, its drafts and its requests is written here. Pure.

Policies, the election and statistics only read the figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from orchestrator.core.phases import COMPARING, IN_TURNS, Mode
from orchestrator.core.policy.estimates import Estimates, MeasuredRound
from orchestrator.core.sequence import Sequence as Request
from orchestrator.core.speculation import GrowthStep, Speculation
from protocol.messages.base import SequenceId
from protocol.messages.worker import Grow, Prefilled, Verdict, Verify
from protocol.speculation.token_tree import Node, end_of_path

_SETTLING = 2
"""Rounds of a request that say nothing about what forwards cost: the target may copy KV that it took up and that
something else still holds. Behind 8,192 tokens such a forward takes six times as long."""
_MIN_MEASURED_PREFILL = 64
"""Tokens. A shorter prefill is too fast to measure the draft's speed."""


@dataclass(slots=True)
class Comparison:
    """A draft's guesses beside what the target chose, as they were when it chose."""

    _estimates: Estimates
    _path: list[tuple[Node, int, int]]
    """The nodes on the chosen path, each with its number of children and the token that the target chose behind it."""
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
    waited: float
    """Seconds that the target waited for growth."""
    overlapped: bool
    """The draft grew during the forward."""
    overhead: float | None
    """Seconds beyond the forward and the wait; None if other requests shared the forward."""
    typical: bool
    """The forward stands for the request's conditions."""
    comparison: Comparison


class Meter:
    """`answered`, `grew`, `asked` and `ended` write the figures; `counted` those that can wait."""

    def __init__(self, requests: Mapping[SequenceId, Request]) -> None:
        self._requests = requests

    # Of the target ----------------------------------------------------------------------------

    def prefilled(self, request: Request, message: Prefilled, now: float) -> None:
        """The target has read the prompt: later waits of the target count as decoding."""
        stats = request.stats
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
        estimates, speculation, verified = request.estimates, request.speculation, request.outstanding
        assert verified is not None
        for token, claimed in request.first_lookup():
            # Whether or not that guess was verified.
            estimates.lookup.observe(claimed, 0, token == chosen[0])
        settled = request.stats.rounds >= _SETTLING and not verdict.root_alone
        if width is not None and settled and not self._disturbed(request, mode):
            estimates.target.observe(width, verdict.seconds)
        overhead = None
        if len(self._requests) == 1:
            # Rounds of several requests overlap, so their times do not show the overhead of one.
            overhead = self._measure_round(request, verdict, len(verified.tokens), mode not in COMPARING, now)
        overlapped = speculation.drafting and not speculation.in_turns
        comparison = self.compare(speculation, chosen, last)
        typical = not speculation.reading
        return Answer(verified, verdict, chosen, now, request.waited, overlapped, overhead, typical, comparison)

    def compare(self, speculation: Speculation, chosen: Sequence[int], last: bool = False) -> Comparison:
        """Compare a draft's guesses with the tokens that the target chose below the root, before the root moves."""
        estimates = speculation.estimates
        node: Node | None = speculation.tree.root
        estimates.usefulness.observe(chosen[0] in node.children if node.children else None)
        path: list[tuple[Node, int, int]] = []
        for token in chosen:
            if node is None:
                break
            children = node.children
            path.append((node, len(children), token))
            if children:
                rank = next((rank for rank, guess in enumerate(children) if guess == token), None)
                estimates.acceptance.observe(float(rank == 0))
                estimates.ranks.observe(len(children), rank)
            node = children.get(token)
        if last:
            return Comparison(estimates, path, None)
        estimates.unasked += speculation.in_turns and speculation.drafting
        bonus = (path[-1][1], node is not None) if len(path) == len(chosen) else (0, False)
        return Comparison(estimates, path, bonus)

    def counted(self, request: Request, answer: Answer, emitted: int, hit: bool | None) -> None:
        """Count a round in the request's statistics, and calibrate its draft. `hit`: None for the last round."""
        stats, verified, verdict = request.stats, answer.verified, answer.verdict
        if hit is not None and request.level != "plain":
            stats.hit_chances += 1
            stats.hits += hit
            stats.overlapped_rounds += answer.overlapped
        stats.add_tokens(emitted, answer.at)
        if answer.overhead is not None:
            stats.add_forward(len(verified.tokens), verdict.seconds, answer.waited, answer.typical)
            stats.add_overhead(answer.overhead)
        # One more token could have been accepted where the end of the path had a child under verification.
        accepted = len(verdict.path)
        end = end_of_path(verified.tokens, verified.parents, answer.chosen[:-1])
        stats.saving_seconds += verdict.saving
        stats.add_round(accepted, accepted + (end in verified.parents), verdict.seconds)
        stats.add_paced(verdict.paced)
        answer.comparison.calibrate()

    def _disturbed(self, request: Request, mode: Mode) -> bool:
        """Whether the draft, which takes turns, was at work during the forward that has just ended."""
        return mode in IN_TURNS and any(
            each.speculation.at_work_since(request.sent_at) for each in self._requests.values()
        )

    def _measure_round(self, request: Request, verdict: Verdict, width: int, undisturbed: bool, now: float) -> float:
        """Note what the round took. Returns the seconds beyond the target's forward and the wait for growth.

        `undisturbed`: no draft but the active one grows.
        """
        speculation, estimates = request.speculation, request.estimates
        gate, expected, seconds = estimates.usefulness, request.expected_tokens, now - request.ready_since
        if undisturbed and speculation.drafting and speculation.takes_turns:
            measured = MeasuredRound(expected, seconds, width, verdict.seconds, request.remaining)
            estimates.turns.observe(measured, estimates.beside_draft, estimates.step.get(0.0), estimates.ranks.all)
        beside = speculation.drafting and speculation.takes_turns and not speculation.in_turns
        if gate.measuring or (undisturbed and (beside or gate.paused)):
            plain = 1.0 / (estimates.target(1) + estimates.hop.get(0.0))
            gate.observe_gain(expected, seconds, speculation.reading, plain)
        if request.began_with_hit and estimates.freshness is not None:
            estimates.freshness.observe(request.anew, len(verdict.path) + 1, request.waited + verdict.seconds)
        overhead = max(0.0, seconds - request.waited - verdict.seconds)
        if not (request.began_early and speculation.wanted):
            estimates.hop.observe(overhead)
        return overhead

    # Of drafts --------------------------------------------------------------------------------

    def grew(self, request: Request, estimates: Estimates, step: GrowthStep | None, growth: Grow, active: bool) -> None:
        """A draft has grown. `active`: its work counts in the request's statistics."""
        if step is not None:
            if step.response is not None:
                (estimates.first_response if step.first else estimates.next_response).observe(step.response)
            estimates.observe_step(step.seconds)
            estimates.growth.observe(step.nodes, step.seconds)
            if step.read is not None and step.read[0] >= _MIN_MEASURED_PREFILL:
                estimates.prefill.observe(step.read[1] / step.read[0])
            if step.recovery is not None:
                estimates.recovery.observe(step.recovery)
        if active:
            request.stats.add_growth(growth.evaluated, growth.seconds)
            request.stats.add_paced(growth.paced)

    def asked(self, request: Request) -> None:
        """The draft was asked for steps."""
        request.estimates.unasked = 0

    def ended(self, request: Request) -> None:
        """The request has ended: a short answer may not be worth the reading of its prompt."""
        request.estimates.usefulness.request_ended()
