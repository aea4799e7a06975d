"""A model's name to its folder: the demo pair, a folder, a GGUF file, or a Hugging Face download. Opens no weights."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.gguf import part_names
from orchestrator.machine.network import reachable
from protocol.contracts.coreml import OnProgress, silent
from protocol.contracts.drafters.detection import is_drafter, read_drafter
from protocol.contracts.model_folder import WEIGHTS, ModelFolder
from protocol.errors import InputError
from protocol.messages.base import Role

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILE = re.compile(rf"{_HUB_ID.pattern}:[\w.-]{{1,200}}\.gguf")
"""A file of a Hugging Face id; `:` can't be in either name."""
_WANTED = ["*.json", WEIGHTS, "tokenizer*", "*.jinja"]
_UNWANTED = ["*.py", "*/*"]
"""Code is never fetched; subfolders hold other formats of the same weights."""
_COMPLETE = f"a complete model has config.json, tokenizer.json and {WEIGHTS}"


def resolve(name: str | None, role: Role, on_progress: OnProgress = silent) -> Path:
    """Folder with the config, tokenizer and weights of `name`: a folder, a Hugging Face id, or None for the demo model.

    A draft may also be a trained drafter, which has its target's tokenizer. A GGUF file, alone or in a folder, is
    converted on first use; `owner/name:FILE.gguf` is one on Hugging Face. A model already downloaded is used as it is,
    without asking the network. Raises InputError otherwise for what is not there, incomplete, or can't be fetched.
    """
    if name is None:
        return _checked(demo_model(role))
    found = _resolved(name, role, on_progress)
    if role != "draft" and is_drafter(found):
        raise InputError(f"{found} holds a trained drafter, no language model: pass it as the draft, with its target.")
    return found


def known_folder(name: str) -> Path | None:
    """The folder of `name` as it is on this machine; None if it would have to be fetched or converted first."""
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return path.resolve()
    if not path.exists() and _HUB_ID.fullmatch(name):
        return cached(name)
    file = gguf_file(name, fetch=False)
    if file is None:
        return None
    from orchestrator.machine.gguf.folder import gguf_place

    place = gguf_place(file)
    return place if place.is_dir() else None


def _resolved(name: str, role: Role, on_progress: OnProgress) -> Path:
    folder = Path(name).expanduser()
    if name and folder.exists():
        # The parts of a split file are found beside it by their names, which a link's target does not have.
        return _local(folder.absolute() if len(part_names(folder.name)) > 1 else folder.resolve(), on_progress)
    if _HUB_FILE.fullmatch(name):
        id, file = name.split(":", 1)
        first, *_ = [hub_file(id, part) for part in part_names(file)]
        return _converted(first, on_progress)
    if _looks_like_a_path(name):
        raise InputError(f"There is no folder {name!r}: check the path of the {role}, or pass a Hugging Face id.")
    if not _HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is neither a folder nor a Hugging Face id: pass a folder, or owner/name for the {role}."
        )
    return cached(name) or _fetched(name)


def demo_model(role: Role) -> Path:
    """Folder of the demo model shipped with this role's worker."""
    return worker_folder(role) / "demo_model"


def worker_folder(role: Role) -> Path:
    """Folder of this role's worker package. Raises InputError if it is not installed."""
    package = importlib.util.find_spec(f"{role}_worker")
    locations = package.submodule_search_locations if package else None
    if not locations:
        raise InputError(f"The package {role}_worker is not installed: delete .venv and start again.")
    return Path(next(iter(locations)))


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(("/", ".safetensors", ".gguf")) or name.count("/") > 1


def complete(folder: Path) -> bool:
    """Whether the folder has all files of a model in mlx-lm's format, its tokenizer included."""
    try:
        _checked(folder)
    except InputError:
        return False
    return (folder / "tokenizer.json").is_file()


def gguf_files(folder: Path) -> list[Path]:
    """GGUF files of language models, of split ones the first part; `mmproj` files hold the part of a model that reads
    images."""
    files = sorted(file for file in folder.glob("*.gguf") if "mmproj" not in file.name)
    return [file for file in files if part_names(file.name)[0] == file.name]


def gguf_file(name: str, *, fetch: bool = True) -> Path | None:
    """The GGUF file that `name` means; None if it means none, and without `fetch` if it is not on this machine.

    Raises InputError if it can't be had.
    """
    path = Path(name).expanduser()
    if _HUB_FILE.fullmatch(name) and not path.exists():
        id, file = name.split(":", 1)
        file = part_names(file)[0]
        if fetch:
            return hub_file(id, file)
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(id, file)
        return Path(found) if isinstance(found, str) else None
    if path.is_file():
        # The parts of a split file lie beside it by their names, a link's too.
        return path.absolute() if len(part_names(path.name)) > 1 else path.resolve()
    files = gguf_files(path.resolve()) if name and path.is_dir() else []
    return files[0] if len(files) == 1 else None


