"""A tiny random target in a folder, and rows of text with its states, as a training reads them."""

import lzma
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from draft_worker.training.kinds import KINDS, Training
from draft_worker.training.own_text import OwnText
from draft_worker.training.rows import HELD_OUT, Answers, Row, Shards, save_answers
from draft_worker.training.states import record_states
from draft_worker.training.target import Target
from protocol.contracts.training import TrainedKind
from protocol.messages.features import FINAL
from tests.support.models.tiny_models import VOCABULARY, network, write_model
from tests.support.models.tokenizer_files import write_tokenizer

LAYERS, SLOTS, HEAD = 6, 40, 30


def write_target(folder: Path, layers: int = LAYERS, seed: int = 0) -> Path:
    """Llama with tied ends."""
    return write_as_target(folder, network("llama", seed, num_hidden_layers=layers, tie_word_embeddings=True))


def write_as_target(folder: Path, model: Any) -> Path:
    """A stock mlx-lm model."""
    return write_model(write_tokenizer(folder), model, eos_token_id=3)


def write_work(folder: Path, target: Target, rows: int = 6) -> Path:
    """Shards to train on and one held out, of random text: two texts a row, of which the target wrote some tokens."""
    random = np.random.default_rng(1)
    for part, count in ((folder, rows), (folder / HELD_OUT, 3)):
        tokens = random.integers(4, VOCABULARY - 1, (count, SLOTS))
        own = np.broadcast_to(np.arange(SLOTS) % 20 >= 5, tokens.shape)
        starts = np.broadcast_to(np.arange(SLOTS) // 20 * 20, tokens.shape)
        save_answers(part, 0, Answers(tokens, own, starts, np.resize([0.0, 0.7, 1.0], count)))
    outputs = {output for kind in KINDS.values() for output in kind.outputs(target, 0)}
    record_states(target, folder, (*sorted(outputs), FINAL), lambda _: None)
    return folder


def trainee(kind: TrainedKind, target: Target, work: Path) -> tuple[Training, Row]:
    """A drafter before its training, and a row."""
    mx.random.seed(0)
    shards = Shards(work)
    head = np.arange(0, 2 * HEAD, 2)
    return KINDS[kind].training(target, head, shards.outputs, 0), shards.row(1)


def write_own_text(path: Path, texts: list[OwnText]) -> None:
    """As `read_own_text` reads it."""
    tokens = np.concatenate([each.tokens for each in texts])
    kinds = np.concatenate([each.kinds for each in texts])
    begins = np.flatnonzero(np.diff(kinds, prepend=255))
    parts = [
        np.array([len(texts), len(tokens)], "<u4"),
        np.array([each.temperature for each in texts], "<f2"),
        np.array([len(each.tokens) for each in texts], "<u2"),
        tokens.astype("<u2"),
        np.array([len(begins)], "<u4"),
        np.diff(begins, append=len(kinds)).astype("<u2"),
        kinds[begins].astype("u1"),
    ]
    path.write_bytes(lzma.compress(b"".join(part.tobytes() for part in parts), preset=9 | lzma.PRESET_EXTREME))
