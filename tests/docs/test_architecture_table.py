"""The table of architectures in the documentation is that of the installed mlx-lm."""

import pytest

from tests.support.models.table import DOCUMENT, written


@pytest.mark.slow
def test_the_table_of_architectures_is_that_of_now():
    document = DOCUMENT.read_text()

    assert written(document) == document, "run python -m tests.support.models.table"
