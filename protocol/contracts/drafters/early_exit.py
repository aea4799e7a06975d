"""Early exits: the first layers of the target itself, with the target's norm and head, or with trained ones.

A folder of ours names them: config.json {"model_type": "exit", "layers": E}, and if the exit was trained
model.safetensors with `exit_norm.weight`, which replaces the final norm, and perhaps the tensors of one more decoder
layer behind the first E, `exit_layer.*`, named as in mlx-lm's Llama.
"""

import msgspec

from protocol.contracts.drafters.checkpoint import Count, DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter

MODEL_TYPE = "exit"
NORM = "exit_norm.weight"
LAYER = "exit_layer."


class _Config(msgspec.Struct):
    layers: Count
    num_target_layers: Count | None = None


def early_exit(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    config = found.decoded(_Config)
    for name in found.tensors:
        if name != NORM and not name.startswith(LAYER):
            raise found.wrong(f"its tensor {name} is neither {NORM} nor one of {LAYER}*")
    if found.tensors:
        found.need(NORM)
    match found.shape(NORM) if found.tensors else (0,):
        case (width,):
            pass
        case shape:
            raise found.wrong(f"its tensor {NORM} has the shape {shape} instead of one size")
    return Drafter(
        kind="exit",
        format="this program's",
        stated_outputs=(),
        target_layers=config.num_target_layers,
        width=width,
        drafted=found.head_tokens(),
        layers=config.layers,
        parameters=found.parameters(),
        read=found.parameters(),
    )
