"""A tokenizer for models of tests: one token a character, as many as such a model has, and an end."""

import json
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
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def ids(text: str) -> tuple[int, ...]:
    return tuple(_CHARACTERS.index(character) for character in text)


def text(tokens: Sequence[int]) -> str:
    return "".join(_CHARACTERS[token] for token in tokens if token != END)
