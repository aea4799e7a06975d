"""A file of conversations that a target wrote: `own-text.xz` is SmolLM2-135M-Instruct's, described in
docs/lab/draft-training.md. Knows no model."""

import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draft_worker.training.rows import Answers
from protocol.bounded_files import bounded
from protocol.errors import InputError

ANSWER = 1
"""Kind of the tokens of an answer. 0: given; 2: of a user's message that the target wrote at T = 1."""


class OwnText(NamedTuple):
    """One conversation."""

    tokens: np.ndarray
    """(n,) uint16"""
    kinds: np.ndarray
    """(n,) uint8"""
    temperature: float
    """At which the answers were written."""


_MOST_MIB = 1024
"""Of what a file holds when it is unpacked."""


def read_own_text(path: Path) -> list[OwnText]:
    """All conversations of a file. Raises InputError if it can't be read or is no such file.

    It is an xz stream of: numbers of texts and of tokens (uint32), temperatures (float16), lengths (uint16), tokens
    (uint16), the number of runs of one kind (uint32), their lengths (uint16) and kinds (uint8), little-endian.
    """
    try:
        with lzma.open(path) as opened:
            content = bounded(opened, _MOST_MIB)
        texts, length = np.frombuffer(content, "<u4", 2)
        at = 8
        arrays = []
        for kind, count in (("<f2", texts), ("<u2", texts), ("<u2", length)):
            arrays.append(np.frombuffer(content, kind, count, at))
            at += arrays[-1].nbytes
        (runs,) = np.frombuffer(content, "<u4", 1, at)
        kinds = np.repeat(
            np.frombuffer(content, "u1", runs, at + 4 + 2 * int(runs)), np.frombuffer(content, "<u2", runs, at + 4)
        )
        temperatures, lengths, tokens = arrays
        if not len(tokens) == len(kinds) == lengths.sum():
            raise ValueError("its lengths contradict each other")
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise InputError(f"{path} is no file of a target's own text ({error}): pass another one as --text.") from error
    ends = np.cumsum(lengths.astype(np.int64))[:-1]
    pairs = zip(np.split(tokens, ends), np.split(kinds, ends), temperatures, strict=True)
    return [OwnText(each, kind, round(float(temperature), 2)) for each, kind, temperature in pairs]


def filled(texts: list[OwnText], slots: int) -> Answers:
    """One conversation behind another in rows of one temperature each; what reaches beyond a row's end is left out."""
    rows: list[tuple[float, list[OwnText]]] = []
    last: dict[float, int] = {}
    for text in texts:
        row = last.get(text.temperature)
        if row is None or sum(len(each.tokens) for each in rows[row][1]) >= slots:
            row = last[text.temperature] = len(rows)
            rows.append((text.temperature, []))
        rows[row][1].append(text)
    answers = Answers.blank([temperature for temperature, _ in rows], slots)
    for row, (_, each) in enumerate(rows):
        begin = 0
        for text in each:
            begin = answers.put(row, begin, text.tokens, text.kinds == ANSWER)
    return answers
