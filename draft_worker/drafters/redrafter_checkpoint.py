"""Reads and writes ReDrafter's published files (apple/ml-recurrent-drafter: recurrent_drafting/modeling_drafter.py)."""

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from draft_worker.drafters.files import DrafterFolder, Quantization, parameters, save
from draft_worker.drafters.redrafter import ReDrafter, ReDrafterForm
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from draft_worker.short_head import keep_rows

_MODEL_TYPE = "recurrent_drafting_drafter"
_UNUSED = "emb_norm.weight"
"""In some files; the published forward does not read it."""


class _Config(msgspec.Struct):
    hidden_size: Annotated[int, Meta(ge=1, le=1 << 15)]
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    exit_dim: Annotated[int, Meta(ge=1, le=1 << 17)]
    num_draft_layers: Annotated[int, Meta(ge=0, le=64)]
    rnn: bool = False
    quantization: Quantization | None = None


class ReDrafterCheckpoint(NamedTuple):
    """A drafter from its files."""

    network: ReDrafter
    head_tokens: HeadTokens | None
    """Those of the columns of its logits; None: column c is token c."""


def read_redrafter(folder: Path) -> ReDrafterCheckpoint:
    """Raises InputError for files that are missing, damaged or of another form."""
    found = DrafterFolder(folder, "a ReDrafter head")
    config = found.decoded(found.raw_config(), _Config)
    network = ReDrafter(
        ReDrafterForm(
            width=config.hidden_size,
            vocabulary=config.vocab_size,
            exit=config.exit_dim,
            blocks=config.num_draft_layers,
            recurrent=config.rnn,
        )
    )
    tensors = found.tensors()
    tensors.pop(_UNUSED, None)
    found.fill(network, tensors, config.quantization)
    head_tokens = read_head_tokens(folder, config.vocab_size)
    if head_tokens is not None:
        keep_rows(network.lm_head[-1], head_tokens)
    return ReDrafterCheckpoint(network, head_tokens)


def write_redrafter(folder: Path, network: ReDrafter) -> None:
    form = network.form
    config = {
        "architectures": ["Drafter"],
        "model_type": _MODEL_TYPE,
        "hidden_size": form.width,
        "vocab_size": form.vocabulary,
        "exit_dim": form.exit,
        "num_draft_layers": form.blocks,
        "num_lookback_tokens": 0,
        "rnn": form.recurrent,
        "emb_norm": False,
    }
    save(folder, config, parameters(network))
