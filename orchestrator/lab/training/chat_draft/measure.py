"""Measures how often a draft guesses the target's next token on held-out answers.

python -m orchestrator.lab.training.chat_draft.measure --draft build/draft --data build/held-out-answers
"""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.lab.training.chat_draft.shards import Answers, Rows
from orchestrator.lab.training.chat_draft.target import add_target, target_folder
from orchestrator.lab.training.network import Network, load

TOP = 4


class Agreement(NamedTuple):
    """Means over the places of one temperature where the target writes the next token."""

    places: int
    first: float
    """Share of places where the draft's best token is the target's, with the same noise."""
    top: float
    """The same for the draft's TOP best tokens."""
    overlap: float
    """1 - total variation; for temperature 0 at temperature 1."""
    covered: float
    """Share of places whose token the draft's head has, or the text in front."""

    def __str__(self) -> str:
        return (
            f"{self.places} places, first guess right {self.first:.3f}, among the best {TOP} {self.top:.3f}, "
            f"1 - TV {self.overlap:.3f}, in the head {self.covered:.3f}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target(options, "folder of the model that wrote the answers")
    options.add_argument("--draft", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True, help="folder of shards that `write` made")
    options.add_argument("--rows", type=int, default=1000, help="rows that are used at most")
    options.add_argument("--threads", type=int, default=1)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    embedding = load(target_folder(arguments.target)).embed_tokens.weight.detach()
    tokens = torch.from_numpy(np.load(arguments.draft / "head_tokens.npy")).long()
    print(report(agreement(load(arguments.draft), tokens, embedding, Answers(arguments.data), arguments.rows)))


def report(found: dict[float, Agreement]) -> str:
    return "\n".join(f"temperature {temperature:g}: {each}" for temperature, each in sorted(found.items()))


@torch.no_grad()
def agreement(
    draft: Network, head_tokens: Tensor, embedding: Tensor, answers: Answers, rows: int
) -> dict[float, Agreement]:
    """By temperature; always with the same noise. `embedding` is the target's, whose rows are both heads."""
    generator = torch.Generator().manual_seed(5)
    found = defaultdict(list)
    for number in range(min(rows, len(answers))):
        batch = answers.rows(np.array([number]))
        temperature = round(batch.temperatures.item(), 3)
        found[temperature].append(_row(draft, head_tokens, embedding, batch, temperature, generator))
    return {temperature: _mean(torch.cat(each)) for temperature, each in found.items()}


def _row(
    draft: Network, head_tokens: Tensor, embedding: Tensor, batch: Rows, temperature: float, generator: torch.Generator
) -> Tensor:
    """(places, 4): the measures of `Agreement`."""
    places = batch.wanted[0]
    tokens, guessable = _guessable(head_tokens, batch)
    wanted = functional.linear(batch.hidden[0, places], embedding)
    guessed = functional.linear(draft.hidden(batch.tokens, mask=batch.mask)[0, places], embedding[tokens])
    guessed = guessed.masked_fill(~guessable[places], -torch.inf)
    scale = temperature or 1.0
    noise = -torch.empty_like(wanted).exponential_(generator=generator).log() * temperature
    choice = (wanted + noise).argmax(-1)
    scores = guessed + noise[:, tokens]
    column = torch.full((len(embedding),), -1)
    column[tokens] = torch.arange(len(tokens))
    own_score = scores.gather(1, column[choice].clamp(min=0)[:, None])
    covered = (column[choice] >= 0) & (own_score[:, 0] > -torch.inf)
    rank = (scores > own_score).sum(-1).masked_fill(~covered, len(tokens))
    p, q = (wanted / scale).softmax(-1)[:, tokens], (guessed / scale).softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    return torch.stack(((rank < 1).float(), (rank < TOP).float(), overlap, covered.float()), 1)


def _guessable(head_tokens: Tensor, batch: Rows) -> tuple[Tensor, Tensor]:
    """Tokens of the head and of the one row, and which of them (slots, tokens) can be guessed behind each slot."""
    context = batch.tokens[0].unique()
    context = context[~torch.isin(context, head_tokens)]
    seen = batch.mask[0, 0].float() @ (batch.tokens[0][:, None] == context).float() > 0
    inside = torch.ones(len(seen), len(head_tokens), dtype=torch.bool)
    return torch.cat((head_tokens, context)), torch.cat((inside, seen), 1)


def _mean(measures: Tensor) -> Agreement:
    return Agreement(len(measures), *measures.mean(0).tolist())


if __name__ == "__main__":
    main()
