"""Tokenizers for tests: one of a character a token, for the tiny models, and one that differs from a demo model's."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = 66
_CHARACTERS = '{}[]",: \n-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNO<>_/'[:END]
_IN_FILES = {" ": "\u0120", "\n": "\u010a"}
"""As byte-level tokenizers write what is not to be seen."""


def write_tokenizer(folder: Path) -> Path:
    """Returns the folder, which then holds a tokenizer.json of `tiny_models.VOCABULARY` tokens."""
    vocabulary = {_IN_FILES.get(character, character): id for id, character in enumerate(_CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<end>": END}, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def with_other_tokenizer(model: Path, folder: Path) -> Path:
    """A copy of the model in a new folder, with two tokens exchanged."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def with_added_token(model: Path, folder: Path) -> Path:
    """A copy of the model in a new folder, with `<think>` behind its tokens."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 4096, "content": "<think>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def ids(text: str) -> tuple[int, ...]:
    return tuple(_CHARACTERS.index(character) for character in text)


def text(tokens: Sequence[int]) -> str:
    return "".join(_CHARACTERS[token] for token in tokens if token != END)
