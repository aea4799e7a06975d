"""One tiny target and its states for all tests of a process."""

from pathlib import Path

import pytest

from draft_worker.training.target import Target
from tests.support.models.training_work import write_target, write_work


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_target(tmp_path_factory.mktemp("training") / "target"))


@pytest.fixture(scope="session")
def work(target: Target) -> Path:
    return write_work(target.folder.parent / "work", target)
