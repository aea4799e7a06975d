"""How each key of a drafter's config.json was read, found out by changing it; and how else it could have been read.

A key that changes nothing in the description is not used, whatever its name promises. Knows no MLX.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import asdict

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import Drafter, MtpForm
from protocol.contracts.drafters.detection import described, read_drafter
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.json_values import is_list, is_object

_Path: TypeAlias = tuple[str | int, ...]
"""Names of objects and places in lists, down to a value."""
_BASE = "rope_theta"
_OUTPUTS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_TRIED = (*_OUTPUTS, _BASE, "block_size", "speculative_tokens", "mask_token_id")
_FLAGS = ("norm_before_residual", "norm_output", "sample_from_anchor", "is_causal")
"""Keys whose absence means different things to different programs."""


class Reading(NamedTuple):
    """A config.json with another value of one key, which makes another drafter of it."""

    key: str
    read: object
    other: object
    config: dict[str, Any]


def keys_as_read(folder: Path, *, with_own_head: bool = False) -> Iterator[tuple[str, object, str]]:
    """Every key of the drafter in `folder` but those that are null, its value, and what it states of the drafter, with
    the value as read; empty for a key that is not used."""
    drafter, config, variant = _variants(folder, with_own_head=with_own_head)
    for path, value in _keys(config):
        found = [variant(path, other)[0] for other in _others(path, value, ())]
        uses = [_difference(drafter, each) for each in found if each is not None and each != drafter]
        yield ".".join(map(str, path)), value, [*uses, "other values are refused" if None in found else ""][0]


def other_readings(folder: Path, target: Path, *, with_own_head: bool = False) -> Iterator[Reading]:
    """Plausible ones, none of which makes the same drafter as another: outputs shifted by a layer, other blocks, masks,
    rope bases and flags."""
    drafter, config, variant = _variants(folder, with_own_head=with_own_head)
    keys, model, seen = [*_keys(config)], ModelFolder(target), [None, drafter]
    bases = [1e4, *(value for path, value in [*_keys(model.config), *keys] if path[-1] == _BASE)]
    outputs = [*drafter.outputs(model.shape)] if drafter.stated_outputs is None else None
    left_out = [(_BASE, getattr(drafter.form, "rope_base", None)), (_OUTPUTS[0], outputs)]
    left_out += [(name, flag) for name in _FLAGS for flag in (True, False)]
    stated = {path[-1] for path, _ in keys}
    tried = [(path, value, value) for path, value in keys if path[-1] in _TRIED or isinstance(value, bool)]
    tried += [((name,), value, "left out") for name, value in left_out if value is not None and name not in stated]
    for path, value, read in tried:
        for other in _others(path, value, bases):
            found, changed = variant(path, other)
            # The rest of an MTP head's config is its target's.
            own = path[-1] == _BASE or not isinstance(drafter.form, MtpForm)
            if own and found is not None and found not in seen and not found.misfit(model.shape):
                seen.append(found)
                yield Reading(".".join(map(str, path)), read, other, changed)


_Variant: TypeAlias = Callable[[_Path, object], tuple[Drafter | None, dict[str, Any]]]


def _variants(folder: Path, *, with_own_head: bool) -> tuple[Drafter, dict[str, Any], _Variant]:
    """The drafter, its config, and what both are with another value; None: it is refused."""
    drafter, config = read_drafter(folder, with_own_head=with_own_head), ModelFolder(folder).config
    assert drafter is not None, "the folder holds no drafter"
    checkpoint = DrafterCheckpoint.read(folder, drafter.name, config)

    def variant(path: _Path, value: object) -> tuple[Drafter | None, dict[str, Any]]:
        place = changed = json.loads(json.dumps(config))
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        try:
            return described(checkpoint._replace(config=changed), with_own_head=with_own_head), changed
        except InputError:
            return None, changed

    return drafter, config, variant


def _keys(value: object, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Every value but null with its place."""
    inside = dict(enumerate(value)) if is_list(value) and any(map(is_object, value)) else value
    if is_object(inside) and inside:
        for name, each in inside.items():
            yield from _keys(each, (*path, name))
    elif value is not None:
        yield path, value


def _others(path: _Path, value: Any, bases: Iterable[float]) -> Iterable[Any]:
    """Values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return (path[-1] == _BASE and bases) or [value - 1, value + 1, value // 2, value * 2]
    if is_list(value) and all(type(each) is int for each in value):
        return [[each + by for each in value] for by in (1, -1)]
    return ["?", ["?"]]


def _difference(drafter: Drafter, changed: Drafter) -> str:
    """The fields that the two have in another way, with the values of the first one."""
    for mine, other in ((drafter.form, changed.form), (drafter, changed)):
        differing = {name: value for name, value in asdict(mine).items() if value != getattr(other, name, None)}
        if differing.keys() - {"config", "form"}:
            return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in differing.items() if name != "form")
    return "left to the target's architecture"
