"""A pipeline's private folder: sockets, logs, and the reason of a failure. Removed at the pipeline's end."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from protocol.errors import Blame, InputError, PipelineError, blame_of, blaming
from protocol.kv import segments
from protocol.paths import SESSIONS_VARIABLE, sessions_folder
from protocol.security.private_files import private_folder, read_private, write_private

_FAILURE = "failure"
_OFFER, _HEIR = "lasting", "heir"
_MLX_RING = "[ring]"
"""Lines of MLX that say only that another rank is gone, many at a time."""
_SHORTAGE = "ran out of memory"
_TRACEBACK_LINES = 100
_KEPT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_PREFIX = "lp-"


class Session:
    """One folder, mode 0700, named after the process that owns it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(cls) -> "Session":
        """A new folder for this process. Ends the pipelines that outlived their commands, and removes what dead ones
        left. Raises InputError if the home
        of all sessions is open to others."""
        end_kept()
        sweep()
        segments.sweep()
        while True:
            # Another session that ends removes an empty home, also between these two steps.
            with suppress(FileNotFoundError):
                home = private_folder(_own_home(sessions_folder()))
                return cls(Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=home)))

    @property
    def client_address(self) -> str:
        return f"ipc://{self.folder}/clients"

    @property
    def worker_address(self) -> str:
        return f"ipc://{self.folder}/workers"

    @property
    def owner_address(self) -> str:
        """Where the owner's commands reach a pipeline with remote workers."""
        return f"ipc://{self.folder}/owner"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def last_words(self, name: str, lines: int = 3) -> str:
        """The end of a process's log, on one line. A rank's lack of memory is told also if the other ranks' errors
        follow it."""
        with suppress(OSError):
            said = self.log(name).read_text(errors="replace").strip().splitlines()
            end = [line for line in said if not line.startswith(_MLX_RING)][-lines:]
            cause = [line for line in said[-_TRACEBACK_LINES:] if _SHORTAGE in line and line not in end][-1:]
            return " / ".join(cause + end)
        return ""

    def record_failure(self, error: PipelineError) -> None:
        with suppress(OSError):
            (self.folder / _FAILURE).write_bytes(msgspec.json.encode((blame_of(error), str(error))))

    def failure(self) -> PipelineError | None:
        """Why the orchestrator failed, if it recorded a reason."""
        with suppress(OSError):
            return blaming(*msgspec.json.decode((self.folder / _FAILURE).read_bytes(), type=tuple[Blame, str]))
        return None

    def offer(self, address: str) -> None:
        """Let other commands of this user find the pipeline, which does not end with a request."""
        write_private(self.folder / _OFFER, address.encode())

    @property
    def offered(self) -> str | None:
        """Where other commands may ask the pipeline; None if they may not, empty if it is asked to end."""
        with suppress(OSError, UnicodeDecodeError):
            address = read_private(self.folder / _OFFER)
            return None if address is None else address.decode()
        return None

    def restore(self, offered: str | None, heir: int | None = None) -> str | None:
        """Make again what a cleaner of temporary files took: the folder, and the files with the address `offered` and
        the process `heir`.

        Returns the address that is offered. Raises InputError if the folder can't be this user's alone.
        """
        # A full disk may have room later.
        with suppress(OSError):
            for folder in (_own_home(self.folder.parent), self.folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                private_folder(folder)
            if heir is not None and not (self.folder / _HEIR).exists():
                self.inherited_by(heir)
            if offered is not None and not (self.folder / _OFFER).exists():
                self.offer(offered)
        return self.offered

    def inherited_by(self, process: int) -> None:
        """The folder outlives its owner: from now on it is as old as `process`."""
        write_private(self.folder / _HEIR, str(process).encode())

    def remove(self) -> None:
        """Remove the folder, and what a killed orchestrator left in shared memory."""
        segments.sweep()
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            sessions_folder().rmdir()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of mode 0700 for this process. If the process is killed, the next start of a pipeline removes it."""
    session = Session.create()
    try:
        yield session.folder
    finally:
        session.remove()


def running_sessions() -> list[Path]:
    """Folders whose owner process runs."""
    return [folder for folder in _sessions() if _alive(_owner(folder))]


def stale_sessions() -> list[Path]:
    """Folders whose owner process has ended."""
    return [folder for folder in _sessions() if not _alive(_owner(folder))]


def kept_sessions() -> list[Session]:
    """Those of pipelines that outlived their commands and are still offered."""
    sessions = map(Session, running_sessions())
    return [session for session in sessions if session.offered and (session.folder / _HEIR).exists()]


def end_kept() -> list[Session]:
    """Ask them to end, and wait until those have that no request occupies: a new pipeline needs their memory."""
    kept = kept_sessions()
    for session in kept:
        # Not removed: the pipeline restores what a cleaner removed. One that ends meanwhile has no folder.
        with suppress(OSError):
            session.offer("")
    last = time.monotonic() + _KEPT_SECONDS
    while any(session.folder.exists() for session in kept) and time.monotonic() < last:
        time.sleep(_POLL_SECONDS)
    return kept


def sweep() -> list[Path]:
    """Remove the stale folders and return them."""
    stale = stale_sessions()
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def _sessions() -> list[Path]:
    home = sessions_folder()
    own = home.is_dir() and not home.is_symlink() and home.stat().st_uid == os.getuid()
    return sorted(home.glob(f"{_PREFIX}*")) if own else []


def _own_home(home: Path) -> Path:
    """Whoever made a link chose which of this user's folders files are made and removed in."""
    if home.is_symlink() or (home.exists() and home.stat().st_uid != os.getuid()):
        raise InputError(
            f"{home} is another user's, or is a link: remove it, or let {SESSIONS_VARIABLE} name another folder."
        )
    return home


def _owner(folder: Path) -> int:
    heir = None
    with suppress(OSError):
        heir = read_private(folder / _HEIR)
    owner = heir.decode() if heir is not None else folder.name.removeprefix(_PREFIX).split("-")[0]
    return int(owner) if owner.isdigit() else 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
