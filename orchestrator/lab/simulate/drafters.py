"""Trained drafters as `plan` knows them: what a growth step reads, and how often a guess is right. Pure.

Parameters are those of a drafter for Qwen3-8B, whose forward reads 7.57 billion: width 4,096, a layer of 193 million
with 12,288 rows in its feed-forward part, a head of 151,936 rows. They depend on the shapes of the published formats
alone. A step reads them in the precision of the target's weights: a drafter in 16 bits beside a target in 4 bits takes
up to four times as long, which `--draft-ms` can say.

Acceptances are means over depths of the published shares of right guesses behind right ones, on chat unless the source
says otherwise, with the features of every token before: what an asynchronous draft reaches is lower.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.lab.simulate.prediction.plan import Scenario
from orchestrator.lab.simulate.prediction.sweep import with_acceptance, with_draft_step
from protocol.contracts.drafters.description import DrafterKind

_TARGET = 7.57
"""Billions of parameters that a forward of Qwen3-8B reads."""
_LAYER, _HEAD = 0.193, 0.622


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledDrafter:
    read: float
    """Billions of parameters of a growth step: layers and head."""
    accept: float | None
    """How often a guess is right whose parent is right; None: not published, so that of the demo pair's draft."""
    source: str
    block: int = 1
    """Tokens that one forward guesses behind one another."""


DRAFTERS: Mapping[DrafterKind, ModelledDrafter] = MappingProxyType(
    {
        "eagle3": ModelledDrafter(
            read=0.35, accept=0.64, source="DSpark's paper (DeepSpec): 0.53 at depth 1 to 0.74 on chat; 32,000-row head"
        ),
        "mtp": ModelledDrafter(
            read=_LAYER + 2 * 4096 * 4096 / 1e9 + _HEAD,
            accept=0.58,
            source="shares of rounds that reach depths 1 to 3 on chat: 0.70, 0.29, 0.18",
        ),
        "dflash": ModelledDrafter(
            read=5 * _LAYER + _HEAD,
            accept=0.67,
            block=7,
            source="DSpark's paper (DeepSpec): 0.72 at depth 1 to 0.63 on chat",
        ),
        "dspark": ModelledDrafter(
            read=5 * _LAYER + _HEAD + 151_936 * 256 / 1e9,
            accept=0.93,
            block=7,
            source="DSpark's paper (DeepSpec): 0.93 at every depth, on maths; chat is lower",
        ),
        "redrafter": ModelledDrafter(
            read=(2 * 4096**2 + 2 * 8192**2) / 1e9 + 2 * _HEAD,
            accept=None,
            source="no acceptance by depth is published",
        ),
        "exit": ModelledDrafter(
            read=9 * _LAYER + _HEAD, accept=None, source="none by depth is published; a quarter of the layers"
        ),
    }
)


def with_drafter(scenario: Scenario, kind: DrafterKind) -> Scenario:
    """This drafter beside the scenario's target: its step in proportion to the parameters read, and its acceptance."""
    drafter = DRAFTERS[kind]
    step = 1000 * scenario.devices.target.forward(1) * drafter.read / _TARGET
    changed = with_draft_step(scenario, step)
    if drafter.accept is not None and not scenario.recorded:
        changed = with_acceptance(changed, drafter.accept)
    return replace(changed, devices=replace(changed.devices, draft_block=drafter.block))
