"""What the owner of a pipeline may ask of it: a list of workers, a join line, to revoke a machine."""

from pathlib import Path
from typing import Any, TypeVar

import zmq

from orchestrator.api.client import STAMP
from orchestrator.runtime.session import Session, running_sessions
from protocol.errors import InputError, PipelineError, blaming
from protocol.messages.client import PipelineState, Refused
from protocol.messages.remote import FromOwner, Invitation, Invite, ListWorkers, Revoke, ToOwner, WorkerEntry, Workers
from protocol.transport import Link

_ANSWER_SECONDS = 5.0

M = TypeVar("M")


class Owner:
    """Speaks to one pipeline by a socket in its private folder, which only its own user can reach."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def workers(self) -> tuple[WorkerEntry, ...]:
        """Every worker that is up, and every known machine, also without a worker."""
        return self._ask(ListWorkers(), Workers).workers

    def invite(self) -> Invitation:
        """A join line, good for one machine and ten minutes."""
        return self._ask(Invite(), Invitation)

    def revoke(self, name: str) -> tuple[WorkerEntry, ...]:
        """Disconnect a machine for good; the workers that are left. Raises InputError for an unknown name."""
        return self._ask(Revoke(name), Workers).workers

    def _ask(self, question: FromOwner, expected: type[M]) -> M:
        link = Link(zmq.Context[Any].instance(), self._session.owner_address, STAMP, ToOwner)
        try:
            link.send(question)
            for answer in link.receive(_ANSWER_SECONDS):
                if isinstance(answer, Refused):
                    raise blaming(answer.blame, answer.text)
                if isinstance(answer, expected):
                    return answer
        finally:
            link.close()
        raise PipelineError("The pipeline does not answer: see whether it still runs.")


def attach_command(invitation: Invitation, state: PipelineState) -> str:
    """What another machine runs to join the pipeline: it lends the target if there is none yet, else a draft."""
    return f"launch-pipeline attach {'draft' if state.context else 'target'} {invitation.line}"


def listening_pipelines() -> dict[int, Session]:
    """Running pipelines of this user that accept remote workers, by the id of the process that owns them."""
    found = {folder: folder / "owner" for folder in running_sessions()}
    return {_process(folder): Session(folder) for folder, socket in found.items() if socket.is_socket()}


def the_pipeline(process: int | None) -> Session:
    """The session of the pipeline that listens; `process` chooses among several. Raises InputError if none is clear."""
    found = listening_pipelines()
    if not found:
        raise InputError(
            "No pipeline here accepts workers of other machines: start one with "
            "`launch-pipeline serve-workers --listen HOST:PORT`."
        )
    if process is None and len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)))
        raise InputError(f"Several pipelines listen here: choose one by its process id ({numbers}).")
    if process is not None and process not in found:
        numbers = ", ".join(map(str, sorted(found)))
        raise InputError(f"No pipeline that listens has the process id {process}: choose from {numbers}.")
    return found[process] if process is not None else next(iter(found.values()))


def _process(folder: Path) -> int:
    return int(folder.name.split("-")[1])
