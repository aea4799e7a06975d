"""What people are shown as the names of models and devices. Pure: no folder is opened."""

import re
from pathlib import PurePath

_OURS = "launch-pipeline"
"""The name of the cache folder, on this machine or on another one."""
_KEY = re.compile(r"-[0-9a-f]{12,}(?=-|$)")
"""Keys of files in the names of cached folders."""
_HUB_FOLDER = "models--"
"""Hugging Face keeps `owner/name` in models--owner--name/snapshots/COMMIT."""
_DEVICE = re.compile(r"(?:Device\()?(cpu|gpu)(?:, \d+\))?")
_DEVICES = {"cpu": "processor", "gpu": "GPU"}


def model_name(model: str | PurePath) -> str:
    """The name of the model in a folder, or of a Hugging Face id: never a path, nor the key of a cached folder."""
    path = PurePath(model)
    for part in path.parts:
        if part.startswith(_HUB_FOLDER):
            return part.rpartition("--")[2]
    if path.name == "demo_model":
        return "demo"
    cached = len(path.parts) > 2 and path.parts[-3] == _OURS
    return _KEY.sub("", path.name) if cached else path.name


def device_name(device: str) -> str:
    """A worker's device in words: MLX calls a processor `cpu` or `Device(cpu, 0)`."""
    found = _DEVICE.match(device)
    return _DEVICES[found[1]] + device[found.end() :] if found else device
