"""Trains a draft of a few of the target's layers on the target's answers.

    python -m orchestrator.lab.training.chat_draft.distil --data build/answers --held-out build/held-out-answers \
        --layers 0,1,29 --out build/draft --minutes 60

Shards that appear during the training join at the next epoch. The embedding is the target's and stays as it is. So
does the head, which is the embedding's rows for `--head` tokens; head_tokens.npy in the folder of the draft names
them. `--start` continues from a draft, with its head if `--head-tokens` names its file.
"""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.lab.training.chat_draft.measure import agreement, report
from orchestrator.lab.training.chat_draft.shards import Answers, Rows
from orchestrator.lab.training.chat_draft.target import add_target, target_folder
from orchestrator.lab.training.network import Network, copy_tokenizer, load
from orchestrator.lab.training.training_loop import parser, train

DIVERGENCE_WEIGHT = 0.6
GIVEN_SHARE = 0.15
"""Share of the places in prompts that count: the draft reads them, and need not guess them."""
REPORTED_ROWS = 12


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    folder = target_folder(options.target)
    target = load(folder)
    embedding = target.embed_tokens.weight.detach()
    answers, held_out = Answers(options.data), Answers(options.held_out)
    options.length = answers.rows(np.array([0])).tokens.shape[1]
    options.out.mkdir(parents=True, exist_ok=True)
    draft = load(options.start) if options.start else pruned(target, [int(each) for each in options.layers.split(",")])
    if options.head_tokens:
        head_tokens = torch.from_numpy(np.load(options.head_tokens)).long()
    else:
        head_tokens = answers.head_tokens(embedding, options.head)
    del target
    draft.embed_tokens.weight.requires_grad_(False)
    np.save(options.out / "head_tokens.npy", head_tokens.numpy().astype(np.int32))
    copy_tokenizer(folder, options.out)
    trained = sum(weight.numel() for weight in draft.parameters() if weight.requires_grad)
    print(f"{len(answers)} rows, {answers.own:,} own tokens, {trained / 1e6:.1f} M trained weights", flush=True)

    def measured() -> str:
        return "held out:\n" + report(agreement(draft, head_tokens, embedding, held_out, REPORTED_ROWS))

    train(draft, losses(draft, head_tokens, embedding, answers, options), options, measured)


def arguments() -> argparse.Namespace:
    options = parser(__doc__, batch=8, minutes=60.0, lr=1e-3, muon_lr=0.006)
    add_target(options, "folder of the model to learn from")
    options.add_argument("--held-out", type=Path, required=True, help="folder of held-out shards")
    options.add_argument("--layers", default="0,1,29", help="the target's layers that the draft begins with")
    options.add_argument("--head", type=int, default=8192, help="tokens that the draft can guess")
    options.add_argument("--head-tokens", type=Path, help="file of a draft's, to keep them; else the text's are chosen")
    options.add_argument("--start", type=Path, help="folder of a draft to continue from")
    return options.parse_args()


def pruned(target: Network, layers: list[int]) -> Network:
    """A draft that begins with the target's embedding, norm and these of its layers."""
    draft, state = Network(replace(target.shape, layers=len(layers))), target.state_dict()
    for index, layer in enumerate(layers):
        prefix, source = f"layers.{index}.", f"layers.{layer}."
        inherited = {name: weight for name, weight in state.items() if name.startswith(source)}
        state |= {prefix + name.removeprefix(source): weight for name, weight in inherited.items()}
    draft.load_state_dict({name: state[name] for name in draft.state_dict()})
    return draft


def losses(
    draft: Network, head_tokens: Tensor, embedding: Tensor, answers: Answers, options: argparse.Namespace
) -> Iterator[Tensor]:
    """The head's tokens and those of the rows: the worker's head has a context's tokens too."""
    for rows in answers.batches(options.batch, options.seed + 1):
        counted = rows.wanted | (torch.rand(rows.wanted.shape) < GIVEN_SHARE)
        head = embedding[torch.cat((head_tokens, rows.tokens.flatten())).unique()]
        with torch.autocast("cpu", torch.bfloat16):
            guessed = functional.linear(draft.hidden(rows.tokens, mask=rows.mask)[counted], head).float()
            wanted = functional.linear(rows.hidden[counted], head).float()
        yield loss_of(wanted, guessed, temperatures(rows)[counted])


def temperatures(rows: Rows) -> Tensor:
    """(rows, slots)"""
    return rows.temperatures[:, None].expand(rows.tokens.shape)


def loss_of(wanted: Tensor, guessed: Tensor, temperature: Tensor) -> Tensor:
    """Mean over places of 0.6 KL + TV at the temperature of the text; in greedy text KL at 1 + cross entropy.

    `wanted` and `guessed` are (places, tokens of the head) logits: the head stands for the whole vocabulary.
    """
    cold = temperature == 0
    scale = torch.where(cold, 1.0, temperature)[:, None]
    p, q = (wanted / scale).log_softmax(-1), (guessed / scale).log_softmax(-1)
    divergence = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    variation = 0.5 * (p.exp() - q.exp()).abs().sum(-1)
    greedy = functional.cross_entropy(guessed, wanted.argmax(-1), reduction="none")
    return (DIVERGENCE_WEIGHT * divergence + torch.where(cold, greedy, variation)).mean()


if __name__ == "__main__":
    main()
