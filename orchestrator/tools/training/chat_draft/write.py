"""Lets the target answer prompts, and keeps what its draft learns from: tokens and final hidden states.

    python -m orchestrator.tools.training.chat_draft.write --prompts build/prompts.jsonl --out build/answers \
        --shards 100

A shard is a file of `--rows` rows of `--length` slots. A row holds one text after another: a chat with its answers,
until it ends, loops or is too long. Shards that exist are kept, so the program can be stopped and started again.
"""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from orchestrator.tools.training.chat_draft.decoder import Decoder
from orchestrator.tools.training.chat_draft.target import add_target, target_folder
from orchestrator.tools.training.network import load

TEMPERATURES = (0.0, 0.7, 1.0)
COLDEST = 1e-3
"""Stands for temperature 0: so cold a sample is the most probable token."""
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>"
LONGEST_PROMPT = 220
"""Tokens of all turns. The target's own tokens are what counts, and prompts take as long."""
LONGEST_ANSWER = 320
LOOP = 5
"""Tokens of the runs that are counted to find loops."""
LOOP_REPEATS = 3
BLOCK = 256
"""Probabilities that are summed at a time in sampling."""


class Chat:
    """One text of a row: the prompt's tokens are given, the target writes the others."""

    def __init__(self, turns: list[list[int]], end: int) -> None:
        self.given, self._later, self._end = list(turns[0]), turns[1:], end
        self._answer: list[int] = []
        self._runs: Counter[tuple[int, ...]] = Counter()

    def take(self, sampled: int) -> tuple[int, bool] | None:
        """The next token and whether the target wrote it; None if the text has ended before it."""
        if self.given:
            return self.given.pop(0), False
        if self._answer and self._answer[-1] == self._end:
            if not self._later:
                return None
            self.given, self._answer = list(self._later.pop(0)), []
            return self.given.pop(0), False
        run = tuple(self._answer[-LOOP:])
        if len(self._answer) >= LONGEST_ANSWER or (self._runs[run] >= LOOP_REPEATS and len(run) == LOOP):
            return None
        self._answer.append(sampled)
        self._runs[tuple(self._answer[-LOOP:])] += 1
        return sampled, True


class Shard(NamedTuple):
    """Arrays of (rows, slots); hidden states are those from which the token of the next slot is sampled."""

    tokens: np.ndarray
    own: np.ndarray
    """Whether the target wrote the token."""
    starts: np.ndarray
    """The slot in which the token's text begins."""
    hidden: np.ndarray
    """(rows, slots, size), fp16."""


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    folder = target_folder(options.target)
    target = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [encoded(json.loads(line)["turns"], tokenizer) for line in options.prompts.read_text().splitlines()]
    prompts = [turns for turns in prompts if sum(map(len, turns)) <= LONGEST_PROMPT]
    if (end := tokenizer.token_to_id(END)) is None:
        raise SystemExit(f"the target's tokenizer has no {END}: only ChatML is supported")
    options.out.mkdir(parents=True, exist_ok=True)
    precision = torch.float32 if options.float32 else torch.bfloat16
    for number in range(options.first, options.shards, options.every):
        path = options.out / f"shard-{number:04d}.npz"
        if path.exists():
            continue
        began = time.monotonic()
        chats = shuffled(prompts, end, number)
        decoder = Decoder(target, options.rows, precision)
        temperatures = torch.tensor([TEMPERATURES[row % len(TEMPERATURES)] for row in range(options.rows)])
        shard = answers(decoder, target.embed_tokens.weight.detach(), chats, temperatures, options.length, number)
        save(shard, temperatures, path)
        spent = time.monotonic() - began
        print(f"{path.name}: {shard.own.sum()} own of {shard.own.size} tokens, {spent:.0f} s", flush=True)


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target(options, "folder of the model that answers")
    options.add_argument("--prompts", type=Path, required=True, help="file that `prompts` made")
    options.add_argument("--out", type=Path, required=True, help="folder of the shards")
    options.add_argument("--shards", type=int, default=100)
    options.add_argument("--first", type=int, default=0, help="with --every: share the shards among processes")
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--float32", action="store_true", help="exact, and half as fast: for held-out text")
    options.add_argument("--threads", type=int, default=1)
    return options.parse_args()


def encoded(turns: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    texts = [("\n" if number else SYSTEM) + TURN.format(turn) for number, turn in enumerate(turns)]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def shuffled(prompts: list[list[list[int]]], end: int, seed: int) -> Iterator[Chat]:
    """Endless chats; the same for the same seed."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    while True:
        for turns in rng.sample(prompts, len(prompts)):
            yield Chat(turns, end)


def answers(
    decoder: Decoder, head: Tensor, chats: Iterator[Chat], temperatures: Tensor, length: int, seed: int
) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    rows = [next(chats) for _ in temperatures]
    sampled, starts = torch.zeros(2, len(rows), dtype=torch.int64)
    slots = []
    for slot in range(length):
        taken = []
        for row, chat in enumerate(rows):
            token = chat.take(int(sampled[row]))
            if token is None:
                rows[row], starts[row] = next(chats), slot
                token = rows[row].take(0)
            assert token is not None, "a text has a first token"
            taken.append(token)
        tokens, own = (torch.tensor(column) for column in zip(*taken, strict=True))
        hidden = decoder.step(tokens, slot, starts)
        slots.append((tokens, own, starts.clone(), hidden.half()))
        # The head takes a third of a step, and a prompt needs it only behind its last token.
        writing = torch.tensor([row for row, chat in enumerate(rows) if not chat.given], dtype=torch.int64)
        sampled[writing] = sample(functional.linear(hidden[writing], head), temperatures[writing], generator)
    tokens, own, begins, hidden = (torch.stack(column, 1).numpy() for column in zip(*slots, strict=True))
    return Shard(tokens.astype(np.uint16), own, begins.astype(np.uint16), hidden)


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token a row. Two short cumulative sums instead of one over the vocabulary, which takes long on a processor."""
    scaled = logits / temperatures.clamp(min=COLDEST)[:, None]
    shares = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    blocks = functional.pad(shares, (0, -shares.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    block = drawn(blocks.sum(-1), generator)
    return block * BLOCK + drawn(blocks[torch.arange(len(blocks)), block], generator)


def drawn(shares: Tensor, generator: torch.Generator) -> Tensor:
    """An index a row, with probability in proportion to the shares."""
    sums = shares.double().cumsum(-1)
    points = torch.rand(len(shares), 1, generator=generator, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0].clamp(max=shares.shape[1] - 1)


def save(shard: Shard, temperatures: Tensor, path: Path) -> None:
    """The file appears whole or not at all."""
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, **shard._asdict(), temperatures=temperatures.numpy())
    unfinished.rename(path)


if __name__ == "__main__":
    main()
