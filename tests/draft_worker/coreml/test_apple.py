"""Core ML's calls against the signatures of the installed library. The executor computes the results."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.apple import CoreMlRuntime, compiled
from draft_worker.coreml.runtime.runtimes import default_runtime, open_runtime
from draft_worker.engine_interface import Batch
from draft_worker.engines.coreml import CoreMlEngine
from protocol.messages.sampling import Sampling
from protocol.paths import cache_folder
from tests.support.models.core_ml_library import Library
from tests.support.models.coreml_runs import convert, tiny
from tests.support.models.tiny_models import VOCABULARY


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def pair(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    converted = convert(tiny(), home / "model")
    return converted, Library(monkeypatch, converted)


@pytest.mark.sampled(1)
def test_core_ml_is_called_by_the_library_s_signatures_and_gives_the_executor_s_outputs(
    pair: tuple[Converted, Library],
):
    converted, library = pair
    sampling = Sampling(temperature=0.5, seed=2)
    engines = [CoreMlEngine(converted, runtime) for runtime in (CoreMlRuntime(converted), library.executor)]
    found = []
    for engine in engines:
        sequence = engine.open(sampling, VOCABULARY)
        sequence.prefill(range(60))
        for _ in range(8):
            found.append(sequence.evaluate(Batch((), [1, 2, 3, 4, 5], [-1] * 5, 4)))
            sequence.keep([sequence.next_row - 1], ())

    assert found[:8] == found[8:]
    assert {made["function_name"] for made in library.made} == {"width_1", "width_4", "width_16"}
    assert {made["compute_units"].name for made in library.made} == {"CPU_AND_NE"}


@pytest.mark.thorough
def test_a_model_is_compiled_once_to_a_path_of_its_conversion(pair: tuple[Converted, Library], tmp_path: Path):
    converted, library = pair
    CoreMlRuntime(converted)
    CoreMlRuntime(converted, "CPU_ONLY")

    assert library.compiling.call_count == 1
    (place,) = {made["path"] for made in library.made}
    assert Path(place).parent == cache_folder() / "compiled"
    assert [entry.name for entry in Path(place).parent.iterdir()] == [Path(place).name]
    assert compiled(convert(tiny(seed=1), tmp_path / "other").folder) != Path(place)


def test_the_runtime_is_core_ml_only_on_a_mac(home: Path):
    converted = convert(tiny(), home / "model")

    assert default_runtime() == ("coreml" if sys.platform == "darwin" else "executor")
    assert "no Neural Engine" in open_runtime(converted, "executor").device


@pytest.mark.sampled(1)
def test_every_array_that_core_ml_was_given_lives_on(pair: tuple[Converted, Library]):
    """Core ML releases the inputs of a call later, on a queue of its own: no array may be freed there."""
    converted, library = pair
    given: dict[int, weakref.ref[np.ndarray]] = {}
    library._predict = lambda function, data: (
        given.update({id(value): weakref.ref(value) for value in data.values()}),
        library.executor.predict(function, data),
    )[1]
    engine, counts = CoreMlEngine(converted, CoreMlRuntime(converted)), []
    for _ in range(4):
        sequence = engine.open(Sampling(), VOCABULARY)
        sequence.prefill(range(60))
        sequence.evaluate(Batch((), [1, 2, 3], [-1] * 3, 4))
        sequence.close()
        del sequence
        counts.append(len(given))
    del engine
    gc.collect()

    assert [reference for reference in given.values() if reference() is None] == []
    assert {value.dtype for reference in given.values() if (value := reference()) is not None} == {np.dtype("float32")}
    assert len(set(counts)) == 1, "a sequence that follows another one needs no new array"
    for reference in given.values():
        # Changes of the count that two threads make at once can be lost.
        assert sys.getrefcount(reference()) > 10_000
