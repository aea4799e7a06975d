"""The Muon optimiser for matrices (Jordan et al. 2024): momentum, made orthogonal by Newton-Schulz."""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95
WEIGHT_DECAY = 0.01
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, chosen for speed rather than for convergence to 1."""


class Muon(torch.optim.Optimizer):
    """For hidden matrices only; embeddings and norms need Adam."""

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
