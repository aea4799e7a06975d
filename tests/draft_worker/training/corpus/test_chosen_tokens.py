"""Tokens that a training keeps: those of its head, and its mask."""

from pathlib import Path

import numpy as np
import pytest

from draft_worker.training.preparation import head_tokens, kept_head_tokens, mask_token
from protocol.errors import InputError

_COUNTS = np.array([5, 0, 7, 1, 0, 9])


def test_the_tokens_written_most_are_kept_while_counts_grow(tmp_path: Path):
    assert head_tokens(tmp_path, 3, _COUNTS).tolist() == [0, 2, 5]

    assert head_tokens(tmp_path, 3, _COUNTS[::-1]).tolist() == [0, 2, 5]
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["head_tokens.npy"]


def test_the_mask_is_kept_while_counts_grow(tmp_path: Path):
    assert mask_token(tmp_path, _COUNTS) == 4

    assert mask_token(tmp_path, np.array([0, 3, 7, 1, 2, 9])) == 4


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([0, 5, 2], "no ascending tokens below 6"),
        ([0, 2, 6], "no ascending tokens below 6"),
        ([0.0, 2.0, 3.0], "no ascending tokens below 6"),
        ([0, 2], "holds 2 tokens instead of 3: pass the same --head"),
    ],
)
def test_other_tokens_than_a_training_s_are_refused(tokens: list[float], words: str, tmp_path: Path):
    (tmp_path / "training").mkdir()
    np.save(tmp_path / "training" / "head_tokens.npy", np.array(tokens))

    with pytest.raises(InputError, match=f"{words}.*another folder as --out"):
        kept_head_tokens(tmp_path, 3, 6)


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00v\x00"])
def test_a_part_of_a_file_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "head_tokens.npy").write_bytes(content)
    (tmp_path / "training" / "mask_token.json").write_bytes(b"9")

    with pytest.raises(InputError, match=r"head_tokens\.npy is damaged"):
        kept_head_tokens(tmp_path, 3, 6)
    with pytest.raises(InputError, match=r"mask_token\.json is damaged"):
        mask_token(tmp_path, _COUNTS)
