"""Reads the shards that `write` made, as batches of rows; chooses the tokens of a draft's head. Knows no draft."""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

FIELDS = ("tokens", "own", "starts", "hidden", "temperatures")
EXPECTED_PLACES = 6000
"""Places whose expected next tokens count in the choice of the head's tokens."""
PLACES_AT_ONCE = 500


class Rows(NamedTuple):
    """Rows of a shard: see `write.Shard`."""

    tokens: Tensor
    wanted: Tensor
    """(rows, slots): whether the target writes the token behind this one."""
    mask: Tensor
    """(rows, 1, slots, slots): a token attends to its own text up to itself."""
    hidden: Tensor
    temperatures: Tensor
    """(rows,)"""


class Answers:
    """All rows of a folder of shards, in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []
        self._read()
        self.length = self._fields["tokens"].shape[1]

    @property
    def own(self) -> int:
        """Tokens that the target wrote."""
        return int(self._fields["own"].sum())

    def _read(self) -> None:
        files = sorted(self._folder.glob("shard-????.npz"))
        if not files:
            raise SystemExit(f"{self._folder} holds no shards: run `write` first")
        if files != self._files:
            shards = [np.load(file) for file in files]
            self._fields = {name: np.concatenate([shard[name] for shard in shards]) for name in FIELDS}
            self._files = files

    def __len__(self) -> int:
        return len(self._fields["tokens"])

    def rows(self, chosen: np.ndarray) -> Rows:
        fields = {name: values[chosen] for name, values in self._fields.items()}
        starts = torch.from_numpy(fields["starts"].astype(np.int64))
        slots = torch.arange(self.length)
        mask = (slots[None, :] <= slots[:, None]) & (slots >= starts[:, :, None])
        return Rows(
            torch.from_numpy(fields["tokens"].astype(np.int64)),
            torch.from_numpy(next_is_own(fields["own"], fields["starts"])),
            mask[:, None],
            torch.from_numpy(fields["hidden"]).float(),
            torch.from_numpy(fields["temperatures"]),
        )

    def batches(self, count: int, seed: int) -> Iterator[Rows]:
        """Endless; every row once an epoch. An epoch begins with the shards that are there by then."""
        rng = np.random.default_rng(seed)
        while True:
            self._read()
            order = rng.permutation(len(self))
            for at in range(0, len(order) - count + 1, count):
                yield self.rows(order[at : at + count])

    def head_tokens(self, embedding: Tensor, count: int, seed: int = 0) -> Tensor:
        """The `count` tokens that the target writes most, ascending; half by count, half by probability."""
        own = self._fields["own"]
        places = np.argwhere(next_is_own(own, self._fields["starts"]))
        places = np.random.default_rng(seed).permutation(places)[:EXPECTED_PLACES]
        written = torch.from_numpy(np.bincount(self._fields["tokens"][own], minlength=len(embedding))).float()
        expected = torch.zeros(len(embedding))
        for at in range(0, len(places), PLACES_AT_ONCE):
            row, slot = places[at : at + PLACES_AT_ONCE].T
            hidden = torch.from_numpy(self._fields["hidden"][row, slot]).float()
            expected += functional.linear(hidden, embedding).softmax(-1).sum(0)
        share = written / written.sum() + expected / expected.sum()
        return share.topk(count).indices.sort().values


def next_is_own(own: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """At the end of a text, the last token's own flag stands for the next one, which was never written."""
    same_text = starts[:, 1:] == starts[:, :-1]
    return np.concatenate((np.where(same_text, own[:, 1:], own[:, :-1]), own[:, -1:]), 1)
