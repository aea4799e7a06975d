"""What a saved model's specification says of inputs, outputs and states. Knows no layout of language models.

The messages are those of coremltools' Model.proto and FeatureTypes.proto.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from draft_worker.coreml.program_file import FunctionFile, ProgramFile
from draft_worker.coreml.toolchain import messages

ANY_SIZE = 1 << 30
"""The most that a dimension without a bound may be."""


class Feature(NamedTuple):
    """The type of an input, output or state."""

    kind: str
    """Core ML's name of the element type, for example FLOAT16; "" for what is no array."""
    sizes: tuple[tuple[int, int], ...]
    """Least and most of each dimension. Empty if the specification states none, as for outputs that vary."""
    choices: tuple[tuple[int, ...], ...] = ()
    """The only shapes that are allowed; empty: all within `sizes`."""


@dataclass(frozen=True)
class Description:
    """One function of a model, as its specification describes it."""

    inputs: Mapping[str, Feature]
    outputs: Mapping[str, Feature]
    states: Mapping[str, Feature]
    metadata: Mapping[str, str]
    function: str
    """Name in the program."""


def description(file: ProgramFile) -> Description:
    """The function that Core ML calls without a name. Raises InputError if the specification is inconsistent."""
    stated = file.description
    name = file.default or ("main" if "main" in file.functions else next(iter(file.functions)))
    if name not in file.functions:
        raise file.damage(f"it lacks its function {name}")
    whole = next((each for each in stated.functions if each.name == name), stated)
    program = file.functions[name]
    return Description(
        inputs=dict(_features(whole.input)),
        outputs={name: _or_typed(name, feature, program) for name, feature in _features(whole.output)},
        states=dict(_features(whole.state)),
        metadata=file.metadata,
        function=name,
    )


def _features(stated: Iterable[Any]) -> Iterator[tuple[str, Feature]]:
    for feature in stated:
        kind = feature.type.WhichOneof("Type")
        if kind == "multiArrayType":
            yield feature.name, _array(feature.type.multiArrayType)
        elif kind == "stateType":
            yield feature.name, _array(feature.type.stateType.arrayType)
        else:
            yield feature.name, Feature("", ())


def _array(array: Any) -> Feature:
    kind = messages().array_type.get(array.dataType, "")
    match array.WhichOneof("ShapeFlexibility"):
        case "shapeRange":
            ranges = array.shapeRange.sizeRanges
            return Feature(kind, tuple((int(each.lowerBound), _most(each.upperBound)) for each in ranges))
        case "enumeratedShapes":
            shapes = tuple(tuple(int(size) for size in each.shape) for each in array.enumeratedShapes.shapes)
            same = len({len(shape) for shape in shapes}) == 1
            sizes = tuple((min(each), max(each)) for each in zip(*shapes, strict=True)) if same else ()
            return Feature(kind, sizes, shapes)
        case _:
            return Feature(kind, tuple((int(size), int(size)) for size in array.shape))


def _most(bound: int) -> int:
    return ANY_SIZE if bound < 0 else min(int(bound), ANY_SIZE)


def _or_typed(name: str, feature: Feature, function: FunctionFile) -> Feature:
    """`feature`, with the sizes of the program's value where the specification states none."""
    if feature.sizes or name not in function.types:
        return feature
    shape = function.types[name].shape
    return feature._replace(sizes=tuple((1, ANY_SIZE) if size < 0 else (size, size) for size in shape))
