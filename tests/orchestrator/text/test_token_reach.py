"""Laws of the bound that refuses long prompts without tokenizing them: it never counts more tokens than there are."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from orchestrator.text.tokenizer import TextCodec
from tests.orchestrator.text.test_text import LETTERS
from tests.support.paths import DEMO_TARGET

DEMO = TextCodec(DEMO_TARGET)
VOCABULARY = {letter: id for id, letter in enumerate(LETTERS)}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def codec(folder: Path, tokenizer: Tokenizer) -> TextCodec:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_byte_tokens(fallback: bool = True) -> Tokenizer:
    """In SentencePiece's form: characters, and bytes for those that are unknown."""
    vocabulary = {name: id for id, name in enumerate([*BYTES, "▁", "a", "▁a", "aa"])}
    model = models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("a", "a")], byte_fallback=fallback)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@given(TEXT, st.sampled_from(["", " ", "a", "0", "中"]), st.integers(0, 300))
def test_no_text_has_fewer_tokens_than_the_bound(text: str, repeated: str, times: int):
    text += repeated * times

    assert DEMO.least_tokens(text) <= len(DEMO.encode(text))


def test_a_text_of_the_longest_token_reaches_the_bound(tmp_path: Path):
    found = codec(tmp_path, byte_level({**VOCABULARY, "aa": 256, "aaaa": 257}, [("a", "a"), ("aa", "aa")]))

    assert found.least_tokens("a" * 400) == len(found.encode("a" * 400)) == 100


def test_characters_that_are_composed_first_count_as_one(tmp_path: Path):
    tokenizer = byte_level(VOCABULARY)
    tokenizer.add_tokens(["ᾂ"])
    tokenizer.normalizer = normalizers.NFC()
    found = codec(tmp_path, tokenizer)
    apart = unicodedata.normalize("NFD", "ᾂ" * 50)

    assert (len(apart), len(found.encode(apart))) == (200, 50)
    assert 0 < found.least_tokens(apart) <= 50


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return codec(tmp_path_factory.mktemp("tokenizer"), with_byte_tokens())


@given(TEXT)
def test_unknown_characters_count_where_their_bytes_have_tokens(sentence_piece: TextCodec, text: str):
    assert 0 < sentence_piece.least_tokens(text + "x") <= len(sentence_piece.encode(text + "x"))


def test_characters_without_a_token_do_not_count(tmp_path: Path):
    lacking = {letter: id for letter, id in VOCABULARY.items() if letter not in (LETTERS[4], LETTERS[0xF1])}
    found = codec(tmp_path, byte_level(lacking))

    assert found.least_tokens("a\x04" * 50) == len(found.encode("a\x04" * 50)) == 50
    assert found.least_tokens("\x04" * 50) == len(found.encode("\x04" * 50)) == 0
    assert 0 < found.least_tokens("\U00040000" * 50) <= len(found.encode("\U00040000" * 50))


def _stripping() -> Tokenizer:
    tokenizer = byte_level(VOCABULARY)
    tokenizer.add_special_tokens([AddedToken("<end>", rstrip=True)])
    return tokenizer


def _removing() -> Tokenizer:
    tokenizer = byte_level(VOCABULARY)
    split = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def _shortening() -> Tokenizer:
    tokenizer = byte_level(VOCABULARY)
    tokenizer.normalizer = normalizers.Replace("  ", " ")
    return tokenizer


def _unicode_kinds() -> Tokenizer:
    tokenizer = byte_level(VOCABULARY)
    tokenizer.normalizer = normalizers.StripAccents()
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (_stripping(), "<end>" + " " * 500),
        (_removing(), "a" + " " * 500),
        (_shortening(), " " * 500),
        (_unicode_kinds(), "a" + "\u0301" * 500),
        (byte_level({"a": 0, "b": 1}), "a" + "x" * 500),
        (with_byte_tokens(fallback=False), "x" * 500),
        (Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?")), "y" * 500),
    ],
)
def test_a_tokenizer_that_loses_text_has_no_bound(tmp_path: Path, tokenizer: Tokenizer, text: str):
    assert codec(tmp_path, tokenizer).least_tokens(text) == 0


@pytest.mark.parametrize("text", ["", "def f():\n    return 1\n", "naïve 中文 \U0001f600 " * 40, "<|endoftext|>x"])
@pytest.mark.parametrize("special", [True, False])
def test_the_form_that_frees_the_interpreter_gives_the_same_tokens(text: str, special: bool):
    plain = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))

    assert DEMO.encode(text, special=special) == plain.encode(text, add_special_tokens=special).ids
