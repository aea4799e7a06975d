"""Distils a draft from a target: it may insert layers of the target into a smaller draft, then trains it.

Needs torch and safetensors (the extra `training`), and two folders that `train` made:

    python -m orchestrator.lab.training.distil --data build --target build/target --draft build/draft \
        --insert 2 --out build/draft-3
    python -m orchestrator.lab.training.distil --data build --target build/target --draft build/draft-3 \
        --out build/draft-3b --lr 7e-4 --muon-lr 0.004 --seed 1

The first run also generates text with the target and saves it in the data folder as written.npy (a quarter of an
hour on one core). Later runs read that file. Delete it when the target changes.
"""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.lab.training.network import Cache, Layer, Network, copy_tokenizer, load
from orchestrator.lab.training.training_loop import log_probabilities, parser, random_rows, tokens, train

INSERTED_SHARE = 0.1
"""Initial scale of an inserted layer's output, relative to its scale in the target."""
DIVERGENCE_WEIGHT = 0.6
PROMPT = 128
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)
WRITERS = 32
"""Rows that the target generates at once."""
HELD_OUT_ROWS = 40


class Agreement(NamedTuple):
    """How often a draft agrees with its target; means over positions."""

    shared_noise: float
    """Share of positions with the same token when both sample with the same noise at temperature 1."""
    greedy: float
    divergence: float
    """KL(target, draft), nats."""
    variation: float

    def __str__(self) -> str:
        return (
            f"held out: first guess right {self.shared_noise:.3f} with shared noise, {self.greedy:.3f} greedy, "
            f"KL {self.divergence:.3f}, TV {self.variation:.3f}"
        )


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    target, draft = load(options.target), load(options.draft)
    layers = [int(layer) for layer in options.insert.split(",") if layer]
    check(target, draft, layers)
    held_out = tokens(options.data / "held_out.npy")
    print(f"given draft, {agreement(target, draft, held_out)}", flush=True)
    if layers:
        insert(draft, target, layers)
        print(f"with {len(draft.layers)} layers, {agreement(target, draft, held_out)}", flush=True)
    library = tokens(options.data / "train.npy")
    batches = mixed_batches(library, generated_text(target, library, options), options)
    losses = (loss_of(target, draft, inputs) for inputs in batches)
    train(draft, losses, options, lambda: str(agreement(target, draft, held_out)))
    copy_tokenizer(options.target, options.out)


def arguments() -> argparse.Namespace:
    options = parser(__doc__, batch=4, minutes=36.0, lr=1e-3, muon_lr=0.006)
    options.add_argument("--target", type=Path, required=True, help="folder of the model to learn from")
    options.add_argument("--draft", type=Path, required=True, help="folder of the draft to begin from")
    options.add_argument(
        "--insert", default="", help="layers of the target to insert before the draft's last layer, for instance 2"
    )
    options.add_argument("--written", type=int, default=1920, help="rows that the target generates, if there are none")
    return options.parse_args()


def check(target: Network, draft: Network, layers: list[int]) -> None:
    if replace(draft.shape, layers=target.shape.layers) != target.shape:
        raise SystemExit(f"the draft must have the target's sizes but for layers: {draft.shape} and {target.shape}")
    if not all(0 <= layer < target.shape.layers for layer in layers):
        raise SystemExit(f"--insert: the target's layers are 0 to {target.shape.layers - 1}")


def insert(draft: Network, target: Network, layers: list[int]) -> None:
    """Insert layers of the target before the draft's last layer, scaled down so that the output changes little."""
    for number in layers:
        layer = copy.deepcopy(target.layers[number])
        assert isinstance(layer, Layer)
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data.mul_(INSERTED_SHARE)
        draft.layers.insert(len(draft.layers) - 1, layer)
    draft.shape = replace(draft.shape, layers=len(draft.layers))


def generated_text(target: Network, library: Tensor, options: argparse.Namespace) -> Tensor:
    """(rows, tokens): the target's continuations of library code, which a draft has to guess in use."""
    path: Path = options.data / "written.npy"
    if not path.exists():
        generator = torch.Generator().manual_seed(options.seed + 1)
        rows: list[Tensor] = []
        for done in range(0, options.written, WRITERS):
            count = min(WRITERS, options.written - done)
            prompts = random_rows(library, count, PROMPT, generator)
            chosen = torch.randint(0, len(TEMPERATURES), (count,), generator=generator)
            rows.append(generate(target, prompts, options.length, torch.tensor(TEMPERATURES)[chosen], generator))
            print(f"written: {done + count} rows of {options.written}", flush=True)
        np.save(path, torch.cat(rows).numpy().astype(np.uint16))
    written = tokens(path)
    if written.shape[1] < options.length:
        raise SystemExit(f"{path} has rows of {written.shape[1]} tokens, --length wants more: delete the file")
    return written[:, : options.length]


@torch.no_grad()
def generate(target: Network, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """The prompts (rows, tokens) continued to `length` tokens, each row at its own temperature."""
    caches = [Cache() for _ in target.layers]
    rows = unread = prompts
    while rows.shape[1] < length:
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(unread, caches)[:, -1].float()
        unread = (logits + temperatures[:, None] * gumbel(logits, generator)).argmax(-1, keepdim=True)
        rows = torch.cat((rows, unread), 1)
    return rows


def gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise: the argmax of logits plus noise is a sample of the softmax."""
    return -torch.empty_like(like).exponential_(generator=generator).log()


def mixed_batches(library: Tensor, written: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """Endless batches: half of the rows from the library, half generated by the target."""
    generator = torch.Generator().manual_seed(options.seed + 2)
    half = options.batch // 2
    while True:
        chosen = torch.randint(0, len(written), (half,), generator=generator)
        yield torch.cat((random_rows(library, options.batch - half, options.length, generator), written[chosen]))


def loss_of(target: Network, draft: Network, inputs: Tensor) -> Tensor:
    """KL for the whole distribution, total variation for the acceptance of the first guess."""
    with torch.no_grad():
        wanted = log_probabilities(target, inputs)
    found = log_probabilities(draft, inputs)
    return DIVERGENCE_WEIGHT * divergence(wanted, found) + variation(wanted, found)


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """KL of rows of log probabilities, nats."""
    return functional.kl_div(found, wanted, log_target=True, reduction="batchmean")


def variation(wanted: Tensor, found: Tensor) -> Tensor:
    """Total variation of rows of log probabilities."""
    return 0.5 * (wanted.exp() - found.exp()).abs().sum(-1).mean()


@torch.no_grad()
def agreement(target: Network, draft: Network, text: Tensor, length: int = 512) -> Agreement:
    """On held-out text, always with the same noise."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for start in range(0, min(len(text) - length, HELD_OUT_ROWS * length), length):
        inputs = text[None, start : start + length]
        wanted, guessed = log_probabilities(target, inputs), log_probabilities(draft, inputs)
        noise = gumbel(wanted, generator)
        same = (wanted + noise).argmax(-1) == (guessed + noise).argmax(-1)
        same_greedy = wanted.argmax(-1) == guessed.argmax(-1)
        measures = (same.float().mean(), same_greedy.float().mean())
        found.append(torch.stack((*measures, divergence(wanted, guessed), variation(wanted, guessed))))
    return Agreement(*torch.stack(found).mean(0).tolist())


if __name__ == "__main__":
    main()
