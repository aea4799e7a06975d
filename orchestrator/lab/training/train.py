"""Trains one model of the demo pair on the files of `prepare`. Two processor cores are enough.

Needs torch and safetensors (the extra `training`). First the target (50 minutes), then the first draft, which
starts from two of the target's layers and is distilled from it (20 minutes):

    python -m orchestrator.lab.training.train --data build --out build/target --layers 6 --minutes 50
    python -m orchestrator.lab.training.train --data build --out build/draft --layers 2 --minutes 20 \
        --teacher build/target --keep 0,5 --lr 2e-3 --muon-lr 0.01
"""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.lab.training.network import Network, Shape, copy_tokenizer, load
from orchestrator.lab.training.training_loop import log_probabilities, parser, random_rows, tokens, train

TEACHER_SHARE = 0.9


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    teacher = load(options.teacher) if options.teacher else None
    network = Network(
        Shape(options.hidden, options.layers, options.heads, options.kv_heads, options.feed_forward, vocabulary=4096)
    )
    if teacher is not None and options.keep:
        inherit(network, teacher, [int(layer) for layer in options.keep.split(",")])
    print(f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters", flush=True)
    held_out = tokens(options.data / "held_out.npy")
    batches = random_batches(tokens(options.data / "train.npy"), options)
    losses = (loss_of(network, teacher, inputs, wanted) for inputs, wanted in batches)
    train(network, losses, options, lambda: f"held out {held_out_loss(network, held_out):.3f}")
    copy_tokenizer(options.data, options.out)


def arguments() -> argparse.Namespace:
    options = parser(__doc__, batch=8, minutes=50.0, lr=1.5e-3, muon_lr=0.02)
    options.add_argument("--teacher", type=Path, help="folder of a model to learn from")
    options.add_argument("--keep", default="", help="layers of the teacher to start from, for instance 0,5")
    options.add_argument("--hidden", type=int, default=256)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--kv-heads", type=int, default=2)
    options.add_argument("--feed-forward", type=int, default=704)
    return options.parse_args()


def inherit(network: Network, teacher: Network, layers: list[int]) -> None:
    """Copy the teacher's embedding, norm and the given layers."""
    state = teacher.state_dict()
    for index, layer in enumerate(layers):
        prefix, source = f"layers.{index}.", f"layers.{layer}."
        inherited = {name: weight for name, weight in state.items() if name.startswith(source)}
        state |= {prefix + name.removeprefix(source): weight for name, weight in inherited.items()}
    network.load_state_dict({name: state[name] for name in network.state_dict()})


def random_batches(text: Tensor, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of (inputs, next tokens) from random places."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    while True:
        rows = random_rows(text, options.batch, options.length + 1, generator)
        yield rows[:, :-1], rows[:, 1:]


def loss_of(network: Network, teacher: Network | None, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy; with a teacher, mostly the KL divergence from the teacher's distribution."""
    found = log_probabilities(network, inputs)
    loss = functional.nll_loss(found, wanted.flatten())
    if teacher is None:
        return loss
    with torch.no_grad():
        taught = log_probabilities(teacher, inputs)
    divergence = functional.kl_div(found, taught, log_target=True, reduction="batchmean")
    return TEACHER_SHARE * divergence + (1 - TEACHER_SHARE) * loss


@torch.no_grad()
def held_out_loss(network: Network, text: Tensor, length: int = 512, rows: int = 40) -> float:
    """Nats a token on held-out text."""
    found = [
        functional.nll_loss(
            log_probabilities(network, text[None, start : start + length]), text[start + 1 : start + length + 1]
        )
        for start in range(0, min(len(text) - length - 1, rows * length), length)
    ]
    return torch.stack(found).mean().item()


if __name__ == "__main__":
    main()
