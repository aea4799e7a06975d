"""Decoding times of the baselines on the same devices: plain decoding, and draft and target in turns. Pure.

The second is mlx-lm's `speculative_generate_step`: K draft forwards, one verification, no overlap. Above
temperature 0 it accepts a draft token only if two independent draws agree.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.language import Language
from protocol.messages.base import NodeId

Agreement = Callable[[int, int], bool]
"""Whether the draft's token at (request, position) is accepted."""


@dataclass(frozen=True, slots=True)
class DecodingTime:
    """Rounds and time for a number of tokens."""

    tokens: int
    rounds: int
    seconds: float


def plain_decoding(devices: Devices, first: int, tokens: int) -> DecodingTime:
    """Plain decoding without messages, from absolute position `first` on."""
    return DecodingTime(tokens, tokens, sum(devices.target.forward(1, first - 1 + done) for done in range(tokens)))


def turn_taking(
    devices: Devices, agrees: Agreement, draft_tokens: int, request: int, first: int, tokens: int
) -> DecodingTime:
    """`tokens` tokens from absolute position `first` on, with `draft_tokens` draft tokens a round."""
    done = rounds = 0
    seconds = 0.0
    behind = 1
    while done < tokens:
        drafted = min(draft_tokens, tokens - done - 1)
        accepted = 0
        while accepted < drafted and agrees(request, first + done + accepted):
            accepted += 1
        seconds += _round(devices, first - 1 + done, drafted, behind)
        # If all tokens are accepted, the draft has not evaluated its last token yet.
        behind = 2 if accepted == drafted else 1
        done += accepted + 1
        rounds += 1
    return DecodingTime(done, rounds, seconds)


def agreement(language: Language, acceptance: AcceptanceModel | None) -> Agreement:
    """At temperature 0, where `acceptance` is None: the draft's best guess is the target's token.

    Else two independent draws agree with the probability that `acceptance` gives.
    """
    if acceptance is None:
        return lambda request, position: _guessed(language, request, position)
    chances = ModelledLanguage(acceptance)
    return lambda request, position: chances.rank_at(request, position, chances.accept_at(request, position)) == 1


def _guessed(language: Language, request: int, position: int) -> bool:
    best = language.candidates(request, NodeId(position), position, on_target_path=True, limit=1)
    return list(best.tokens) == [language.token(request, position)]


def _round(devices: Devices, context: int, drafted: int, behind: int) -> float:
    """Seconds of a round behind `context` tokens."""
    if drafted == 0:
        return devices.target.forward(1, context)
    draft = devices.baseline_draft
    alone = draft.forward(behind, context) + (drafted - 1) * draft.forward(1, context)
    return alone + devices.target.forward(1 + drafted, context)
