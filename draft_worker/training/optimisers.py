"""Muon for matrices, AdamW for the rest, and the learning rate of a step. Knows no loss."""

import math
from typing import Any

import mlx.optimizers as optim

MUON_RATE, ADAM_RATE = 0.01, 2e-3
_LOWEST = 0.02
"""Share of the full rate at the end."""
_LONGEST_GRADIENT = 1.0


class Optimisers:
    """Muon (Jordan et al. 2024) gives every matrix an orthogonal step; norms need Adam."""

    def __init__(self, parameters: dict) -> None:
        self._muon = optim.Muon(MUON_RATE, weight_decay=0.0)
        self._adam = optim.AdamW(ADAM_RATE, betas=[0.9, 0.95], weight_decay=0.0)
        self._both = optim.MultiOptimizer([self._muon, self._adam], [lambda _, array: array.ndim == 2])
        self._both.init(parameters)

    @property
    def state(self) -> dict:
        return self._both.state

    @state.setter
    def state(self, state: dict) -> None:
        self._both.state = state

    def step(self, parameters: dict, gradients: dict, share: float) -> dict:
        """New parameters. `share` of the full rates."""
        self._muon.learning_rate = MUON_RATE * share
        self._adam.learning_rate = ADAM_RATE * share
        clipped: Any = optim.clip_grad_norm(gradients, _LONGEST_GRADIENT)[0]
        changed: Any = self._both.apply_gradients(clipped, parameters)
        return changed


def rate(warm: float, share: float) -> float:
    """Share of the full rate, after `warm` of the warm-up and `share` of the training: linearly up, a cosine down."""
    return min(1.0, warm) * (_LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
