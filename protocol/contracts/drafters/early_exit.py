"""Early exits: the first layers of the target itself, with the target's norm and head.

A folder of ours names them: config.json {"model_type": "exit", "layers": E}.
"""

import msgspec

from protocol.contracts.drafters.checkpoint import Count, DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter

MODEL_TYPE = "exit"


class _Config(msgspec.Struct):
    layers: Count


def early_exit(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    if found.tensors:
        raise found.wrong("it has weights, and exits that were trained are not run")
    return Drafter(kind="exit", format="this program's", stated_outputs=(), layers=found.decoded(_Config).layers)
