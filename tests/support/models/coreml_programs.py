"""Core ML packages for tests: small programs, saved and read again, and the demo draft, converted once a session."""

import atexit
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import numpy as np

from draft_worker.coreml.conversion.build import convert
from draft_worker.coreml.program_file import ProgramFile
from draft_worker.coreml.toolchain import toolchain
from protocol.contracts.coreml import Choices, WeightKind
from tests.support.paths import DEMO_DRAFT

DEMO_CONTEXT = 512


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def saved(
    folder: Path, inputs: dict[str, tuple[int, ...]], build: Callable[..., Any], kind: str = "fp16"
) -> ProgramFile:
    """A program of one function, `main`, that applies `build` to its inputs."""
    tools = toolchain()
    target = tools.coremltools.target.iOS18
    dtype = getattr(tools.types, kind)
    placeholders = {name: tools.operations.placeholder(shape=shape, dtype=dtype) for name, shape in inputs.items()}
    function = tools.program.Function(placeholders, opset_version=target)
    with function:
        built = build(**function.inputs)
        function.set_outputs(list(built) if isinstance(built, (list, tuple)) else [built])
    program = tools.program.Program()
    program.add_function("main", function)
    with redirect_stderr(StringIO()):
        model = tools.coremltools.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=target,
            compute_precision=tools.coremltools.precision.FLOAT32,
            pass_pipeline=tools.coremltools.PassPipeline.EMPTY,
            skip_model_load=True,
        )
    model.save(str(folder / "program.mlpackage"))
    return ProgramFile(folder / "program.mlpackage")


@cache
def converted_demo(weights: WeightKind = "fp16") -> Path:
    """Its folder; with few slots, since the executor's time grows with them."""
    room = mkdtemp(prefix="converted-demo-")
    atexit.register(rmtree, room, ignore_errors=True)
    folder = Path(room) / weights
    convert(DEMO_DRAFT, folder, Choices(context=DEMO_CONTEXT, weights=weights))
    return folder
