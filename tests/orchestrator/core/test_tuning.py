"""Each tuned number is what a log entry measured, or says that none did."""

import re
from dataclasses import fields

import pytest

from orchestrator.core.tuning import Tuning
from tests.support.paths import ROOT

UNMEASURED = 39
EVIDENCE = {
    "margin": "one margin of 1.2 in place of 1.02",
    "margin_beside": "higher by 0.8 for each plain forward that the wait lasts",
    "plain_rounds": "32 rounds without a node in place of 8",
    "explored": "0.4 and 0.2% of the time",
    "usual_rounds": "the rate of the last 48 rounds",
    "usual_known": "from 8 rounds on",
    "asked_rounds": "over 256 rounds in place of 64",
    "asked_known": "from 16 rounds on",
    "asked_errors": "1.5 standard errors",
    "prepared_in_turns": "0.7 of the probability worth a row, at most 0.5",
    "max_least_in_turns": "0.7 of the probability worth a row, at most 0.5",
    "min_width": "16 nodes a tree and step 308 tokens/s, 8: 333, 4: 336",
    "expensive_half": "costs more than 1.2 times a step over 8",
    "steep_half": "halving while a step costs 1.5 times the narrower one",
    "prepared": "0.2 is kept",
    "acceptance": "acceptance rate (eight observations of 0.6)",
    "sampled_claims": "the draft's claims are 0.58 where 0.36 come true",
    "ranks_weight": "four observations of 0.6 in place of eight",
    "prior_slope": "a prior that a token costs 3%",
    "assumed_weight": "With half an observation",
    "narrow_soon": "8 plain rounds at first",
    "settling": "the first two forwards of a request copy the KV",
    "lengths": "prompts of 512, 2,048, 8,192 and 32,768 tokens on have costs of their own",
    "inside_block": "less than a quarter of a forward's time",
    "slowest_fading": "as long as the slowest of recent steps",
    "turns": "lost up to 7% at factor 1.5; 24 is kept",
    "freshness": "costs up to 0.6% in probes elsewhere",
    "drafts": "hence 48 rounds and 5%",
    "wrong_rounds": "a draft with 32 wrong guesses in a row rests",
    "spared_rounds": "150 rounds a lost token",
    "plain_measured": "plain decoding is measured once, in 18 rounds",
    "plain_settling": "plain decoding is measured once, in 18 rounds",
    **dict.fromkeys(
        ("assumed_gain", "doubtful_loss", "certain_loss", "certain_spread", "credit", "most_lost"),
        "Thresholds and pauses were chosen on these points",
    ),
    "turns_gain": "The gain was taken to be 15% of the time",
    "certain_gain": "must be 1.5 times what the reading costs",
    "step_guesses": "evaluate one node and give 8 guesses",
    "turn_pause": "0.97 without pauses and 0.98 with 0.5 s",
    "growth_wait": "gave up after 250 ms (now 200)",
    "answer": "Shorter looks than 3 × 5 s were not tried",
    "unanswered": "Shorter looks than 3 × 5 s were not tried",
    "fruitless_rounds": "Three replace the target and six end the request",
    "fruitless_targets": "Three replace the target and six end the request",
    "standstill": "the time in which the orchestrator stood still",
    "silence": "replaced because 61 s of silence",
    "most_silence": "at most ten minutes",
    "silence_gaps": "Four times the longest pause so far is allowed",
}
LOGS = {each.name: each.metadata["log"] for each in fields(Tuning)}


@pytest.mark.parametrize("name", [name for name, log in LOGS.items() if log is not None])
def test_the_named_entry_says_what_measured_the_number(name: str):
    entry = (ROOT / "docs" / "log" / f"{LOGS[name]}.md").read_text(encoding="utf-8")
    assert EVIDENCE[name] in re.sub(r"\s+", " ", entry)


def test_no_further_number_goes_unmeasured():
    assert set(EVIDENCE) == {name for name, log in LOGS.items() if log is not None}
    assert list(LOGS.values()).count(None) <= UNMEASURED
