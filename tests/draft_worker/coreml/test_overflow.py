"""What overflows fp16 in one row of a Core ML draft harms that row alone."""

from collections.abc import Mapping

import numpy as np
import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.package import Array
from draft_worker.coreml.runtime.calls import PackageForward
from draft_worker.coreml.runtime.memory import CachePool, HostMemory
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from protocol.inference.slots import PREFIX
from tests.support.models.coreml_runs import convert, tiny


class Overflowing(ExecutorRuntime):
    """Its first call overflows, as fp16 sums of a device do."""

    value = np.inf

    def predict(self, function: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = super().predict(function, inputs)
        if np.isfinite(self.value):
            return outputs
        outputs["kv_new"] = np.full_like(outputs["kv_new"], self.value)
        self.value = 0.0
        return outputs


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return convert(tiny(), tmp_path_factory.mktemp("model") / "converted")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_row_that_overflowed_blinds_no_token_that_does_not_see_it(value: float, converted: Converted):
    runtime = Overflowing(converted)
    runtime.value = value
    package = converted.package
    memory = HostMemory(CachePool(package))
    forward = PackageForward(package, converted.tables, runtime)
    forward.run([memory.rows(memory.slots.add([5], [PREFIX]))])
    memory.slots.keep([], ())

    (number,) = memory.slots.add([7], [PREFIX])
    assert np.isfinite(forward.evaluate([memory.rows([number])])[:, : package.head_rows]).all()
