"""Trains one model of the demo pair on what prepare.py made. Two processor cores are enough.

Needs torch and safetensors, which the project does not install. The target (50 minutes), then the
draft, which begins from two of the target's layers and is distilled from it (20 minutes):

    python docs/demo-pair/train.py --data build --out build/target --layers 6 --minutes 50
    python docs/demo-pair/train.py --data build --out build/draft --layers 2 --minutes 20 \
        --teacher build/target --keep 0,5 --lr 2e-3 --muon-lr 0.01
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from muon import Muon
from network import Network, Shape, load, save
from torch import Tensor
from torch.nn import functional

WARM_UP_STEPS = 60
DECAY_SHARE = 0.6
"""The last part of the time, in which the rates fall linearly."""
LOWEST_RATE = 0.02
TEACHER_SHARE = 0.9
REPORT_SECONDS = 120


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    teacher = load(options.teacher).eval() if options.teacher else None
    network = Network(
        Shape(options.hidden, options.layers, options.heads, options.kv_heads, options.feed_forward, vocabulary=4096)
    )
    if teacher is not None and options.keep:
        inherit(network, teacher, [int(layer) for layer in options.keep.split(",")])
    print(f"{sum(parameter.numel() for parameter in network.parameters()):,} parameters", flush=True)
    train(network, teacher, options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.data / name, options.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build"), help="folder that prepare.py filled")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--teacher", type=Path, help="folder of a model to learn from")
    parser.add_argument("--keep", default="", help="the teacher's layers to begin from: 0,5")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--feed-forward", type=int, default=704)
    parser.add_argument("--length", type=int, default=512, help="tokens in a row of a batch")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=50.0)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="of Adam, for embedding and norms")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="of Muon, for matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def inherit(network: Network, teacher: Network, layers: list[int]) -> None:
    """Begin from the teacher's embedding, norm and the given layers."""
    state = teacher.state_dict()
    for index, layer in enumerate(layers):
        prefix, source = f"layers.{index}.", f"layers.{layer}."
        inherited = {name: weight for name, weight in state.items() if name.startswith(source)}
        state |= {prefix + name.removeprefix(source): weight for name, weight in inherited.items()}
    network.load_state_dict({name: state[name] for name in network.state_dict()})


def train(network: Network, teacher: Network | None, options: argparse.Namespace) -> None:
    """Steps until the time is up; saves at every report."""
    optimizers = optimizers_for(network, options)
    batches = random_batches(tokens(options.data / "train.npy"), options)
    held_out = tokens(options.data / "held_out.npy")
    began, reported, seen = time.monotonic(), 0.0, 0
    for step, (inputs, wanted) in enumerate(batches):
        spent = time.monotonic() - began
        if spent >= options.minutes * 60:
            break
        set_rates(optimizers, rate(step, spent / (options.minutes * 60)))
        loss = losses(network, teacher, inputs, wanted)
        update(network, optimizers, loss)
        seen += inputs.numel()
        if spent - reported > REPORT_SECONDS:
            reported = spent
            measured = held_out_loss(network, held_out)
            print(f"{spent:.0f} s, {seen / 1e6:.2f} M tokens, loss {loss:.3f}, held out {measured:.3f}", flush=True)
            save(network, options.out)
    save(network, options.out)
    print(f"held out {held_out_loss(network, held_out):.3f} after {seen:,} tokens")


def tokens(path: Path) -> Tensor:
    return torch.from_numpy(np.load(path).astype(np.int64))


def random_batches(text: Tensor, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of (inputs, next tokens) from random places, for ever."""
    generator = torch.Generator().manual_seed(options.seed + 1)
    while True:
        starts = torch.randint(0, len(text) - options.length - 1, (options.batch,), generator=generator)
        rows = torch.stack([text[start : start + options.length + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def losses(network: Network, teacher: Network | None, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy; with a teacher, mostly the KL divergence from its distribution."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(inputs)
    logits = logits.float().flatten(0, 1)
    loss = functional.cross_entropy(logits, wanted.flatten())
    if teacher is None:
        return loss
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        taught = teacher(inputs).float().flatten(0, 1).log_softmax(-1)
    divergence = functional.kl_div(logits.log_softmax(-1), taught, log_target=True, reduction="batchmean")
    return TEACHER_SHARE * divergence + (1 - TEACHER_SHARE) * loss


def optimizers_for(network: Network, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    embedding = network.embed_tokens.weight
    matrices = [weight for weight in network.parameters() if weight.dim() == 2 and weight is not embedding]
    norms = [weight for weight in network.parameters() if weight.dim() < 2]
    adam = torch.optim.AdamW([embedding, *norms], lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [adam, Muon(matrices, options.muon_lr)]
    for group in groups(optimizers):
        group["full_rate"] = group["lr"]
    return optimizers


def rate(step: int, share: float) -> float:
    """Share of the full learning rate at `step`, when `share` of the time is spent: up, level, down."""
    return max(LOWEST_RATE, min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (1 - share) / DECAY_SHARE))


def set_rates(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    for group in groups(optimizers):
        group["lr"] = group["full_rate"] * share


def groups(optimizers: list[torch.optim.Optimizer]) -> Iterator[dict]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def update(network: Network, optimizers: list[torch.optim.Optimizer], loss: Tensor) -> None:
    network.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def held_out_loss(network: Network, text: Tensor, length: int = 512, rows: int = 40) -> float:
    """Nats a token on text the model was not trained on."""
    with evaluating(network), torch.autocast("cpu", torch.bfloat16):
        found = [
            functional.cross_entropy(
                network(text[None, start : start + length]).float().flatten(0, 1), text[start + 1 : start + length + 1]
            )
            for start in range(0, min(len(text) - length - 1, rows * length), length)
        ]
    return torch.stack(found).mean().item()


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    network.eval()
    with torch.no_grad():
        yield
    network.train()


if __name__ == "__main__":
    main()
