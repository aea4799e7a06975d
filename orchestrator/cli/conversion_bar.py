"""A bar on standard error that appears with the first report of a download or a conversion."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from protocol.contracts.coreml import Progress


class ConversionBar:
    """`with ConversionBar(quiet) as bar: ...` and `bar(progress)` as often as there is something to report."""

    def __init__(self, quiet: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._bar = Bar(*columns, console=Console(stderr=True, quiet=quiet), transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("")
        self._bar.update(self._task, description=progress.stage, completed=progress.done, total=progress.total)
