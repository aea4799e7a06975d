"""Which of two drafts is faster, round by round: first by a trial, then each alone. Pure."""

from orchestrator.core.commands import Command, TrialDecided
from orchestrator.core.drafts.alone import AloneRates
from orchestrator.core.drafts.election import Election
from orchestrator.core.drafts.trial import Trial
from orchestrator.core.sequence import Sequence


class Comparison:
    """Tells the election what was measured; the pool then follows the election."""

    def __init__(self, election: Election) -> None:
        self._election = election
        self._alone: AloneRates | None = None
        """While drafts are measured alone."""

    def round_ended(self, sequence: Sequence, trial: Trial | None, silent: bool) -> list[Command]:
        """A round of this sequence was committed; `silent`: the active draft has owed growth for too long.

        Returns the decision, if this round led to one.
        """
        outcome = None if trial is None else trial.outcome(self._election.contested)
        self._election.round_committed()
        if silent:
            self._election.active_failed()
        elif self._election.alone:
            return self._measure_alone(sequence)
        elif trial is not None and outcome is not None:
            return self._end_trial(trial, outcome)
        return []

    def _end_trial(self, trial: Trial, outcome: float) -> list[Command]:
        decision = self._election.trial_ended(outcome)
        if decision is None:
            self._alone = AloneRates()
            return []
        measured = trial.active_rate
        return [TrialDecided(decision.winner, decision.loser, measured, measured * outcome)] if trial.compared else []

    def _measure_alone(self, sequence: Sequence) -> list[Command]:
        """Count the round for the active draft, while the one on trial rests."""
        rates = self._alone
        assert rates is not None
        kind = "greedy" if sequence.request.sampling.temperature == 0 else "sampled"
        rates.add(kind, *sequence.ended_round, settled=sequence.speculation.settled)
        if not rates.measuring_incumbent and rates.challenger_known:
            rates.begin_incumbent()
            self._election.change_places()
        elif rates.known:
            challenger = self._election.on_trial
            decision = self._election.measured_alone(rates.challenger / max(1e-9, rates.incumbent))
            winner, loser = rates.incumbent, rates.challenger
            if decision.winner == challenger:
                winner, loser = loser, winner
            return [TrialDecided(decision.winner, decision.loser, winner, loser)]
        return []
