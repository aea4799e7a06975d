"""A tiny random target in a folder, and rows of text with its states, as a training reads them."""

from pathlib import Path
from typing import Any

import numpy as np

from draft_worker.training.answers import record_states
from draft_worker.training.language import LanguageTraining
from draft_worker.training.rows import HELD_OUT, Answers, Row, Shards, save_answers
from draft_worker.training.target import Target
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
    record_states(target, folder, lambda _: None)
    return folder


def trainee(target: Target, work: Path) -> tuple[LanguageTraining, Row]:
    """A drafter before its training, and a row."""
    return LanguageTraining(target, np.arange(0, 2 * HEAD, 2), 3), Shards(work).row(1)
