"""The two ends of a language model, the embedding and the head, which a trained drafter shares with its target.

Knows no drafter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from draft_worker.short_head import HeadTokens, ShortHead
from protocol.errors import InputError
from protocol.inference.narrow_weights import keep_narrow
from protocol.inference.stored_model import load_network, ready_for_processor

Layer = Callable[[mx.array], mx.array]
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


class TokenEnds(NamedTuple):
    """`embed`: (...) tokens to (..., width); `head`: (..., width) states to (..., vocabulary) logits, or as many as a
    head of some tokens has."""

    embed: Layer
    head: Layer
    width: int
    vocabulary: int

    @classmethod
    def of(
        cls,
        embedding: nn.Module,
        head: nn.Module | None,
        tokens: HeadTokens | None = None,
        element: mx.Dtype | None = None,
    ) -> "TokenEnds":
        """`head`: None if the embedding's own rows make the logits. `tokens`: the only ones that it keeps. `element`:
        the type of what `embed` gives; None: as it comes."""
        rows: Any = embedding
        vocabulary = rows.weight.shape[0]
        width = embedding(mx.zeros((1,), mx.int32)).shape[-1]
        if tokens is not None:
            head = ShortHead(embedding if head is None else head, tokens, tied=head is None)
        # MLX unpacks rows without scales of a type, as in MXFP4, to bfloat16.
        embed = rows if element is None else lambda asked: rows(asked).astype(element)
        return cls(embed, rows.as_linear if head is None else head, width, vocabulary)


def drafter_ends(
    drafter: Path,
    own: TokenEnds | None,
    target: Path | None,
    width: int,
    vocabulary: int,
    element: mx.Dtype,
    *,
    head: bool = True,
    head_tokens: HeadTokens | None = None,
) -> TokenEnds:
    """The drafter's `own` copies, or else the ends of its target, whose states have `width` numbers, in the drafter's
    type `element`.

    Raises InputError if `target` is wanted and None, or another model. `head`: whether the head is used.
    `head_tokens`: those that the target's head keeps; None: all.
    """
    if own is not None:
        return own
    if target is None:
        raise InputError(f"The draft in {drafter} uses the embedding and the head of its target: name a target.")
    ends = target_ends(target, element, head=head, head_tokens=head_tokens)
    if (ends.width, ends.vocabulary) != (width, vocabulary):
        raise InputError(
            f"The draft in {drafter} was trained for a target with states of {width:,} numbers and {vocabulary:,} "
            f"tokens, but {target} has {ends.width:,} and {ends.vocabulary:,}: choose the draft's own target."
        )
    return ends


def target_ends(
    folder: Path, element: mx.Dtype | None = None, *, head: bool = True, head_tokens: HeadTokens | None = None
) -> TokenEnds:
    """The ends of the mlx-lm model in `folder`. The rest of its weights is not read, nor is a head that is not used.
    `element`: None: as they are stored. `head_tokens`: those that the head keeps; None: all.

    Raises InputError if they can't be found.
    """
    network, _ = load_network(folder)
    modules = network.named_modules()
    embeddings = [(path, each) for path, each in modules if isinstance(each, _EMBEDDINGS)]
    if not embeddings:
        raise InputError(f"No embedding was found in the target in {folder}: choose a draft that has its own.")
    own_head = next((each for path, each in modules if path.split(".")[-1] == "lm_head"), None)
    ends = nn.Module()
    ends["embedding"] = max(embeddings, key=_likeness)[1]
    if own_head is not None and head:
        ends["head"] = own_head
    ready_for_processor(ends)
    if element is not None:
        # Two half types beside one another make float32 of all that follows.
        ends.set_dtype(element)
    mx.eval(ends.parameters())
    for name in ends.children():
        keep_narrow(ends[name])
    return TokenEnds.of(ends["embedding"], ends.get("head"), head_tokens, element)


def _likeness(found: tuple[str, Any]) -> tuple[bool, int]:
    """A model may have further embeddings, of positions or layers."""
    path, embedding = found
    return path.split(".")[-1] == "embed_tokens", embedding.weight.shape[0]
