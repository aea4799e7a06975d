"""A model's name to its folder: the demo pair, a local folder, or a Hugging Face download. Opens no weights."""

import importlib.util
import json
import re
from pathlib import Path

from protocol.errors import InputError
from protocol.messages.base import Role

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_WANTED = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja"]
_UNWANTED = ["*.py", "*/*"]
"""Code is never fetched; subfolders hold other formats of the same weights."""
_COMPLETE = "a complete model has config.json, tokenizer.json and model*.safetensors"


def resolve(name: str | None, role: Role) -> Path:
    """Folder with the config, tokenizer and weights of `name`: a folder, a Hugging Face id, or None for the demo model.

    A model already downloaded is used as it is, without asking the network. Raises InputError otherwise
    for what is not there, incomplete, or can't be fetched.
    """
    if name is None:
        return _checked(demo_model(role))
    folder = Path(name).expanduser()
    if name and folder.exists():
        return _checked(folder.resolve())
    if _looks_like_a_path(name):
        raise InputError(f"There is no folder {name!r}: check the path of the {role}, or pass a Hugging Face id.")
    if not _HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is neither a folder nor a Hugging Face id: pass a folder, or owner/name for the {role}."
        )
    return _downloaded(name)


def demo_model(role: Role) -> Path:
    """Folder of the model shipped with this role's worker."""
    package = importlib.util.find_spec(f"{role}_worker")
    locations = package.submodule_search_locations if package else None
    if not locations:
        raise InputError(f"The package {role}_worker is not installed: delete .venv and start again.")
    return Path(next(iter(locations))) / "demo_model"


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(("/", ".safetensors", ".gguf")) or name.count("/") > 1


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: pass the folder of a model in Hugging Face format.")
    for required in ("config.json", "tokenizer.json"):
        if not (folder / required).is_file():
            raise InputError(f"{folder} has no {required}: {_COMPLETE}; pass such a folder.")
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"{folder} has no model*.safetensors: {_COMPLETE}; convert it with `mlx_lm.convert`.")
    missing = _missing_shards(folder)
    if missing:
        raise InputError(f"{folder} lacks {len(missing)} of its weight files, first {missing[0]}: download it again.")
    return folder


def _missing_shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is broken: download the model again.") from error
    return sorted(shard for shard in shards if not (folder / str(shard)).is_file())


def _downloaded(name: str) -> Path:
    return cached(name) or _fetched(name)


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
    from huggingface_hub import errors, snapshot_download

    # The base of its HTTP library's errors, which is httpx or httpx2, depending on the release.
    http_error: type[Exception] = vars(errors)["HTTPError"]
    try:
        folder = snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, dry_run=False)
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} asks for a licence: accept it at https://huggingface.co/{name}, then `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"There is no folder and no public Hugging Face model {name!r}: check the spelling; "
            "for a private one, `hf auth login` first."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise InputError(
            f"{name} is not on this machine and Hugging Face can't be reached: "
            "download it on a connected machine and pass the folder."
        ) from error
    except (http_error, OSError) as error:
        raise InputError(f"The download of {name} broke off ({type(error).__name__}: {error}): try again.") from error
    return _checked(Path(folder))
