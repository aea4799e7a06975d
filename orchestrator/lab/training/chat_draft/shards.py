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

from draft_worker.training.corpus.rows import Shards

EXPECTED_ROWS = 64
"""Rows whose expected next tokens count in the choice of the head's tokens."""


class Rows(NamedTuple):
    """Rows of a shard: see `draft_worker.training.corpus.rows.Row`."""

    tokens: Tensor
    wanted: Tensor
    """(rows, slots): whether the target writes the token behind this one."""
    mask: Tensor
    """(rows, 1, slots, slots): a token attends to its own text up to itself."""
    hidden: Tensor
    """(rows, slots, size): the target's states behind its final norm."""
    temperatures: Tensor
    """(rows,)"""


class Answers:
    """All rows of a work folder. Files are mapped, not loaded."""

    def __init__(self, folder: Path) -> None:
        self._shards = Shards(folder)
        self._known = self._shards.refresh()
        if not self._known:
            raise SystemExit(f"{folder} holds no shards: run `write` first")

    @property
    def own(self) -> int:
        """Tokens of answers."""
        return self._shards.own

    def __len__(self) -> int:
        return self._shards.count(self._known)

    def rows(self, chosen: np.ndarray) -> Rows:
        found = [self._shards.row(int(number)) for number in chosen]
        tokens, starts, wanted = (
            np.stack([getattr(row, name) for row in found]) for name in ("tokens", "starts", "wanted")
        )
        slots = torch.arange(tokens.shape[1])
        mask = (slots[None, :] <= slots[:, None]) & (slots >= torch.from_numpy(starts.astype(np.int64))[:, :, None])
        return Rows(
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(wanted),
            mask[:, None],
            torch.from_numpy(np.stack([row.states[:, -1] for row in found])),
            torch.tensor([row.temperature for row in found]),
        )

    def batches(self, count: int, seed: int) -> Iterator[Rows]:
        """Endless; every row once an epoch. An epoch begins with the shards that are there by then."""
        rng = np.random.default_rng(seed)
        while True:
            self._known = self._shards.refresh()
            order = rng.permutation(len(self))
            for at in range(0, len(order) - count + 1, count):
                yield self.rows(order[at : at + count])

    def head_tokens(self, embedding: Tensor, count: int, seed: int = 0) -> Tensor:
        """The `count` tokens that the target writes most, ascending; half by count, half by probability."""
        written = torch.from_numpy(self._shards.written(len(embedding))).float()
        expected = torch.zeros(len(embedding))
        for number in np.random.default_rng(seed).permutation(len(self))[:EXPECTED_ROWS]:
            rows = self.rows(np.array([number]))
            expected += functional.linear(rows.hidden[rows.wanted], embedding).softmax(-1).sum(0)
        share = written / written.sum() + expected / expected.sum()
        return share.topk(count).indices.sort().values
