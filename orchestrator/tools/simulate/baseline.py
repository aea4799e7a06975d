"""What others' decoders reach on the same devices: target alone, and draft and target on one device in turns. Pure.

The second is mlx-lm's `speculative_generate_step`: K draft forwards, one verification, nothing overlaps.
Above temperature 0 it accepts a draft token only if two independent draws agree.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.tools.simulate.acceptance import AcceptanceModel, InventedLanguage
from orchestrator.tools.simulate.devices import Devices
from orchestrator.tools.simulate.language import Language
from protocol.messages.base import NodeId

Agreement = Callable[[int, int], bool]
"""Whether the draft's token at (request, position) is accepted."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Over a number of tokens."""

    tokens: int
    rounds: int
    seconds: float


def alone(devices: Devices, tokens: int) -> Reached:
    """Plain decoding without messages."""
    return Reached(tokens, tokens, tokens * devices.target.forward(1))


def in_turns(devices: Devices, agrees: Agreement, draft_tokens: int, request: int, first: int, tokens: int) -> Reached:
    """`tokens` tokens from absolute position `first` on, `draft_tokens` drafted a round."""
    done = rounds = 0
    seconds = 0.0
    behind = 1
    while done < tokens:
        drafted = min(draft_tokens, tokens - done - 1)
        accepted = 0
        while accepted < drafted and agrees(request, first + done + accepted):
            accepted += 1
        seconds += _round(devices, drafted, behind)
        # Where all were accepted the draft has not read its own last token yet.
        behind = 2 if accepted == drafted else 1
        done += accepted + 1
        rounds += 1
    return Reached(done, rounds, seconds)


def agreement(language: Language, acceptance: AcceptanceModel | None) -> Agreement:
    """At temperature 0, where `acceptance` is None: the draft's best guess is the target's token.

    Else two independent draws agree with the probability that `acceptance` gives.
    """
    if acceptance is None:
        return lambda request, position: _guessed(language, request, position)
    chances = InventedLanguage(acceptance)
    return lambda request, position: chances.rank_at(request, position, chances.accept_at(request, position)) == 1


def _guessed(language: Language, request: int, position: int) -> bool:
    best = language.candidates(request, NodeId(position), position, on_truth=True, limit=1)
    return list(best.tokens) == [language.token(request, position)]


def _round(devices: Devices, drafted: int, behind: int) -> float:
    if drafted == 0:
        return devices.target.forward(1)
    draft = devices.baseline_draft
    return draft.forward(behind) + (drafted - 1) * draft.forward(1) + devices.target.forward(1 + drafted)
