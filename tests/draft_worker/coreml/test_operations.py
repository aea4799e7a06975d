"""Laws of the executor: each operation computes the result of coremltools, in any package."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.coreml.runtime.operations import EXPANSIONS, OPERATIONS
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime, Precision
from draft_worker.coreml.toolchain import toolchain
from protocol.errors import InputError
from tests.support.models.coreml_programs import numbers, saved
from tests.support.models.coreml_runs import convert, tiny

MB: Any = toolchain().operations
LENGTHS = {"x": (1, 4, 2, 6), "y": (1, 4, 2, 6)}

INFERRED: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "add": (LENGTHS, {}),
    "add over one axis": ({"x": (1, 4, 2, 6), "y": (1, 4, 1, 1)}, {}),
    "mul": (LENGTHS, {}),
    "softmax": ({"x": (1, 4, 2, 6)}, {"axis": -1}),
    "softmax over channels": ({"x": (1, 4, 2, 6)}, {"axis": 1}),
    "layer_norm": ({"x": (1, 8, 1, 3)}, {"axes": [1], "epsilon": 1e-3}),
    "layer_norm over two axes": ({"x": (1, 8, 2, 3)}, {"axes": [1, 2], "epsilon": 1e-5}),
    "matmul": ({"x": (1, 2, 3, 4), "y": (1, 2, 4, 5)}, {}),
    "matmul turned": ({"x": (1, 2, 4, 3), "y": (1, 2, 5, 4)}, {"transpose_x": True, "transpose_y": True}),
    "reshape": ({"x": (1, 4, 2, 6)}, {"shape": [1, 2, 12, 2]}),
    "transpose": ({"x": (1, 4, 2, 6)}, {"perm": [0, 2, 3, 1]}),
    "split": ({"x": (1, 4, 2, 6)}, {"num_splits": 3, "axis": 3}),
    "slice_by_size": ({"x": (4, 4, 2, 6)}, {"begin": [1, 0, 1, 2], "size": [2, 4, 1, 3]}),
    "reduce_sum": ({"x": (1, 4, 6)}, {"axes": [1], "keep_dims": True}),
    "real_div": (LENGTHS, {}),
    "maximum": (LENGTHS, {}),
    "minimum": (LENGTHS, {}),
    "tanh": ({"x": (1, 4, 2, 6)}, {}),
    "gelu": ({"x": (1, 4, 2, 6)}, {"mode": "TANH_APPROXIMATION"}),
    "identity": ({"x": (1, 4)}, {}),
}


def given(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: numbers(shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize("case", INFERRED)
def test_an_operation_is_what_coremltools_computes(case: str):
    """coremltools evaluates operations on constants."""
    shapes, settings = INFERRED[case]
    name, tensors = case.split()[0], given(shapes)
    with toolchain().program.Function({}):
        constants = {key: MB.const(val=value) for key, value in tensors.items()}
        inferred = getattr(MB, name)(**constants, **settings)
    expected = [part.val for part in inferred] if isinstance(inferred, (list, tuple)) else [inferred.val]

    got = OPERATIONS[name].bind(settings)(*(mx.array(value) for value in tensors.values()))

    got = got if isinstance(got, list) else [got]
    assert [value.shape for value in got] == [value.shape for value in expected]
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, expected, strict=True))


def test_operations_that_coremltools_computes_in_another_form():
    x, weight, bias = numbers((2, 3, 2, 5)), numbers((4, 3, 1, 1), seed=1), numbers((4,), seed=2)
    with toolchain().program.Function({}):
        joined = MB.concat(values=[MB.const(val=part) for part in (x, 2 * x, -x)], axis=2).val
        silu = x * MB.sigmoid(x=MB.const(val=x)).val
    weighted = np.einsum("oc,bchw->bohw", weight[:, :, 0, 0], x) + bias[None, :, None, None]

    for name, settings, arguments, expected in (
        ("concat", {"axis": 2}, (x, 2 * x, -x), joined),
        ("silu", {}, (x,), silu),
        ("conv", {"pad_type": "valid"}, (x, weight, bias), weighted),
    ):
        assert np.allclose(np.array(OPERATIONS[name].bind(settings)(*map(mx.array, arguments))), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gelu", {"mode": "EXACT"}),
        ("conv", {"groups": 2}),
        ("conv", {"pad_type": "same"}),
        ("conv", {"strides": [2, 2]}),
        ("layer_norm", {"axes": [1], "gamma": np.ones(4)}),
        ("concat", {"axis": 0, "interleave": True}),
        ("split", {"axis": 0, "split_sizes": [1, 3]}),
    ],
)
def test_an_unsupported_form_of_an_operation_is_refused(name: str, settings: dict[str, Any]):
    with pytest.raises(ValueError, match="only"):
        OPERATIONS[name].bind(settings)


def test_compressed_weights_are_expanded_as_coremltools_does():
    generator = np.random.default_rng(5)
    scaled = {
        "data": generator.integers(-128, 128, (6, 8)).astype(np.int8),
        "scale": generator.random((6, 1)).astype(np.float16),
    }
    palettes = {
        "indices": generator.integers(0, 16, (6, 8)).astype(toolchain().uint4),
        "lut": generator.random((6, 1, 16, 1)).astype(np.float16),
    }
    for name, settings in (("constexpr_blockwise_shift_scale", scaled), ("constexpr_lut_to_dense", palettes)):
        with toolchain().program.Function({}, opset_version=toolchain().coremltools.target.iOS18):
            expected = getattr(MB, name)(**settings).op.materialized_val_inference()

        assert np.array_equal(EXPANSIONS[name](settings), expected), name


@pytest.mark.parametrize("kind", ["FLOAT16", "INT8", "UINT4"])
def test_constants_are_read_as_they_were_written(kind: str, tmp_path: Path):
    # An odd count leaves half a byte unused; above ten numbers, a constant is in the weight file.
    values = np.random.default_rng(7).integers(0, 16, (5, 7, 1, 1))
    stored = values.astype({"FLOAT16": np.float16, "INT8": np.int8, "UINT4": toolchain().uint4}[kind])

    def build(x: Any) -> Any:
        scale = np.ones((5, 1, 1, 1), np.float16)
        weight = (
            MB.const(val=stored) if kind == "FLOAT16" else MB.constexpr_blockwise_shift_scale(data=stored, scale=scale)
        )
        return MB.conv(x=x, weight=weight, pad_type="valid")

    file = saved(tmp_path, {"x": (1, 7, 1, 1)}, build)
    held = [stored.value() for stored in file.functions["main"].constants.values() if stored.tensor.kind == kind]

    assert any(np.array_equal(np.asarray(value).reshape(-1), values.reshape(-1)) for value in held)


GROUPED = numbers((4, 2, 1, 1)).astype(np.float16)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: MB.erf(x=x), "the operation erf"),
        (lambda x: MB.conv(x=x, weight=GROUPED, groups=2, pad_type="valid"), "conv in a form"),
    ],
)
def test_what_can_not_be_executed_is_named(build: Any, words: str, tmp_path: Path):
    with pytest.raises(InputError, match=words):
        ExecutorRuntime(saved(tmp_path, {"x": (1, 4, 1, 8)}, build)).load("main")


def test_fp16_rounds_every_result(tmp_path: Path):
    file = saved(tmp_path, {"x": (1, 1)}, lambda x: MB.add(x=MB.add(x=x, y=np.float16(1)), y=np.float16(-1)))
    small = {"x": np.array([[2.0**-12]], np.float32)}

    results: list[tuple[Precision, float]] = [("fp16", 0.0), ("fp32", 2.0**-12)]
    for precision, expected in results:
        (result,) = ExecutorRuntime(file, precision).predict("main", small).values()
        assert result == np.float32(expected)


def test_equal_weights_are_held_once(tmp_path: Path):
    executor = ExecutorRuntime(convert(tiny(), tmp_path / "model", widths=(1, 4)).file)
    executor.load("width_1")
    before = mx.get_active_memory()
    executor.load("width_4")
    mx.synchronize()

    # Scalars and shapes belong to one function each.
    assert mx.get_active_memory() - before < 4096


def test_an_invalid_call_is_refused_with_the_reason(tmp_path: Path):
    converted = convert(tiny(), tmp_path / "model", widths=(1,))
    shapes = converted.package.functions["width_1"]
    data = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    for function, given, words in (
        ("width_32", data, "width_32"),
        ("width_1", data | {"x": np.zeros((1, 32, 1, 2))}, "must have shape"),
        ("width_1", {name: data[name] for name in data if name != "mask"}, "mask"),
    ):
        with pytest.raises(InputError, match=words):
            ExecutorRuntime(converted.file).predict(function, given)
