"""Which of the drafts that are shipped with the package fits a target: the default target's own, or the demo draft."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.machine.cache_entries import made_once
from orchestrator.machine.checkpoints import demo_model, worker_folder
from orchestrator.machine.default_target import DefaultModel, default_target, is_default_target
from protocol.contracts.coreml import OnProgress, silent
from protocol.contracts.model_folder import HEAD_TOKENS, ModelFolder
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint
from protocol.errors import InputError
from protocol.paths import cache_folder
from protocol.speculation.successors import SUCCESSORS

if TYPE_CHECKING:
    import numpy as np


def default_draft(on_progress: OnProgress = silent) -> DefaultModel:
    """The default target's draft. It has that target's embedding, so the target is fetched on first use.

    Without a network, and if the environment asks for the demo pair, it is the demo draft. Raises InputError as
    `default_target` and `whole_draft` do.
    """
    target, note = default_target(on_progress)
    if is_default_target(target):
        return DefaultModel(whole_draft(packed_draft(), target), note)
    return DefaultModel(demo_model("draft"), note)


def shipped_draft(target: Path) -> Path | None:
    """The draft that is shipped for the model in the folder `target`; None if there is none.

    The default target's draft serves that target alone, since it was trained on its answers and has its embedding. The
    demo draft serves every target with its tokenizer.
    """
    if is_default_target(target):
        return whole_draft(packed_draft(), target)
    demo = demo_model("draft")
    return demo if vocabulary_fingerprint(demo) == vocabulary_fingerprint(target) else None


def with_successors(target: Path, draft: Path | None) -> Path | None:
    """Folder of the table of successors: of what the draft's own target wrote, or of what the default target writes."""
    folders = (draft, packed_draft() if is_default_target(target) else None)
    return next((folder for folder in folders if folder is not None and (folder / SUCCESSORS).is_file()), None)


def packed_draft() -> Path:
    """Folder of the default target's draft as it is shipped."""
    return worker_folder("draft") / "default_draft"


# A packed draft and its target's files ------------------------------------------------------------

CONFIG = "config.json"
LAYERS = "layers.safetensors"
PACKED = (CONFIG, LAYERS, HEAD_TOKENS, SUCCESSORS)
"""The files of a packed draft: layers, final norm, the tokens of its head, and the successors of tokens in what its
target writes; no embedding and no tokenizer."""
EMBEDDING = "model.embed_tokens"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SAME = ("hidden_size", "vocab_size")
_FROM_TARGET = ("bos_token_id", "eos_token_id")
_FORMAT = 2
"""Raised if the same files become another folder, so that folders of older versions are not used."""


def whole_draft(packed: Path, target: Path) -> Path:
    """The draft in `packed` as a model folder with the embedding and the tokenizer of `target`, made on first use.

    The folder is kept in this user's cache folder, complete or absent, under a key of the files of both. Raises
    InputError for files that are missing, damaged or of different models, and if the cache can't be written.
    """
    for name in PACKED:
        if not (packed / name).is_file():
            raise InputError(f"{packed} has no {name}: install launch-pipeline again.")
    place = cache_folder() / "drafts" / f"{target.name}-draft-{_key(packed, target)}"
    return made_once(place, lambda folder: join(packed, target, folder))


def join(packed: Path, target: Path, folder: Path) -> None:
    """Fill the empty `folder` with the packed draft and the target's embedding and tokenizer, as mlx-lm's format.

    Raises InputError for damaged files and for a draft that was trained for another target.
    """
    # It imports numpy, which a start that finds the folder need not wait for.
    from safetensors.numpy import save

    theirs, config = ModelFolder(target).config, ModelFolder(packed).config
    if any(config[name] != theirs[name] for name in _SAME):
        raise InputError(f"The draft in {packed} was trained for another target than {target}: pass its own target.")
    embedding = _arrays(target / "model.safetensors", EMBEDDING)
    config["quantization"][EMBEDDING] = _embedding_format(theirs) if f"{EMBEDDING}.scales" in embedding else False
    config |= {name: theirs[name] for name in _FROM_TARGET if name in theirs}
    # The library's own writer raises no OSError if the disk is full.
    (folder / "model.safetensors").write_bytes(save(_arrays(packed / LAYERS) | embedding, {"format": "mlx"}))
    (folder / CONFIG).write_text(json.dumps(config, indent=1))
    for name in (HEAD_TOKENS, SUCCESSORS):
        shutil.copyfile(packed / name, folder / name)
    for name in _TOKENIZER:
        shutil.copyfile(target / name, folder / name)


def _key(packed: Path, target: Path) -> str:
    digest = sha256(f"{_FORMAT} {ModelFolder(packed).fingerprint} {ModelFolder(target).fingerprint}".encode())
    for file in (target / "tokenizer.json", packed / SUCCESSORS):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _arrays(file: Path, module: str = "") -> "dict[str, np.ndarray]":
    """The arrays whose names begin with `module`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            names = [name for name in list(opened.keys()) if name.startswith(module)]
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file} can't be read ({error}): install or download it again.") from error


def _embedding_format(config: dict[str, Any]) -> dict[str, Any]:
    """Group size and bits of the embedding of a quantised model."""
    common = config["quantization"]
    own = common.get(EMBEDDING, common)
    return {name: own[name] for name in ("group_size", "bits")}
