"""Laws of the lint: a converted graph passes, and each violation of the Neural Engine's rules is found."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_worker.coreml.program_file import FunctionFile, Operation, ProgramFile, TensorType
from draft_worker.coreml.toolchain import toolchain
from tests.support import coreml_lint as rules
from tests.support.coreml_lint import lint
from tests.support.models.coreml_programs import numbers, saved
from tests.support.models.coreml_runs import convert, tiny

MB: Any = toolchain().operations
WEIGHTS = numbers((8, 8, 1, 1)).astype(np.float16)


def errors(file: ProgramFile) -> set[str]:
    return {finding.rule for finding in lint(file) if finding.severity == "error"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights", ["int8", "4bit"])
def test_a_graph_with_compressed_weights_has_no_errors(weights: str, tmp_path: Path):
    assert not errors(convert(tiny("qwen3"), tmp_path / "model", widths=(1, 8), weights=weights).file)


def summed(x: Any) -> Any:
    weight = np.zeros((16_385, 8, 1, 1), np.float16)
    return MB.reduce_sum(x=MB.conv(x=x, weight=weight, pad_type="valid"), axes=[1])


PLAIN = (1, 8, 1, 32)
FOUND: dict[str, tuple[tuple[int, ...], Any, str, str]] = {
    "gather": (
        PLAIN,
        lambda x: MB.gather(x=x, indices=np.array([1, 0], np.int32), axis=1),
        "error operation",
        "gather",
    ),
    "topk": (PLAIN, lambda x: MB.topk(x=x, k=2, axis=1)[0], "error operation", "topk"),
    "cast": (PLAIN, lambda x: MB.cast(x=MB.cast(x=x, dtype="fp32"), dtype="fp16"), "error operation", "cast"),
    "erf": (PLAIN, lambda x: MB.erf(x=x), "error operation", "not known to run"),
    "long": ((1, 16_385, 1, 32), lambda x: MB.tanh(x=x), "error axis length", ""),
    "fp32": (PLAIN, lambda x: MB.tanh(x=x), "error element type", ""),
    "channels": (PLAIN, summed, "error channels", ""),
    "infinite": (PLAIN, lambda x: MB.add(x=x, y=np.float16(-np.inf)), "error large number", ""),
    "largest": (PLAIN, lambda x: MB.add(x=x, y=np.float16(-65_504.0)), "error large number", ""),
    "small": (PLAIN, lambda x: MB.add(x=x, y=np.float16(1e-6)), "warning small number", ""),
    "padded": ((8, 16_000, 1, 1), lambda x: MB.tanh(x=x), "warning alignment", "from 256000 to 8192000 bytes"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", FOUND)
def test_a_violation_is_found_by_its_rule_and_words(case: str, tmp_path: Path):
    shape, build, rule, words = FOUND[case]
    found = lint(saved(tmp_path, {"x": shape}, build, kind="fp32" if case == "fp32" else "fp16"))
    mine = [finding for finding in found if f"{finding.severity} {finding.rule}" == rule]

    assert any(words in finding.where + finding.reason for finding in mine)
    assert case not in ("infinite", "largest", "small", "padded") or mine == found


def test_scales_of_blocks_within_a_channel_are_found(tmp_path: Path):
    def build(blocks: int) -> Any:
        data, scale = np.ones((8, 8, 1, 1), np.int8), np.full((8, blocks, 1, 1), 0.5, np.float16)
        weight = {"data": data, "scale": scale}
        return lambda x: MB.conv(x=x, weight=MB.constexpr_blockwise_shift_scale(**weight), pad_type="valid")

    assert not errors(saved(tmp_path / "one", {"x": (1, 8, 1, 32)}, build(1)))
    assert errors(saved(tmp_path / "two", {"x": (1, 8, 1, 32)}, build(2))) == {"weight form"}


def test_shapes_that_are_not_fixed_and_too_many_axes_are_found():
    function = FunctionFile(
        name="main",
        inputs={"x": TensorType((1, -1, 1, 32), "FLOAT16")},
        outputs=("y",),
        operations=(Operation("tanh", {"x": ("x",)}, ("y",)),),
        constants={},
        types={"x": TensorType((1, -1, 1, 32), "FLOAT16"), "y": TensorType((1, 1, 1, 1, 1, 32), "FLOAT16")},
    )

    assert [found.rule for found in rules.tensors(function)] == ["static shape", "axes"]


def test_large_weights_are_a_warning(tmp_path: Path):
    file = saved(tmp_path, {"x": (1, 8, 1, 32)}, lambda x: MB.conv(x=x, weight=WEIGHTS, pad_type="valid"))
    file.weights_size = (1 << 30) + 1

    assert [found.rule for found in lint(file)] == ["package size"]


def test_errors_come_first(tmp_path: Path):
    file = saved(tmp_path, {"x": (1, 8, 1, 32)}, lambda x: MB.erf(x=MB.add(x=x, y=np.float16(1e-6))))

    assert [finding.severity for finding in lint(file)] == ["error", "warning"]
