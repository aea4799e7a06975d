"""Whether a package is a language model that can draft, and how it is called. Pure; loads nothing.

The layout is that of Apple's article on Llama 3.1 with Core ML (machinelearning.apple.com/research/core-ml-on-device-
llama), which swift-transformers follows (Sources/Models/LanguageModel.swift, `Keys`). CoreMLPipelines' converter
(coremlpipelinestools/CausalLM.py) writes the same with the names input_ids, causal_mask, key_cache and value_cache.
    inputIds     (1, L) int32            tokens
    causalMask   (1, 1, L, E) float      0 where a token may attend; E = tokens in the cache after the call
    keyCache, valueCache                 states (layers, 1, key heads, slots, head)
    logits       (1, L, vocabulary)      an output
A call writes the rows E - L to E - 1 and attends to the rows below E. So the length of the mask says where a call
begins: a lower E than before overwrites rows, which is how a path is left. A row's slot is its position, so the cache
holds one path at a time.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from draft_worker.coreml.package import METADATA_KEY
from draft_worker.coreml.stateful.description import Description, Feature
from draft_worker.engine import ANY_TOKEN
from protocol.errors import InputError
from protocol.messages.base import MAX_CONTEXT

SOURCE_KEY = "co.huggingface.exporters.name"
"""User-defined metadata of Hugging Face's exporters: the model that was converted."""
_IDS = ("inputIds", "input_ids")
_MASKS = ("causalMask", "causal_mask")
_STATES = ({"keyCache", "valueCache"}, {"key_cache", "value_cache"})
LOGITS = "logits"
_FLOATS = ("FLOAT16", "FLOAT32")
_LONGEST = 512
"""Most tokens of a call if the package takes any number: the mask grows with it."""


class StatefulLayout(NamedTuple):
    """How to call a package."""

    ids: str
    mask: str
    function: str
    vocabulary: int
    """The length of a token's logits."""
    context: int
    """Tokens that the cache holds."""
    least: int
    most: int
    """Tokens of one call."""
    lengths: tuple[int, ...]
    """The only numbers of tokens of one call, ascending; empty: all from `least` to `most`."""
    state_bytes: int
    source: str
    """The model that was converted, by the package's metadata; may be empty."""

    def length(self, tokens: int) -> int:
        """The number of tokens of a call that evaluates `tokens`, or as many of them as one call takes."""
        if self.lengths:
            return next((length for length in self.lengths if length >= tokens), self.lengths[-1])
        return min(max(tokens, self.least), self.most)


def layout(found: Description, path: Path) -> StatefulLayout:
    """How to draft with the package at `path`. Raises InputError, whose sentence says what does not fit."""
    try:
        return _layout(found)
    except _Misfit as misfit:
        raise InputError(f"{path} can't draft: {misfit}") from misfit


class _Misfit(Exception):
    """A sentence that says what does not fit, and what to do."""


def _layout(found: Description) -> StatefulLayout:
    if METADATA_KEY in found.metadata:
        raise _Misfit("launch-pipeline made it. Pass the folder that holds it.")
    ids, mask = _named(found.inputs, _IDS), _named(found.inputs, _MASKS)
    if ids is None:
        raise _Misfit(
            f"it takes no token ids, but {_list(found.inputs)}. It may be one of several parts of a model; "
            "use a package that holds the whole model."
        )
    if set(found.states) not in _STATES:
        raise _Misfit(
            f"its states are {_list(found.states)}, not keyCache and valueCache. "
            "Use a package that keeps its KV as states (macOS 15 and later)."
        )
    if mask is None:
        raise _Misfit("it takes no causalMask, whose length says where a call begins. Convert it with one.")
    unknown = set(found.inputs) - {ids, mask}
    if unknown:
        raise _Misfit(f"it also takes {_list(unknown)}, whose meaning is not known here.")
    if LOGITS not in found.outputs:
        raise _Misfit(f"it returns {_list(found.outputs)}, not logits. Convert it without a choice of tokens inside.")
    slots, state_bytes = _cache(found.states)
    least, most, lengths = _tokens(found.inputs[ids])
    context = min(slots, _mask_length(found.inputs[mask], found.inputs[ids], lengths), MAX_CONTEXT)
    if least > context:
        raise _Misfit(f"its calls take at least {least} tokens, and its cache holds {context}.")
    return StatefulLayout(
        ids=ids,
        mask=mask,
        function=found.function,
        vocabulary=_vocabulary(found.outputs[LOGITS]),
        context=context,
        least=least,
        most=min(most, context, max(least, _LONGEST)),
        lengths=tuple(length for length in lengths if length <= context),
        state_bytes=state_bytes,
        source=found.metadata.get(SOURCE_KEY, ""),
    )


