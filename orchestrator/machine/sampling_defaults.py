"""A model's own sampling values: of its folder, of its model card, or the rule for models that state none."""

from pathlib import Path

import msgspec

from orchestrator.machine.checkpoints import known_folder
from orchestrator.machine.default_target import SAMPLING, default_pair_state, is_default_target
from orchestrator.text.chat_template import has_template
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.messages.sampling import ModelSampling

_FILE = "generation_config.json"
UNSTATED = ModelSampling(temperature=0.7, top_p=0.95)
"""Of a model with a chat template that states nothing. One without continues texts, at temperature 0."""


def model_sampling(folder: Path) -> ModelSampling:
    """Raises InputError for a generation_config.json that can't be read, or has a value out of range."""
    stated = _stated(folder)
    if stated is not None:
        return stated
    if is_default_target(folder):
        return SAMPLING
    return UNSTATED if has_template(folder) else ModelSampling()


def known_sampling(target: str | None) -> ModelSampling | None:
    """Of the target with this name (None: the default one); None if it is not on this machine. Fetches nothing."""
    if target is not None:
        folder = known_folder(target)
        return None if folder is None else model_sampling(folder)
    default = default_pair_state()
    return model_sampling(Path(default.folder)) if default.folder else SAMPLING


def _stated(folder: Path) -> ModelSampling | None:
    """As Hugging Face has it, but a value without `do_sample` counts, and a filter without a value keeps all tokens."""
    content = ModelFolder(folder).settings(_FILE)
    stated = {name: content[name] for name in ModelSampling.__struct_fields__ if content.get(name) is not None}
    if content.get("do_sample") is False:
        return ModelSampling()
    if not stated and not content.get("do_sample"):
        return None
    if stated.get("top_k") == -1:
        # Another way to say "all".
        stated["top_k"] = 0
    try:
        return msgspec.convert({"temperature": 1.0, **stated}, ModelSampling)
    except msgspec.ValidationError as error:
        raise InputError(
            f"{folder}/{_FILE} has a sampling value that can't be ({error}): correct it, or delete it."
        ) from error
