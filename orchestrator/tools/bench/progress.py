"""Who computes and how far the bench is, as a progress bar on stderr."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class BenchProgress:
    """Context of a bench of so many generations."""

    def __init__(self, generations: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        # Redrawn rarely: the bar must not compute while others are measured.
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._progress.add_task("Starting", total=generations)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def count(self, generations: int) -> None:
        """There will be so many after all."""
        self._progress.update(self._task, total=generations)

    def starting(self, contender: str) -> None:
        self._progress.update(self._task, description=f"Starting {contender}")

    def took(self, contender: str) -> None:
        """A generation is done."""
        self._progress.update(self._task, description=contender, advance=1)
