"""Laws of where draft and target begin to compute."""

import pytest

from orchestrator.core.options import Options
from orchestrator.machine import hardware
from orchestrator.machine.placement import begins_shared, worker_cores


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch):
    """A machine whose models compute on so many cores; 0 for one with a GPU."""

    def has(cores: int) -> None:
        monkeypatch.setattr(hardware, "computes_on_processor", lambda: cores > 0)
        monkeypatch.setattr(hardware, "usable_cores", lambda: tuple(range(cores)))

    return has


@pytest.mark.parametrize(("cores", "shared"), [(1, True), (2, True), (3, True), (4, False), (16, False)])
def test_few_cores_are_shared(processor, cores: int, shared: bool):
    processor(cores)

    assert begins_shared(Options(), own_device=False) is shared


def test_one_gpu_is_shared_and_a_device_of_its_own_is_not(processor):
    processor(0)

    assert begins_shared(Options(), own_device=False)
    assert not begins_shared(Options(), own_device=True)


def test_the_user_decides(processor):
    processor(2)

    assert not begins_shared(Options(placement="apart"), own_device=False)
    processor(0)
    assert begins_shared(Options(placement="shared"), own_device=True)


@pytest.mark.parametrize(("strategy", "shared"), [("ar", True), ("sd", True), ("ssd", False)])
def test_a_strategy_that_never_drafts_beside_the_target_shares(processor, strategy: str, shared: bool):
    for cores in (0, 2, 16):
        processor(cores)

        assert begins_shared(Options(strategy=strategy), own_device=False) is shared


def test_cores_are_all_or_divided(processor):
    processor(4)

    assert worker_cores(shared=True) == {"target": (0, 1, 2, 3), "draft": (0, 1, 2, 3)}
    assert worker_cores(shared=False) == {"target": (0, 1, 2), "draft": (3,)}
    processor(0)
    assert worker_cores(shared=True) == worker_cores(shared=False) == {}
