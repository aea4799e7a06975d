"""Core AI runs our packages. Its own interpreter, in the package coreai-core, computes the results on Linux."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.examine import answers, calls, compare
from draft_worker.coreml.runtime.backends import core_ai
from draft_worker.coreml.runtime.backends.core_ai_graph import TRANSLATIONS, authoring
from draft_worker.coreml.runtime.backends.operations import EXPANSIONS
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime, open_runtime
from draft_worker.engine import Batch
from draft_worker.engines.coreai import CoreAiEngine
from protocol.errors import InputError
from protocol.messages.sampling import Sampling
from protocol.paths import cache_folder
from tests.support.models.coreml_runs import convert, tiny
from tests.support.models.tiny_models import VOCABULARY

needs_core_ai = pytest.mark.skipif(find_spec("coreai") is None, reason="coreai-core has no wheel for this system")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def converted(folder: Path, architecture: str = "llama", widths: tuple[int, ...] = (1, 4), **choices: Any) -> Converted:
    return convert(tiny(architecture), folder / "model", widths=widths, **choices)


@pytest.mark.sampled(1)
@needs_core_ai
@pytest.mark.parametrize(
    ("architecture", "weights"), [("llama", "fp16"), ("qwen2", "fp16"), ("qwen3", "fp16"), ("llama", "4bit")]
)
def test_core_ai_gives_the_executor_s_logits(home: Path, architecture: str, weights: str):
    model = converted(home, architecture, weights=weights)
    found = list(compare(*(answers(calls(model, runtime)) for runtime in (runtime_of(model), ExecutorRuntime(model)))))

    assert [report.width for report in found] == [1, 4]
    assert all(report.deviation is not None and report.deviation < 0.01 for report in found)


def runtime_of(model: Converted) -> core_ai.CoreAiRuntime:
    runtime = open_runtime(model, "coreai")
    assert isinstance(runtime, core_ai.CoreAiRuntime)
    return runtime


@needs_core_ai
def test_the_engine_drafts_trees_whose_kv_the_host_holds(home: Path):
    model = converted(home)
    engine = CoreAiEngine(model, runtime_of(model))
    sequence = engine.open(Sampling(), VOCABULARY)
    sequence.prefill(range(6))
    grown = sequence.evaluate(Batch((), [7, 8], [-1, -1], 4))
    sequence.keep([7], ())
    continued = sequence.evaluate(Batch((), [9], [-1], 4))
    plain = engine.open(Sampling(), VOCABULARY)
    plain.prefill([*range(6), 8])

    assert [len(candidates.tokens) for candidates in grown] == [4, 4]
    assert continued[0].tokens == plain.evaluate(Batch((), [9], [-1], 4))[0].tokens
    assert engine.name == "coreai"
    assert "Core AI" in engine.device


@needs_core_ai
def test_the_program_is_written_once_and_is_complete_or_absent(home: Path):
    model = converted(home)
    first = core_ai.written(model)
    stamp = (first / "main.mlirb").stat().st_mtime_ns

    assert core_ai.written(model) == first
    assert (first / "main.mlirb").stat().st_mtime_ns == stamp
    assert [entry.name for entry in (cache_folder() / "compiled").iterdir()] == [first.name]


@pytest.mark.thorough
@needs_core_ai
def test_the_functions_share_their_weights(home: Path):
    one = core_ai.written(converted(home / "one", widths=(1,)))
    two = core_ai.written(converted(home / "two", widths=(1, 4)))

    weights = 2 * sum(array.size for array in tiny_arrays())
    assert (two / "main.mlirb").stat().st_size - (one / "main.mlirb").stat().st_size < weights / 2


def tiny_arrays() -> list[Any]:
    from mlx.utils import tree_flatten

    return [array for _, array in tree_flatten(tiny().parameters())]


@needs_core_ai
def test_a_call_keeps_no_buffer_of_the_caller():
    runtime = pytest.importorskip("coreai.runtime")
    data = np.zeros((2, 2), np.float16)
    copied = runtime.NDArray(data)
    data[:] = 1

    assert not copied.numpy().any()


@needs_core_ai
def test_a_cache_that_is_a_state_is_refused_with_the_way_out(home: Path):
    with pytest.raises(InputError, match="--kv io"):
        open_runtime(converted(home, cache="state"), "coreai")


@needs_core_ai
def test_an_operation_without_a_translation_is_refused_by_name(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(TRANSLATIONS, "silu")

    with pytest.raises(InputError, match="silu"):
        open_runtime(converted(home), "coreai")


def test_every_operation_that_convert_writes_has_a_translation(home: Path):
    file = converted(home, "qwen3", weights="int8").file

    assert {operation.type for operation in file.functions["width_4"].operations} <= {*TRANSLATIONS, *EXPANSIONS}


@needs_core_ai
def test_the_neural_engine_is_preferred_by_the_library_s_own_signatures():
    """ComputeUnitKind exists on macOS alone; its signature is the stub's, which both wheels hold."""
    library = pytest.importorskip("coreai.runtime")
    options = create_autospec(library.SpecializationOptions)
    options.is_supported.return_value = True
    kinds = Mock(spec=methods(Path(library.__file__).with_suffix(".pyi"), "ComputeUnitKind"))
    chosen = core_ai._neural_engine(Mock(SpecializationOptions=options, ComputeUnitKind=kinds))

    kinds.neural_engine.assert_called_once_with()
    options.from_preferred_compute_unit_kind.assert_called_once_with(kinds.neural_engine.return_value)
    assert chosen is options.from_preferred_compute_unit_kind.return_value
    assert core_ai._neural_engine(library) is None


def methods(stub: Path, name: str) -> list[str]:
    """The class methods without parameters that a stub file declares for a class."""
    classes = [
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return [node.name for node in classes[0].body if isinstance(node, ast.FunctionDef) and len(node.args.args) == 1]


def test_without_core_ai_a_sentence_names_the_package(home: Path, monkeypatch: pytest.MonkeyPatch):
    authoring.cache_clear()
    monkeypatch.setitem(sys.modules, "coreai.authoring", None)
    try:
        with pytest.raises(InputError, match="install coreai-core"):
            open_runtime(converted(home), "coreai")
    finally:
        authoring.cache_clear()
