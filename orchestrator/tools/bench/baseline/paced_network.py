"""Models for mlx-lm's own loops that take as long as another device would. Only the bench's child may import it.

All calls run on one device, one after the other. A call is held back where its result is first needed: before the
next call, or when its tokens are handed over. So a loop that asks for one token ahead loses nothing by it.
"""

import time
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.messages.worker import Paced
from protocol.worker.pacing import DevicePace, Pacer


class _Call(NamedTuple):
    pacer: Pacer
    began: float
    tokens: int
    logits: Any


class PacedDevice:
    """What all models of one generation share."""

    def __init__(self) -> None:
        self._under_way: _Call | None = None
        self._pacers: list[Pacer] = []

    def network(self, network: Any, pace: DevicePace) -> Any:
        """`network` as this device runs it."""
        self._pacers.append(Pacer(pace))
        return PacedNetwork(network, self, self._pacers[-1])

    def settle(self) -> None:
        """Wait until the call under way, if there is one, would be done."""
        if self._under_way is not None:
            call, self._under_way = self._under_way, None
            mx.eval(call.logits)
            call.pacer.forward(call.began, call.tokens)

    def call(self, network: Any, pacer: Pacer, tokens: mx.array, **keywords: Any) -> mx.array:
        self.settle()
        began = time.perf_counter()
        logits = network(tokens, **keywords)
        mx.async_eval(logits)
        self._under_way = _Call(pacer, began, tokens.size, logits)
        return logits

    def take(self) -> Paced:
        """All calls that were settled since the last time."""
        return sum(filter(None, (pacer.take() for pacer in self._pacers)), Paced())


class PacedNetwork:
    """The model itself in everything but calls."""

    def __init__(self, network: Any, device: PacedDevice, pacer: Pacer) -> None:
        self._network = network
        self._device = device
        self._pacer = pacer

    def __call__(self, tokens: mx.array, **keywords: Any) -> mx.array:
        """(B, L) tokens to (B, L, V) logits."""
        return self._device.call(self._network, self._pacer, tokens, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)