def _named(features: Mapping[str, Feature], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in features), None)


def _list(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:6]) + (" and more" if len(listed) > 6 else "") if listed else "none"


def _tokens(ids: Feature) -> tuple[int, int, tuple[int, ...]]:
    """Least and most tokens of one call, and the only numbers of them."""
    if ids.kind != "INT32" or len(ids.sizes) != 2 or ids.sizes[0] != (1, 1):
        raise _Misfit(f"its token ids are {_shape(ids)}, not (1, L) of int32.")
    least, most = ids.sizes[1]
    if not 1 <= least <= most:
        raise _Misfit(f"its calls take {least} to {most} tokens.")
    return least, most, tuple(sorted({shape[1] for shape in ids.choices}))


def _mask_length(mask: Feature, ids: Feature, lengths: tuple[int, ...]) -> int:
    """The longest mask: the most tokens in the cache after a call."""
    if mask.kind not in _FLOATS or len(mask.sizes) != 4 or mask.sizes[:2] != ((1, 1), (1, 1)):
        raise _Misfit(f"its mask is {_shape(mask)}, not (1, 1, L, E) of floats.")
    least, most = mask.sizes[3]
    if mask.choices or least == most:
        raise _Misfit("its mask has a fixed length, so a call can't say where it begins. Convert it with a RangeDim.")
    if mask.sizes[2] != ids.sizes[1] and not lengths:
        raise _Misfit("its mask has another number of rows than tokens.")
    if least > ids.sizes[1][0]:
        raise _Misfit(f"its mask is at least {least} long, so an empty cache can't be begun.")
    return most


def _cache(states: Mapping[str, Feature]) -> tuple[int, int]:
    """Slots of the cache, and bytes of all states."""
    found = list(states.values())
    if len(set(found)) != 1 or found[0].kind not in _FLOATS or len(found[0].sizes) < 4:
        raise _Misfit(f"its states are {' and '.join(map(_shape, found))}, not equal caches of floats.")
    numbers = 1
    for least, most in found[0].sizes:
        if least != most or least < 1:
            raise _Misfit(f"its states are {_shape(found[0])}, whose size is not fixed.")
        numbers *= least
    slots = found[0].sizes[-2][0]
    if slots < 2:
        raise _Misfit(f"its cache holds {slots} tokens.")
    return slots, 2 * numbers * (2 if found[0].kind == "FLOAT16" else 4)


def _vocabulary(logits: Feature) -> int:
    if logits.kind not in _FLOATS or len(logits.sizes) != 3 or logits.sizes[0][0] != 1:
        raise _Misfit(f"its logits are {_shape(logits)}, not (1, L, vocabulary) of floats.")
    least, most = logits.sizes[2]
    if least != most or not 2 <= least <= ANY_TOKEN:
        raise _Misfit("it does not state the size of its vocabulary.")
    return least


def _shape(feature: Feature) -> str:
    sizes = ", ".join(str(least) if least == most else f"{least}..{most}" for least, most in feature.sizes)
    return f"({sizes}) of {feature.kind.lower() or 'another type'}"
