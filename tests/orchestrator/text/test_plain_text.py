"""Laws of texts that look like control tokens: they are ordinary text, and nothing else changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from orchestrator.text.plain_text import BREAK, PlainTextTokenizer, with_breaks
from tests.support.paths import DEMO_TARGET

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", '<|"|>')
ADDED = (*CONTROLS, "\n\n", "<b>", "<unk>")
"""The last ones control nothing."""
TEXTS = st.lists(
    st.sampled_from([*ADDED, BREAK, "<", "|im_", "end|>", "s>", "[IN", "\\", '"', " ", "\n", "ü", "a"]), max_size=8
).map("".join)
PIECES = [("<unk>", 0.0), ("<s>", 0.0), *((letter, -5.0) for letter in sorted({*"".join(CONTROLS), *"▁ab\n"}))]
"""Of Unigram, which makes `<s>` of text too."""


def tokenizer(scheme: str, **flags: bool) -> Tokenizer:
    found = Tokenizer(models.Unigram(PIECES, unk_id=0))
    if scheme == "bytes":
        found = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    elif scheme == "prepend":
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "first")
    found.add_special_tokens([AddedToken(text, **{"normalized": False, **flags}) for text in ADDED])
    return found


TOKENIZERS = [
    *(tokenizer(scheme) for scheme in ("bytes", "first", "always", "never", "prepend")),
    tokenizer("bytes", lstrip=True, rstrip=True),
    tokenizer("bytes", normalized=True),
    tokenizer("first", rstrip=True),
]

WITHOUT = tokenizer("bytes")
WITHOUT.encode_special_tokens = True


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(text=TEXTS, texts=st.lists(TEXTS, max_size=3))
def test_what_others_wrote_is_text_between_the_tokens_of_the_template(
    tokenizer: Tokenizer, text: str, texts: list[str]
):
    read = PlainTextTokenizer(tokenizer).encode
    marked = "".join(with_breaks(texts, frozenset(CONTROLS)))
    found = read(f"<|im_start|>{marked}<|im_end|>")

    assert read(text.replace(BREAK, 2 * BREAK)) == encoded(tokenizer, text)
    turn = [encoded(tokenizer, f"<|im_{end}|>")[0] for end in ("start", "end")]
    assert [id for id in found if id in map(tokenizer.token_to_id, CONTROLS)] == turn


@given(text=TEXTS.map(lambda text: text.replace("\n", " ")))
def test_it_is_what_the_tokenizer_makes_with_special_tokens_off(text: str):
    assert PlainTextTokenizer(TOKENIZERS[0]).encode(with_breaks(text, frozenset(ADDED))) == encoded(WITHOUT, text)
