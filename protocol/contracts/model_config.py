"""A model's config.json in the form that mlx-lm reads. Pure.

mlx-lm leaves out fields that it does not know and takes defaults for those that it does not find. So a field that
stands in another place than expected changes the model's answers without an error.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from protocol.errors import InputError
from protocol.json_values import is_list, is_object

_LIFTED = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
"""What Transformers 5 states in `rope_parameters`, and the names that mlx-lm's architectures read."""
_LOCAL_BASES = ("rope_local_base_freq", "swa_rope_theta")
"""Names of the base of layers with a window."""
_OF_FULL_LAYERS = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""What Transformers 5.15 states layer by layer, and its names in mlx-lm, where it holds for layers without a window."""
_HEADS = (
    "lm_head.weight",
    "model.lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
_OTHER_MODELS = ("vision_config", "audio_config")


def translated(
    config: Mapping[str, Any],
    tensors: Collection[str],
    defaults_of: Callable[[Mapping[str, Any]], Mapping[str, object]],
) -> dict[str, Any]:
    """`config` with every field that stands elsewhere also where mlx-lm reads it; no field that it states is changed.

    `tensors`: the names of the weights. `defaults_of`: the fields that the architecture of a config reads, with their
    default values; empty for one that is not known. Raises InputError for what the architecture can't be told.
    """
    made = dict(config)
    text = config.get("text_config")
    if is_object(text):
        made["text_config"] = _with_head({**config, **text}, _with_positions(text, defaults_of(text)), tensors)
    return _with_head(config, _with_positions(made, defaults_of(config)), tensors)


def stated_bases(config: Mapping[str, Any]) -> frozenset[float]:
    """The bases of rotary positions that a config.json states anywhere."""
    return frozenset(_bases(config))


def _bases(part: Mapping[str, Any]) -> Iterator[float]:
    for name, value in part.items():
        if is_object(value) and name not in _OTHER_MODELS:
            yield from _bases(value)
        elif name.endswith(("rope_theta", "rotary_emb_base", *_LOCAL_BASES)):
            values: list[object] = value if is_list(value) else [value]
            yield from (float(each) for each in values if isinstance(each, int | float))


def _with_positions(config: Mapping[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    made = _from_layer_types(config, defaults) | _from_single_layers(config, defaults) | dict(config)
    rope = config.get("rope_parameters")
    if not is_object(rope) or not rope:
        return made
    kinds = [part for part in rope.values() if is_object(part)]
    if len(kinds) == len(rope):
        if any(kind != kinds[0] for kind in kinds):
            return _completed(made, _from_two_kinds(rope, defaults))
        rope = kinds[0]
    return _completed(made, _from_one_kind(rope))


def _completed(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    return dict(found) | {name: value for name, value in config.items() if value is not None or name not in found}


def _from_one_kind(rope: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: rope[stated] for stated, names in _LIFTED.items() if stated in rope for name in names}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return made | {"rope_scaling": None if kind == "default" else {**scaling, "type": kind, "rope_type": kind}}


def _from_two_kinds(rope: Mapping[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Of layers that see every token, and of those with a window."""
    if not defaults or "rope_parameters" in defaults:
        # Such an architecture reads them itself, or is one inside another.
        if set(rope) != {"full_attention", "sliding_attention"}:
            return {}
    elif set(rope) != {"full_attention", "sliding_attention"} or defaults.keys().isdisjoint(_LOCAL_BASES):
        raise InputError(
            f"The config.json states rotary positions for each of {', '.join(rope)} (rope_parameters), and mlx-lm's "
            "code for this architecture has one form for all layers: choose another model."
        )
    full, local = (_from_one_kind(rope[kind]) for kind in ("full_attention", "sliding_attention"))
    if local["rope_scaling"] is not None and defaults and "rope_parameters" not in defaults:
        raise InputError(
            "The config.json scales the positions of layers with a window (rope_parameters), and mlx-lm's code for "
            "this architecture does not: choose another model."
        )
    return full | {name: local["rope_theta"] for name in _LOCAL_BASES if "rope_theta" in local}


def _from_layer_types(config: Mapping[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Each how many layers one sees every token, where `layer_types` names the layers one by one."""
    kinds = config.get("layer_types")
    name = "sliding_window_pattern"
    read = type(defaults.get(name)) is int and "layer_types" not in defaults
    if not read or config.get(name) is not None or not is_list(kinds) or "sliding_attention" not in kinds:
        return {}
    windows = [kind == "sliding_attention" for kind in kinds]
    for every in range(1, len(windows) + 2):
        if windows == [(place + 1) % every != 0 for place in range(len(windows))]:
            return {name: every}
    raise InputError(
        "The config.json names layers with a window in an order (layer_types) that mlx-lm's code for this "
        "architecture can't take: choose another model."
    )


def _from_single_layers(config: Mapping[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """What Transformers 5.15 states in `per_layer_config`, by mlx-lm's names for all layers without a window."""
    layers: Any = config.get("per_layer_config") or {}
    different = {int(number): part for number, part in layers.items() if not part.items() <= config.items()}
    full = {number for number, kind in enumerate(config.get("layer_types") or []) if kind == "full_attention"}
    part = next(iter(different.values()), dict[str, Any]())
    named = {_OF_FULL_LAYERS.get(field, ""): value for field, value in part.items()}
    if different and (different != dict.fromkeys(full, part) or named.keys() - (defaults or _OF_FULL_LAYERS.values())):
        raise InputError(
            f"The config.json states {', '.join(part)} of single layers, which mlx-lm can't take: choose another model."
        )
    return named


def _with_head(stated: Mapping[str, Any], made: dict[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """Whether the embedding is the head too. A head in the files is used unless the config says that it is not."""
    if "tie_word_embeddings" in made:
        return made
    has_head = any(name in tensors for name in _HEADS)
    tied = stated.get("tie_word_embeddings", False if has_head else None)
    return made | {"tie_word_embeddings": tied} if tied is (not has_head) else made
