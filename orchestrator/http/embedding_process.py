"""The process of an embedding model: started on demand, asked, ended. One thread at a time."""

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from orchestrator.http.settings import EmbeddingCommand
from orchestrator.machine.checkpoints import hub_file, resolve
from orchestrator.machine.hardware import installed_version, usable_cores, worker_environment
from orchestrator.machine.package_index import Unavailable, environment
from protocol.child_process import ChildProcess
from protocol.contracts.coreml import OnProgress, Progress
from protocol.errors import InputError, PipelineError
from protocol.kernels_folder import kernels_folder

M = TypeVar("M")
PACKAGES: Mapping[str, str] = MappingProxyType({"mlx-embeddings": "0.1.0", "mlx-vlm": "0.7.10"})
_SHARED = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
_LOADING_SECONDS = 300.0
_ANSWER_SECONDS = 300.0
_END_SECONDS = 5.0
_FLOAT = 4
"""Bytes."""
_MIB = 1 << 20
_INSTALLED_MIB = 1100
"""About; for the bar."""


class _Ready(msgspec.Struct):
    ready: bool


class _Answer(msgspec.Struct):
    vectors: str = ""
    error: str = ""


def embedding_command(folder: Path, on_progress: OnProgress) -> EmbeddingCommand:
    """For the model in `folder`. Its packages are installed on first use, in an environment of their own: about 1 GB.

    Raises InputError if they can't be installed.
    """
    versions = {package: version for package in _SHARED if (version := installed_version(package))}
    try:
        python = environment(
            "mlx-embeddings",
            {**versions, **PACKAGES},
            lambda size: on_progress(
                Progress("installing mlx-embeddings", min(size // _MIB, _INSTALLED_MIB), _INSTALLED_MIB)
            ),
        )
    except Unavailable as error:
        raise InputError(f"mlx-embeddings can't be installed, which computes embeddings: {error}") from error
    program = Path(__file__).with_name("embedding_program.py")
    # Isolated: the user's PYTHONPATH must not add our packages to its own.
    arguments = (str(python), "-I", str(program), str(folder))
    own = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(kernels_folder())}
    return EmbeddingCommand(arguments, worker_environment("target", usable_cores()) | own)


class EmbeddingProcess:
    """A running program. It ends with this process, whose end closes its input."""

    def __init__(self, command: EmbeddingCommand) -> None:
        """Returns at once: the first `embed` waits for the model. Raises PipelineError if nothing can be started."""
        self.ready = False
        """The model is loaded."""
        try:
            self._process = ChildProcess(command.arguments, variables=command.variables, asked=True)
        except OSError as error:
            raise PipelineError(
                f"The process of the embedding model can't be started ({error.strerror}): start the server again, "
                "which installs what is missing."
            ) from error

    @property
    def running(self) -> bool:
        return self._process.running

    def embed(self, rows: Sequence[Sequence[int]]) -> list["array[float]"]:
        """A vector of length 1 for each row of tokens, as float32.

        Raises PipelineError if the model can't be loaded, or fails. After any error, `close` is all that may follow: an
        answer may still be on its way.
        """
        if not self.ready:
            self._received(_Ready, _LOADING_SECONDS)
            self.ready = True
        try:
            self._process.send({"rows": rows})
        except OSError as error:
            raise self._ended() from error
        answer = self._received(_Answer, _ANSWER_SECONDS)
        if answer.error:
            raise PipelineError(f"The embedding model failed: {answer.error[:500]}")
        content = base64.b64decode(answer.vectors)
        size, rest = divmod(len(content), len(rows))
        if not size or rest or size % _FLOAT:
            raise PipelineError("The embedding model gave vectors of a wrong size: is it an embedding model?")
        vectors = [array("f", content[first : first + size]) for first in range(0, len(content), size)]
        if not all(math.isfinite(sum(vector)) for vector in vectors):
            raise PipelineError(
                "The embedding model computed numbers that are not finite: use weights of another precision."
            )
        return vectors

    def terminate(self) -> None:
        """Let the process end; who waits for it gets a PipelineError."""
        self._process.terminate()

    def close(self) -> None:
        """End the process and free its memory."""
        with self._process as process:
            process.end(_END_SECONDS)

    def _received(self, kind: type[M], seconds: float) -> M:
        try:
            found = self._process.report(kind, seconds)
        except TimeoutError:
            raise PipelineError(f"The embedding model gave no answer for {seconds / 60:.0f} minutes.") from None
        if found is None:
            raise self._ended()
        return found

    def _ended(self) -> PipelineError:
        return PipelineError(f"The process of the embedding model ended; its last line: {self._process.last_words}")


# The model's folder -------------------------------------------------------------------------------

_FILES = {"Pooling": ("config.json",), "Dense": ("config.json", "model.safetensors")}
"""Of parts that change the vectors, by the last word of their type."""


class _Part(msgspec.Struct):
    type: str
    path: str = ""


def embedding_folder(name: str, on_progress: OnProgress) -> Path:
    """Of the embedding model `name`, a folder or a Hugging Face id. Raises InputError for what can't be had, also for
    one of its parts: without them its vectors would be others."""
    folder = resolve(name, "target", on_progress)
    for file in _parts(folder):
        if (folder / file).is_file():
            continue
        if Path(name).expanduser().exists():
            raise InputError(f"{folder} lacks {file}, which its modules.json names: download the model again.")
        # A snapshot's folder has the name of its revision: parts of another one must not mix with it.
        hub_file(name, file, folder.name)
    return folder


def _parts(folder: Path) -> list[str]:
    """Files in subfolders that `modules.json` asks for."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        parts = msgspec.json.decode(file.read_bytes(), type=list[_Part])
    except msgspec.DecodeError as error:
        raise InputError(f"{file} is broken ({error}): download the model again.") from error
    named = ((part.path, files) for part in parts if (files := _FILES.get(part.type.rpartition(".")[2])))
    return [f"{path}/{each}" for path, files in named for each in files if path.replace("_", "").isalnum()]
