"""The training loop: options, optimisers, learning rates, steps until the time is up. Knows no loss."""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.lab.training.network import Network, save

DECAY_SHARE = 0.6
"""Last share of the time, in which the rates fall linearly."""
LOWEST_RATE = 0.02
MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration, chosen for speed rather than for convergence to 1."""


def parser(
    description: str | None, *, batch: int, minutes: float, lr: float, muon_lr: float
) -> argparse.ArgumentParser:
    """The options of every training program, with these defaults."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--data", type=Path, default=Path("build"), help="folder of shards")
    result.add_argument("--out", type=Path, required=True, help="folder of the model")
    result.add_argument("--length", type=int, default=512, help="tokens in a row of a batch")
    result.add_argument("--batch", type=int, default=batch, help="rows")
    result.add_argument("--minutes", type=float, default=minutes)
    result.add_argument("--lr", type=float, default=lr, help="of Adam, for embedding and norms")
    result.add_argument("--muon-lr", type=float, default=muon_lr, help="of Muon, for matrices")
    result.add_argument("--warm-up", type=int, default=60, help="steps in which the rates rise")
    result.add_argument("--report-minutes", type=float, default=2.0, help="time between measurements")
    result.add_argument("--threads", type=int, default=2)
    result.add_argument("--seed", type=int, default=0)
    return result


def train(network: Network, losses: Iterator[Tensor], options: argparse.Namespace, report: Callable[[], str]) -> None:
    """One step for each loss until the time is up; saves at every report. `losses` must be lazy."""
    optimizers = optimizers_for(network, options)
    began, reported, seen = time.monotonic(), 0.0, 0
    for step, loss in enumerate(losses):
        spent = time.monotonic() - began
        if spent >= options.minutes * 60:
            break
        set_rates(optimizers, rate((step + 1) / options.warm_up, spent / (options.minutes * 60)))
        update(network, optimizers, loss)
        seen += options.batch * options.length
        if spent - reported > options.report_minutes * 60:
            reported = spent
            print(f"{spent:.0f} s, {seen / 1e6:.2f} M tokens, loss {loss:.3f}, {report()}", flush=True)
            save(network, options.out)
    save(network, options.out)
    print(f"{report()} after {seen:,} tokens")


def optimizers_for(network: Network, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    embedding = network.embed_tokens.weight
    matrices = [weight for weight in network.parameters() if weight.dim() == 2 and weight is not embedding]
    norms = [weight for weight in network.parameters() if weight.dim() < 2]
    adam = torch.optim.AdamW([embedding, *norms], lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [adam, Muon(matrices, options.muon_lr)]
    for group in groups(optimizers):
        group["full_rate"] = group["lr"]
    return optimizers


def rate(warm: float, share: float) -> float:
    """Share of the full learning rate after `warm` of the warm-up and `share` of the time: up, constant, down."""
    return max(LOWEST_RATE, min(1.0, warm) * min(1.0, (1 - share) / DECAY_SHARE))


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


class Muon(torch.optim.Optimizer):
    """The optimiser of hidden matrices (Jordan et al. 2024): momentum, made orthogonal by Newton-Schulz."""

    def __init__(self, matrices: Iterable[Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.mul_(MOMENTUM).add_(matrix.grad)
                direction = orthogonal(matrix.grad.add(momentum, alpha=MOMENTUM)).float()
                rate = group["lr"] * max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * WEIGHT_DECAY).add_(direction, alpha=-rate)


def orthogonal(update: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, by five steps in bfloat16."""
    tall = update.shape[0] > update.shape[1]
    result = (update.T if tall else update).to(torch.bfloat16)
    result = result / (result.norm() + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = result @ result.T
        result = a * result + (b * gram + c * gram @ gram) @ result
    return result.T if tall else result
