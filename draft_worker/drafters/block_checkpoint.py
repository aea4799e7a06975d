"""Reads the published files of the block drafters DFlash, DSpark and DFlash2. Knows no engine."""

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from draft_worker.drafters.block import BlockDrafter, markov_head
from draft_worker.drafters.files import DrafterFolder
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.head_tokens import HeadTokens, read_head_tokens
from draft_worker.short_head import keep_rows
from protocol.contracts.drafters.description import BlockForm

_ENDS = ("embed_tokens", "lm_head")
_CONFIDENCE = "confidence_head"


class BlockCheckpoint(NamedTuple):
    """A drafter from its files."""

    network: BlockDrafter
    ends: TokenEnds | None
    """Its own copies of the target's embedding and head; None: the target's."""
    head_tokens: HeadTokens | None
    """Those of the columns of head and Markov head; None: column c is token c."""


def read_block(folder: Path) -> BlockCheckpoint:
    """Raises InputError for files that are missing, damaged or of another form."""
    found = DrafterFolder(folder, BlockForm)
    form, tensors = found.form, found.tensors()
    named = found.head_tokens(tensors, form.vocabulary, ("lm_head.", "markov_head.markov_w2."))
    count = form.vocabulary if named is None else len(named)
    own = {name: values for name, values in tensors.items() if name.split(".")[0] in _ENDS}
    # Our trees rank by probability, so the confidence head that some have is not read.
    tensors = {name: values for name, values in tensors.items() if name.split(".")[0] not in (*_ENDS, _CONFIDENCE)}
    try:
        network = BlockDrafter(form)
        if form.markov and named is not None:
            network.markov_head = markov_head(form, len(named))
        found.fill(network, tensors)
        # Some ropes read their options when they are called.
        mx.eval(network.layers[0].self_attn.keys_values(mx.zeros((1, 1, form.width)), mx.zeros((1, 1), mx.int32)))
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise found.wrong(f"its config.json states a rotary embedding that is not known ({error})") from error
    head_tokens = read_head_tokens(folder, form.vocabulary) if named is None else None
    if form.markov and head_tokens is not None:
        keep_rows(network.markov_head.markov_w2, head_tokens)
    ends = None
    if {name.split(".")[0] for name in own} == {*_ENDS}:
        copies = _OwnEnds(form, count)
        found.fill(copies, own)
        ends = TokenEnds.of(copies.embed_tokens, copies.lm_head, head_tokens)
    if named is not None and ends is None:
        raise found.wrong("it names the tokens of a reduced head (d2t) and lacks embed_tokens.weight or lm_head.weight")
    return BlockCheckpoint(network, ends, head_tokens if named is None else named)


class _OwnEnds(nn.Module):
    """Copies of the target's embedding and head."""

    def __init__(self, form: BlockForm, columns: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(form.vocabulary, form.width)
        self.lm_head = nn.Linear(form.width, columns, bias=False)