def hub_file(id: str, name: str, revision: str | None = None) -> Path:
    """The file `name` of a Hugging Face id, downloaded once; the newest, or that of a commit. Raises InputError if it
    can't be had."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    known = try_to_load_from_cache(id, name, revision=revision)
    if isinstance(known, str):
        return Path(known)
    with _told(id):
        return Path(hf_hub_download(id, name, revision=revision))


def _local(path: Path, on_progress: OnProgress) -> Path:
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else gguf_files(path)
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise InputError(f"{path} holds several GGUF files: pass one of them: {names}.")
        return _converted(files[0], on_progress) if files else _checked(path)
    # Ollama's files have no ending. One that has the ending is read too, so that its fault is told.
    with suppress(OSError):
        if path.suffix == ".gguf" or (path.is_file() and path.open("rb").read(4) == b"GGUF"):
            return _converted(path, on_progress)
    return _checked(path)


def _converted(file: Path, on_progress: OnProgress) -> Path:
    # It imports numpy and the tables of every architecture, which other commands need not wait for.
    from orchestrator.machine.gguf.folder import gguf_folder

    return gguf_folder(file, on_progress)


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: pass the folder of a model in Hugging Face format, or a GGUF file.")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: {_COMPLETE}; pass such a folder.")
    if not (folder / "tokenizer.json").is_file():
        if read_drafter(folder) is not None:
            return folder
        raise InputError(f"{folder} has no tokenizer.json: {_COMPLETE}; pass such a folder.")
    model = ModelFolder(folder)
    if not model.files:
        raise InputError(f"{folder} has no {WEIGHTS}: {_COMPLETE}; convert it with `mlx_lm.convert`.")
    model.require_complete()
    return folder


def cached(name: str) -> Path | None:
    """The complete copy of an earlier download of a Hugging Face id, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=True, dry_run=False
        )
        return _checked(Path(folder))
    except (LocalEntryNotFoundError, InputError):
        return None


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download

    with _told(name):
        folder = Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, dry_run=False))
    try:
        return _checked(folder)
    except InputError as error:
        raise InputError(f"{error} If {name} has GGUF files, pass {name}:FILE.gguf.") from error


def hub_reachable() -> bool:
    """Whether models can be fetched."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and reachable(constants.ENDPOINT)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Raises what the hub raises as InputError; at once if the hub can't be reached, where its client would retry."""
    from huggingface_hub import errors

    # The base of its HTTP library's errors, which is httpx or httpx2, depending on the release.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    try:
        if not hub_reachable():
            raise errors.LocalEntryNotFoundError(name)
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} asks for a licence: accept it at https://huggingface.co/{name}, then `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"There is no folder and no public Hugging Face model {name!r}: check the spelling; "
            "for a private one, `hf auth login` first."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise InputError(
            f"{name} is not on this machine and Hugging Face can't be reached: "
            "download it on a connected machine and pass the folder."
        ) from error
    except (http_error, OSError) as error:
        raise InputError(f"The download of {name} broke off ({type(error).__name__}: {error}): try again.") from error


# What other programs have put on this disk ---------------------------------------------------------

_MODEL_LAYER = "application/vnd.ollama.image.model"
"""The layer of an Ollama manifest that is a GGUF file."""
_LEAST_BYTES = 1 << 20
"""Smaller files are vocabularies or pointers."""


class LocalModel(NamedTuple):
    """`target` is what --target and --draft take."""

    origin: str
    name: str
    target: str
    bytes: int


def local_models() -> list[LocalModel]:
    """All that are found, by program and name. Folders that can't be read are passed over."""
    found: set[LocalModel] = set()
    for program in (_hugging_face, _lm_studio, _ollama):
        with suppress(OSError):
            found.update(program())
    return sorted(found)


def _hugging_face() -> Iterator[LocalModel]:
    from huggingface_hub.constants import HF_HUB_CACHE

    for repository in _folders(Path(HF_HUB_CACHE), "models--*--*"):
        id = repository.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in _folders(repository / "snapshots", "*"):
            if complete(snapshot):
                yield LocalModel("Hugging Face", id, id, ModelFolder(snapshot).size)
            for file in _large(gguf_files(snapshot)):
                yield LocalModel("Hugging Face", f"{id}:{file.name}", f"{id}:{file.name}", file.stat().st_size)


def _lm_studio() -> Iterator[LocalModel]:
    for root in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for folder in _folders(root, "*/*"):
            name = f"{folder.parent.name}/{folder.name}"
            if complete(folder):
                yield LocalModel("LM Studio", name, str(folder), ModelFolder(folder).size)
            for file in _large(gguf_files(folder)):
                yield LocalModel("LM Studio", f"{name}/{file.name}", str(file), file.stat().st_size)


def _ollama() -> Iterator[LocalModel]:
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    manifests = root / "manifests"
    for manifest in sorted(file for file in manifests.glob("*/*/*/*") if file.is_file()):
        _, owner, model, tag = manifest.relative_to(manifests).parts
        name = f"{model}:{tag}" if owner == "library" else f"{owner}/{model}:{tag}"
        for digest in _digests(manifest):
            blob = root / "blobs" / digest.replace(":", "-")
            for file in _large([blob]):
                yield LocalModel("Ollama", name, str(file), file.stat().st_size)


def _digests(manifest: Path) -> list[str]:
    """Of the models in an Ollama manifest; none if it can't be read."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        return [str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _folders(parent: Path, pattern: str) -> list[Path]:
    return sorted(path for path in parent.glob(pattern) if path.is_dir())


def _large(files: list[Path]) -> list[Path]:
    return [file for file in files if file.is_file() and file.stat().st_size >= _LEAST_BYTES]
