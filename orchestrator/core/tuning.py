"""The numbers that decide how fast the pipeline is, or when it gives something up, each with what measured it. Pure.

None of them changes tokens. Bounds against hostile peers and limits of the protocol stand where they are used.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of the tries of one choice between two ways. All counts are rounds."""

    first_pause: int
    longest_pause: int
    rounds: int
    """Of a try."""
    in_a_row: int
    """So many of them follow one another; then there is a pause before the next ones."""
    window: int
    """Of the rates. If it is longer than a try, a try goes on with what the one before has measured."""
    gain: float
    """The other way must be faster by this factor: rates of short tries are uncertain."""
    settling: int = 0
    """Rounds after a change that count for neither way."""
    few: int = 4
    loss: float = 0.8
    """A try that is slower by this factor after a `few` rounds ends."""
    most: int = 1 << 30
    """After so many rounds, of whatever kind, a try ends."""


def tuned(value: Any, log: str | None) -> Any:
    """A number, and the entry of docs/log that measured it; None if none did."""
    return field(default=value, metadata={"log": log})


@dataclass(frozen=True, slots=True)
class Tuning:
    # What is verified, and whether to wait for growth

    margin: float = tuned(0.02, "2026-11-27-waits-draft-beside-target")
    """The rate after a wait must be higher by this share: its gain is an estimate, its cost is certain."""
    margin_beside: float = tuned(0.8, "2026-11-27-waits-draft-beside-target")
    """As much higher still for each forward that the wait lasts, at a miss where the draft grows beside the target:
    without the wait it grows during the verification, which costs nothing. Not for guesses that fade meanwhile."""
    look_ahead: int = tuned(4, None)
    """Growth steps that are looked ahead where the draft takes turns."""
    explored: float = tuned(0.002, "2026-11-29-never-behind-its-parts")
    """Share of the time that a draft in turns may cost where it does not pay: whether it does may have changed."""
    usual_rounds: int = tuned(48, "2026-11-29-never-behind-its-parts")
    """Rounds whose tokens a second are the usual rate."""
    usual_known: int = tuned(8, "2026-11-29-never-behind-its-parts")
    """Rounds before it counts; until then it is that of plain decoding."""
    asked_rounds: int = tuned(256, "2026-11-29-further-steps-without-lookup")
    """Rounds in which a draft in turns was asked, of which the mean is taken."""
    asked_known: int = tuned(16, "2026-11-29-asked-by-what-came")
    """The fewest of them that are believed."""
    asked_errors: float = tuned(1.5, "2026-11-29-asked-by-what-came")
    """Standard errors of their mean by which they may have been better."""
    plain_rounds: int = tuned(32, "2026-11-29-never-behind-its-parts")
    """After so many rounds without a node the next one is expected to have none either."""
    searched: int = tuned(8, None)
    """Nodes that are searched for the best paths, for each node of the longest path, in all trees of a forward: the
    more requests share it, the shorter are the paths that are worth their cost."""
    lookup_tokens: int = tuned(16, None)
    """Longest chain of guesses by prompt lookup."""
    lookup_least: float = tuned(0.05, None)
    """Path probability below which no guess by prompt lookup is worth a row of a forward."""

    # How wide and how deep a draft grows

    min_width: int = tuned(4, "2026-11-20-several-requests-forward")
    """Fewest nodes of one tree that a growth step evaluates, however many trees share the step."""
    expensive_half: float = tuned(1.2, "2026-11-20-second-paced-bench-better")
    """Ratio of step times above which the second half of a step's width is too expensive."""
    steep_half: float = tuned(1.5, "2026-11-22-costs-steps")
    """The same for the second half of a width that was halved before: fewer nodes mean fewer guesses at each place."""
    prepared: float = tuned(0.2, "2026-11-22-draft-stops-when-more")
    """Share of the path probability worth a verification that is still worth a growth step."""
    max_least: float = tuned(0.1, None)
    """Whatever a token costs the target, the draft prepares nodes that are as probable as this."""
    prepared_in_turns: float = tuned(0.7, "2026-11-29-never-behind-its-parts")
    max_least_in_turns: float = tuned(0.5, "2026-11-29-never-behind-its-parts")
    """The same two where draft and target take turns."""
    max_acceptance: float = tuned(0.9, None)
    """Highest acceptance that is believed: trees are finite, and an endless chain has at most 10 tokens."""

    # What is believed of a draft's guesses before they are measured

    acceptance: float = tuned(0.6, "2026-11-20-tried-controller-hop")
    """Share of first guesses that are right, as eight observations."""
    ranks: tuple[float, ...] = tuned((0.6, 0.12, 0.06, 0.04, 0.025, 0.02, 0.015, 0.01), None)
    """Of small drafts of one family: the share of right guesses by their rank."""
    ranks_weight: int = tuned(8, "2026-11-28-five-kinds-tokens-second")
    """Observations that `ranks` count as."""
    sampled_claims: float = tuned(0.62, "2026-11-29-claims-that-came")
    """Share of a draft's claims that come true at a temperature, where noise is in its scores."""
    guesses_window: int = tuned(128, None)
    hits_decay: float = tuned(0.99, None)
    hits_exponent: float = tuned(0.8, None)
    """Of the hit model's prior."""

    # What forwards and growth steps cost

    prior_slope: float = tuned(0.03, "2026-11-28-five-kinds-tokens-second")
    """Cost of one more token relative to a forward of one, while nothing is measured."""
    assumed_weight: float = tuned(0.5, "2026-11-28-five-kinds-tokens-second")
    """Weight of the pure scale beside observations without a measured prior, as observations one token apart. On a
    processor a second token may cost half of a forward, and forwards over one token, which tell it, are rare."""
    measured_weight: float = tuned(2.0, None)
    """The same with a measured prior: about a dozen observations that differ by half of a forward of one token."""
    cost_decay: float = tuned(0.995, None)
    cost_outlier: float = tuned(3.0, None)
    """Estimates that a forward counts as at most."""
    cost_shrinkage: int = tuned(8, None)
    """Observations of a width that count as much as the prior's shape."""
    cost_window: int = tuned(64, None)
    narrow_few: int = tuned(4, None)
    """Forwards over one token that tell what they cost."""
    narrow_soon: int = tuned(8, "2026-11-26-round-turns-part-part")
    """Wider ones after which another is due until then."""
    narrow_later: int = tuned(64, None)
    """And later."""
    settling: int = tuned(2, "2026-11-27-latent-attention-avx2-first")
    """Rounds that say nothing about what forwards cost where the target has taken up KV: it may copy what something
    else still holds. Behind 8,192 tokens such a forward takes six times as long."""
    lengths: tuple[int, ...] = tuned((512, 2048, 8192, 32768), "2026-11-26-round-turns-part-part")
    """Tokens of context from which on a target's forwards have estimates of their own."""
    typical: tuple[int, ...] = tuned((0, 1024, 4096, 16384, 65536), None)
    """Tokens of context for which each of these estimates begins; the first as it was measured, behind hardly any."""
    min_measured_prefill: int = tuned(64, None)
    """Tokens. A shorter prefill is too fast to measure the draft's speed."""
    inside_block: float = tuned(0.25, "2026-11-29-blocks-beside-chains")
    """Share of a forward's time, up to which a block drafter's step ran none."""
    slowest_fading: float = tuned(0.97, "2026-11-26-block-drafter-27b-target")
    """Share of the slowest step's time that the next step leaves."""
    slowdown_trust: float = tuned(0.5, None)
    """Weight of the expected slow-down of plain decoding's estimate beside what the forwards show, as a sum of squared
    shares."""
    slowdown_most: float = tuned(3.0, None)
    """Largest believed slow-down of a forward by the draft."""

    # Turns or apart, fresh or cached guesses, this draft or that one

    turns: Terms = tuned(
        Terms(first_pause=256, longest_pause=4096, rounds=24, in_a_row=24, window=24, gain=1.03, settling=2),
        "2026-11-22-draft-rests-while-target",
    )
    long_request: int = tuned(256, None)
    """Tokens that a request must have left, so that it can gain from a try of the other place."""
    freshness: Terms = tuned(
        Terms(first_pause=7, longest_pause=256, rounds=8, in_a_row=1, window=64, gain=1.03, loss=0.0),
        "2026-11-23-trained-drafters",
    )
    """Every eighth hit is a try at first."""
    drafts: Terms = tuned(
        Terms(
            first_pause=256,
            longest_pause=8192,
            rounds=48,
            in_a_row=160,
            window=48,
            gain=1.05,
            settling=4,
            few=8,
            most=160,
        ),
        "2026-11-22-two-drafts-measured-alone",
    )
    """Rates over 48 rounds of the same draft vary by 7%. After a change the drafts have rested, or read."""
    tree_rounds: int = tuned(24, None)
    """Rounds in which the trees of a draft on trial are compared."""
    trial_patience: int = tuned(192, None)
    """Rounds after which a draft that can't be compared yet (it still prefills) ends its trial, if another waits."""
    plausible: float = tuned(0.7, None)
    """Share of the active draft's tokens that the trees of the draft on trial must have given, so that it is tried.
    They say nothing of the time: it may grow faster, or slow the target down less."""
    outlier_rounds: float = tuned(4.0, None)
    """A round counts as at most this many mean rounds: a stall says nothing about a way."""

    # When a draft does not pay, and rests

    wrong_rounds: int = tuned(32, "2026-11-20-second-paced-bench-better")
    """In a row, after which a draft rests as long; at first."""
    most_wrong_rounds: int = tuned(256, None)
    """Longest such pause."""
    assumed_gain: float = tuned(1.2, "2026-11-27-draft-always-late-rests")
    """Plain decoding is believed to be so much faster beside a resting draft, until that is measured."""
    doubtful_loss: float = tuned(1.0, "2026-11-27-draft-always-late-rests")
    """Tokens lost, by that belief, after which the draft rests for some rounds in which plain decoding is measured."""
    plain_measured: int = tuned(16, "2026-11-27-draft-always-late-rests")
    """Such rounds."""
    plain_settling: int = tuned(2, "2026-11-27-draft-always-late-rests")
    """Rounds before them in which a step may still end."""
    certain_loss: float = tuned(0.5, "2026-11-27-draft-always-late-rests")
    """Tokens lost, by measurement, after which the draft is paused."""
    certain_spread: float = tuned(40.0, "2026-11-27-draft-always-late-rests")
    """More of them for each unit of the mean square of a round's gain: where rounds vary, a loss may be chance."""
    credit: float = tuned(8.0, "2026-11-27-draft-always-late-rests")
    """Tokens gained that count at most against later losses."""
    spared_rounds: int = tuned(150, "2026-11-27-draft-always-late-rests")
    """Of pause for each token that was lost."""
    most_lost: float = tuned(4.0, "2026-11-27-draft-always-late-rests")
    """Tokens that a round can lose: a stall says nothing about a draft."""

    # What a draft reads of a prompt in turns

    turns_gain: float = tuned(0.15, "2026-11-26-round-turns-part-part")
    """Of the time of plain decoding, what drafting in turns saves before anything is measured."""
    least_turns_gain: float = tuned(0.01, None)
    """The same, at least: a long answer is worth a try."""
    certain_gain: float = tuned(1.5, "2026-11-26-round-turns-part-part")
    """Times that the gain must be what the reading costs: the gain is an estimate, and the cost is certain."""
    step_guesses: int = tuned(8, "2026-11-26-round-turns-part-part")
    """Of a growth step below each root."""
    turn_pause: float = tuned(1.0, "2026-11-26-draft-reads-between-two")
    """Seconds between two turns of a conversation, so that a draft reads on in the next pause."""
    unknown_reading: float = tuned(2.0, None)
    """Seconds that the target waits at most while a draft of unknown speed reads the prompt."""
    least_reading: float = tuned(0.2, None)
    """The same for any draft."""

    # When something is late, in seconds

    growth_wait: float = tuned(0.2, "2026-11-20-faults-promised-held-found")
    """The least time that a strategy waits for growth that is due: together with a forward of the target that is a
    pause of at most 250 ms."""
    growth_wait_steps: int = tuned(8, None)
    """Growth steps that it waits, if that is longer."""
    draft_prefill_wait: float = tuned(10.0, None)
    """Without growth, after which a draft that prefills counts as silent too."""
    prefill_priority: float = tuned(1.0, None)
    """The longest delay of the next round by a prompt that the target prefills. So a new request gets its first token
    after its own prefill and one round, and the running requests pause no longer than that."""
    straggler: float = tuned(0.1, None)
    """The verdicts of one forward arrive together. A later verdict counts as lost: its tree is sent again alone."""
    answer: float = tuned(5.0, "2026-11-28-lying-target")
    """Without an answer, after which the message is sent again; the target's answers are idempotent."""
    unanswered: int = tuned(3, "2026-11-28-lying-target")
    """So often in succession a living target is waited for in vain before the round counts as lost."""
    restart_pause: float = tuned(0.1, None)
    """Before a request that the target has lost is started again."""
    fruitless_rounds: int = tuned(3, "2026-11-28-lying-target")
    """So many in succession without a verdict cost a target its place."""
    fruitless_targets: int = tuned(2, "2026-11-28-lying-target")
    """So many end a request."""
    standstill: float = tuned(10.0, "2026-11-27-sessions-read-again-pipelines")
    """An answer that is missed so long after it was overdue was not looked for: this process stood still, and the
    target perhaps with it."""
    silence: float = tuned(60.0, "2026-11-27-sessions-read-again-pipelines")
    """A worker may be silent so long, or `silence_gaps` times longer than it ever was between two messages: a forward
    over a chunk of a long prompt may take a minute on a slow or busy machine."""
    most_silence: float = tuned(600.0, "2026-11-27-sessions-read-again-pipelines")
    silence_gaps: int = tuned(4, "2026-11-27-sessions-read-again-pipelines")
    unknown_prefill_wait: float = tuned(30.0, None)
    """For a prefill worker, while no speed was measured."""
    least_prefill_wait: float = tuned(1.0, None)
    prefill_trials: int = tuned(2, None)
    """Prompts that a prefill worker gets before its speed counts as measured."""
    reading_told: float = tuned(0.25, None)
    """Between two reports of how far a prompt has been read."""


TUNING = Tuning()
