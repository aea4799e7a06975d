"""Laws of tokenizers: texts survive, special tokens are found, the pre-tokenizer is the one that the file names."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.machine.gguf.container import GgufFile
from orchestrator.machine.gguf.folder import write_tokenizer
from orchestrator.text.tokenizer import TextCodec
from tests.support.models.gguf_files import CHAT_TEMPLATE, END, START, vocabulary

TEXTS = (
    "hello world 1234",
    "  blanks\t\n\n and \r\n lines",
    "Grüße, 世界! 🙂🙂",
    "don't I'LL it's",
    "a_b::c(d) {e}",
    "",
)
PRE = [
    *("gpt-2", "smollm", "starcoder", "llama-bpe", "qwen2", "tekken", "gpt-4o", "command-r", "qwen35"),
    *("deepseek-llm", "deepseek-v3"),
]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def codec(tmp_path: Path, **metadata: Any) -> TextCodec:
    entries = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [1] * 262 + [3, 3, 4, 3] + [5] * 6,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"],
        "tokenizer.ggml.bos_token_id": START,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": CHAT_TEMPLATE,
        **{key.replace("_", ".", 2) if key.startswith("tokenizer") else f"tokenizer.ggml.{key}": value
           for key, value in metadata.items()},
    }  # fmt: skip
    present = {key: value for key, value in entries.items() if value is not None}
    write_tokenizer(GgufFile(Path("m.gguf"), present, {}), tmp_path)
    return TextCodec(tmp_path)


def sentence_piece(tmp_path: Path, **metadata: Any) -> TextCodec:
    words = ["▁", "h", "e", "l", "o", "▁h", "ll", "lo", "he", "▁he", "llo", "▁hello"]
    tokens = PIECES + words
    settings: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(PIECES) + [-float(place) for place in range(len(words), 0, -1)],
        "token_type": [2, 3, 3, *([6] * 256), *([1] * len(words))],
        "merges": None,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return codec(tmp_path, **{**settings, **metadata})


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("text", TEXTS)
def test_every_text_survives(tmp_path: Path, pre: str, text: str):
    found = codec(tmp_path, pre=pre)

    assert found.decode(found.encode(text, special=False)) == text


@pytest.mark.parametrize(
    ("pre", "whole"),
    [("smollm", False), ("qwen2", False), ("qwen35", False), ("deepseek-llm", False), ("llama-bpe", True),
     ("gpt-2", True), ("deepseek-v3", True)],
)  # fmt: skip
def test_the_pre_tokenizer_decides_whether_digits_stay_together(tmp_path: Path, pre: str, whole: bool):
    assert (len(codec(tmp_path, pre=pre).encode("12", special=False)) == 1) is whole


def test_merges_are_used_and_control_tokens_are_found_in_a_text_and_make_none(tmp_path: Path):
    found = codec(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokens = found.encode("<|start|>he<tool><|end|>", special=False)

    assert found.encode("hello", special=False) == [vocabulary().index("hello")]
    assert (tokens[0], tokens[-1]) == (START, END)
    assert found.decode(tokens) == "he<tool>"
    assert (settings["bos_token"], settings["eos_token"]) == ("<|start|>", "<|end|>")


@pytest.mark.parametrize(
    ("settings", "begins"),
    [({}, False), ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "add_bos_token": False}, False),
     ({"add_bos_token": True}, True)],
)  # fmt: skip
def test_a_text_begins_with_bos_where_the_model_was_trained_so(tmp_path: Path, settings: dict[str, Any], begins: bool):
    assert (codec(tmp_path, **settings).encode("hello")[0] == START) is begins


def test_gemma_4_merges_by_its_list(tmp_path: Path):
    """Its scores say nothing."""
    merges = ["h e", "l l", "ll o", "he llo", "▁ h"]
    words = ["▁", "h", "e", "l", "o", "▁h", "ll", "he", "llo", "hello", "▁hello"]
    listed = {"tokens": PIECES + words, "scores": [0.0] * (len(PIECES) + len(words)), "merges": merges}
    types = {"token_type": [2, 3, 3, *([6] * 256), *([1] * len(words))], "add_space_prefix": False}

    found = sentence_piece(tmp_path, model="gemma4", **listed, **types)

    tokens = found.encode(" hello")
    assert [found._tokenizer.id_to_token(id) for id in tokens[1:]] == ["▁", "hello"]
    assert found.decode(found.encode("hello\n é hello")) == "hello\n é hello"


def test_sentence_piece_merges_by_score(tmp_path: Path):
    found = sentence_piece(tmp_path)

    assert found.encode("hello") == [1, found._tokenizer.token_to_id("▁hello")]
    assert found.decode(found.encode("hello hello")) == "hello hello"


@pytest.mark.parametrize("text", ["héllo", "🙂 hello", "tabs\tand\nlines"])
def test_sentence_piece_spells_what_it_does_not_know(tmp_path: Path, text: str):
    found = sentence_piece(tmp_path)

    assert found.decode(found.encode(text)) == text


def test_sentence_piece_without_a_leading_blank(tmp_path: Path):
    found = sentence_piece(tmp_path, add_space_prefix=False)

    assert found.decode(found.encode(" hello")) == " hello"
    assert found.decode(found.encode("hello")) == "hello"
