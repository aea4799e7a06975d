"""The imitated Mac of a test session."""

from collections.abc import Iterator

import pytest

from tests.support.mac_kernel.imitation import Mac, imitated_mac, missing


@pytest.fixture(scope="session")
def mac() -> Iterator[Mac]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with imitated_mac() as imitated:
        yield imitated
