"""A model whose token ids mean other text than the demo models' do."""

import json
import shutil
from pathlib import Path


def with_other_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of the model in a new folder, with two tokens exchanged."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
