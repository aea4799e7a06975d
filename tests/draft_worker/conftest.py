"""One drafter of each kind for all tests of a process. A test that changes one copies it."""

from pathlib import Path

import pytest

from tests.support.models.trained_drafters import BLOCK_KINDS, write_block_folder, write_target


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A block drafter of each kind, and "target"."""
    root = tmp_path_factory.mktemp("drafters")
    target = write_target(root / "target")
    for kind in BLOCK_KINDS:
        write_block_folder(root / kind, kind, target)
    return {name: root / name for name in (*BLOCK_KINDS, "target")}
