"""Makes the demo pair's tokenizer and token files from the standard library of this Python.

CPython 3.11 has the text that the shipped pair was trained on:

    python3.11 -m orchestrator.lab.training.prepare --out build
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
SEED = 0
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TEXT,
    "bos_token": None,
    "pad_token": END_OF_TEXT,
    "model_max_length": 2048,
    "clean_up_tokenization_spaces": False,
}
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits text before byte pairs are merged: words with a leading blank, up to three digits, runs of signs."""


class Source(NamedTuple):
    """A file of the standard library; the path is relative to the library's folder."""

    path: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for the files")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    training, held_out = split(sources(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = train_tokenizer([source.text for source in training])
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1))
    np.save(out / "train.npy", tokens(tokenizer, training))
    np.save(out / "held_out.npy", tokens(tokenizer, held_out))
    (out / "held_out.txt").write_text("\n".join(source.path for source in held_out))
    print(f"{len(training)} files to train on, {len(held_out)} held out, in {out}")


def sources(library: Path) -> list[Source]:
    """All Python files with code, sorted by path."""
    found = []
    for path in sorted(library.rglob("*.py"), key=str):
        relative = path.relative_to(library).as_posix()
        if "site-packages" in relative or "lib2to3/tests/data" in relative:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if is_code(relative, text):
            found.append(Source(relative, text))
    return found


def is_code(path: str, text: str) -> bool:
    """Whether the file is neither a stub, nor a table of data, nor a codec's character map."""
    longest = max(map(len, text.splitlines()), default=0)
    return len(text) >= 200 and longest <= 600 and not (path.startswith("encodings/") and "decoding_table" in text)


def split(files: list[Source]) -> tuple[list[Source], list[Source]]:
    """Files to train on and held-out files: every fortieth file of a seeded shuffle, without tests."""
    shuffled = files.copy()
    random.seed(SEED)
    random.shuffle(shuffled)
    held_out = [file for index, file in enumerate(shuffled) if index % 40 == 0 and "/test" not in f"/{file.path}"]
    return [file for file in shuffled if file not in held_out], held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens(tokenizer: Tokenizer, files: list[Source]) -> np.ndarray:
    """The tokens of all files, each file after an end-of-text token; uint16."""
    joined: list[int] = []
    for file in files:
        joined.append(0)
        joined.extend(tokenizer.encode(file.text).ids)
    return np.array(joined, dtype=np.uint16)


if __name__ == "__main__":
    main()
