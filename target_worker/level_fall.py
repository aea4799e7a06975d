"""A target that goes on at a lower level after a forward failed: the proof at the start was wrong about its level."""

from collections.abc import Callable, Iterable, Iterator

from protocol.errors import PipelineError
from protocol.messages.worker import Hello, ToWorker
from protocol.worker.failed_calls import passes
from protocol.worker.interface import WorkerReply
from target_worker.worker import TargetWorker


class FallingTarget:
    """Behaves as `worker`. Where a call of it fails, the model falls to the next lower level, and every sequence begins
    again. At the lowest level the error is raised."""

    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker

    def hello(self) -> Hello:
        return self._worker.hello()

    @property
    def has_work(self) -> bool:
        return self._worker.has_work

    def handle(self, message: ToWorker) -> Iterator[WorkerReply]:
        return self._answered(lambda: self._worker.handle(message))

    def work(self) -> Iterator[WorkerReply]:
        return self._answered(self._worker.work)

    def run_short(self) -> Iterable[WorkerReply]:
        return self._worker.run_short()

    def run_interrupted(self) -> Iterable[WorkerReply]:
        return self._worker.run_interrupted()

    def _answered(self, call: Callable[[], Iterable[WorkerReply]]) -> Iterator[WorkerReply]:
        try:
            yield from call()
        except PipelineError:
            raise
        except Exception as error:  # the border to model code of mlx-lm, which may raise anything
            reason = f"{type(error).__name__}: {error}"
            if passes(error) or not self._worker.lower(reason):
                raise
        else:
            return
        # Behind the handler, since an exception holds what the failed call held.
        yield from self._worker.begin_all_again(reason)
