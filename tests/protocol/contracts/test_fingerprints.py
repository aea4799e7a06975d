"""Laws of the fingerprints: equal exactly when token ids mean the same text, and when two models can share KV."""

import json
import os
from pathlib import Path

import pytest

from protocol.contracts.tokenizer_fingerprint import first_difference, tokenizer_fingerprint, vocabulary_fingerprint
from protocol.errors import InputError

TOKENIZER = {
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def write(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | changes))
    return folder


def fingerprint(folder: Path, **changes: object) -> str:
    return tokenizer_fingerprint(write(folder, **changes))


def model(**changes: object) -> dict:
    return TOKENIZER["model"] | changes


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2.0", "truncation": {"max_length": 8}, "post_processor": None},
        {"model": model(dropout=None, vocab={"ab": 2, "b": 1, "a": 0})},
        {"model": model(merges=[["a", "b"]])},
        {"model": model(vocab={"a": 0, "b": 1, "ab": 2, "<end>": 3})},
    ],
    ids=["cosmetic fields", "order", "both spellings of merges", "a special token in the vocabulary"],
)
def test_what_means_the_same_text_is_the_same(tmp_path: Path, change: dict):
    plain = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 152064}')

    assert fingerprint(tmp_path, **change) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"model": model(vocab={"a": 1, "b": 0, "ab": 2})},
        {"model": model(vocab={"a": 0, "c": 1, "ab": 2})},
        {"model": model(merges=["b a"])},
        {"added_tokens": [{"id": 4, "content": "<end>"}]},
        {"added_tokens": [{"id": 3, "content": "<stop>"}]},
        {"added_tokens": []},
    ],
)
def test_any_change_of_meaning_changes_it(tmp_path: Path, change: dict):
    assert fingerprint(tmp_path, **change) != fingerprint(tmp_path)


def test_unigram_vocabularies_are_lists(tmp_path: Path):
    first = fingerprint(tmp_path, model={"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]})
    second = fingerprint(tmp_path, model={"type": "Unigram", "vocab": [["b", -1.0], ["a", -2.0]]})

    assert first != second


def test_a_tokenizer_that_is_larger_than_any_known_one_is_refused_unread(tmp_path: Path):
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", (128 << 20) + 1)

    with pytest.raises(InputError, match=r"tokenizer\.json has over 128 MiB.*choose another model"):
        tokenizer_fingerprint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_missing_or_broken_tokenizer_is_named_with_the_next_step(tmp_path: Path, content: str):
    with pytest.raises(InputError, match=r"no readable tokenizer\.json.*pass the folder"):
        tokenizer_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"is broken.*download the model again"):
        tokenizer_fingerprint(tmp_path)


def test_a_pair_may_differ_in_its_added_tokens(tmp_path: Path):
    """As Qwen2.5 and Qwen3 do."""
    more = [*TOKENIZER["added_tokens"], {"id": 4, "content": "<think>"}]
    ours, theirs = write(tmp_path / "a"), write(tmp_path / "b", added_tokens=more)

    assert tokenizer_fingerprint(ours) != tokenizer_fingerprint(theirs)
    assert vocabulary_fingerprint(ours) == vocabulary_fingerprint(theirs)
    assert first_difference(ours, theirs) is None


def test_an_added_token_may_have_the_id_of_none_or_of_another(tmp_path: Path):
    """As reserved tokens do that a later model of a family has renamed."""
    renamed = write(tmp_path / "b", added_tokens=[{"id": 3, "content": "<stop>"}])

    assert vocabulary_fingerprint(write(tmp_path / "a")) == vocabulary_fingerprint(renamed)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"vocab": {"a": 0, "c": 1, "ab": 2}}, "token 1 is 'b' in the target and 'c' in the draft"),
        ({"vocab": {"a": 0, "b": 1}}, "token 2 is 'ab' in the target and absent in the draft"),
        ({"vocab": {"a": 0, "b": 1, "ab": 2, "\n": 9}}, "token 9 is absent in the target and '\\n' in the draft"),
        ({"merges": ["b a"]}, "merge 0 is 'a+b' in the target and 'b+a' in the draft"),
        ({"merges": []}, "merge 0 is 'a+b' in the target and absent in the draft"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: dict, difference: str):
    ours, theirs = write(tmp_path / "a"), write(tmp_path / "b", model=model(**change))

    assert vocabulary_fingerprint(ours) != vocabulary_fingerprint(theirs)
    assert first_difference(ours, theirs) == difference
