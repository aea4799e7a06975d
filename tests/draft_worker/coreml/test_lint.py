"""Laws of the lint: a converted graph passes, and each violation of the Neural Engine's rules is found."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from draft_worker.coreml.conversion import lint as rules
from draft_worker.coreml.conversion.lint import lint
from draft_worker.coreml.program_file import FunctionFile, Operation, ProgramFile, TensorType
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.coreml import LintFinding
from tests.support.models.coreml_programs import numbers, saved
from tests.support.models.coreml_runs import convert, tiny

MB: Any = toolchain().operations
WEIGHTS = numbers((8, 8, 1, 1)).astype(np.float16)


def errors(file: ProgramFile) -> set[str]:
    return {finding.rule for finding in lint(file) if finding.severity == "error"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights", ["fp16", "int8", "4bit"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_converted_graph_has_no_errors(architecture: str, weights: str, tmp_path: Path):
    file = convert(tiny(architecture), tmp_path / "model", widths=(1, 8), weights=weights).file

    assert not errors(file)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: MB.gather(x=x, indices=np.array([1, 0], np.int32), axis=1), "gather"),
        (lambda x: MB.topk(x=x, k=2, axis=1)[0], "topk"),
        (lambda x: MB.cast(x=MB.cast(x=x, dtype="fp32"), dtype="fp16"), "cast"),
        (lambda x: MB.erf(x=x), "not known to run"),
    ],
)
def test_an_operation_that_leaves_the_neural_engine_is_found(build: Any, words: str, tmp_path: Path):
    found = [finding for finding in lint(saved(tmp_path, {"x": (1, 8, 1, 32)}, build)) if finding.rule == "operation"]

    assert found
    assert found[0].severity == "error"
    assert any(words in finding.where + finding.reason for finding in found)


VIOLATIONS: dict[str, tuple[tuple[int, ...], Any, str]] = {
    "axis length": ((1, 16_385, 1, 32), lambda x: MB.tanh(x=x), "fp16"),
    "element type": ((1, 8, 1, 32), lambda x: MB.tanh(x=x), "fp32"),
    "channels": (
        (1, 8, 1, 32),
        lambda x: MB.reduce_sum(
            x=MB.conv(x=x, weight=np.zeros((16_385, 8, 1, 1), np.float16), pad_type="valid"), axes=[1]
        ),
        "fp16",
    ),
}


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_a_violation_is_found_by_its_rule(rule: str, tmp_path: Path):
    shape, build, kind = VIOLATIONS[rule]

    assert rule in errors(saved(tmp_path, {"x": shape}, build, kind=kind))


def test_scales_of_blocks_within_a_channel_are_found(tmp_path: Path):
    def build(blocks: int) -> Any:
        data, scale = np.ones((8, 8, 1, 1), np.int8), np.full((8, blocks, 1, 1), 0.5, np.float16)
        weight = {"data": data, "scale": scale}
        return lambda x: MB.conv(x=x, weight=MB.constexpr_blockwise_shift_scale(**weight), pad_type="valid")

    assert not errors(saved(tmp_path / "one", {"x": (1, 8, 1, 32)}, build(1)))
    assert errors(saved(tmp_path / "two", {"x": (1, 8, 1, 32)}, build(2))) == {"weight form"}


@pytest.mark.parametrize("number", [-np.inf, -65_504.0])
def test_a_number_that_breaks_masks_is_found(number: float, tmp_path: Path):
    assert errors(saved(tmp_path, {"x": (1, 8, 1, 32)}, lambda x: MB.add(x=x, y=np.float16(number)))) == {
        "large number"
    }


def test_a_number_that_may_become_zero_is_a_warning(tmp_path: Path):
    found = lint(saved(tmp_path, {"x": (1, 8, 1, 32)}, lambda x: MB.add(x=x, y=np.float16(1e-6))))

    assert [(finding.severity, finding.rule) for finding in found] == [("warning", "small number")]


def test_wasteful_padding_is_a_warning(tmp_path: Path):
    found = lint(saved(tmp_path, {"x": (8, 16_000, 1, 1)}, lambda x: MB.tanh(x=x)))

    assert {(finding.severity, finding.rule) for finding in found} == {("warning", "alignment")}
    assert "padded from 256000 to 8192000 bytes" in found[0].reason


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


def test_errors_come_first_and_findings_travel_as_json(tmp_path: Path):
    file = saved(tmp_path, {"x": (1, 8, 1, 32)}, lambda x: MB.erf(x=MB.add(x=x, y=np.float16(1e-6))))
    found = lint(file)

    assert [finding.severity for finding in found] == ["error", "warning"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[LintFinding]) == found
