"""Models for mlx-lm's own loops with the forward times of a device profile. Only the baseline's process imports it.

All forwards run on one device, one after the other. A forward is delayed where its result is first needed: before the
next forward, or when its tokens are returned. A loop that computes one token ahead keeps its advantage.
"""

import time
from typing import Any, NamedTuple

import mlx.core as mx

from protocol.messages.worker import Paced
from protocol.worker.pacing import DevicePace, ForwardPart, Pacer


class _Call(NamedTuple):
    pacer: Pacer
    began: float
    part: ForwardPart
    logits: Any


class PacedDevice:
    """The device that all models of one generation share."""

    def __init__(self) -> None:
        self._pending: _Call | None = None
        self._pacers: list[Pacer] = []

    def network(self, network: Any, pace: DevicePace) -> Any:
        """`network` with the pace of this device."""
        self._pacers.append(Pacer(pace))
        return PacedNetwork(network, self, self._pacers[-1])

    def settle(self) -> None:
        """Wait until the device would have finished the pending call, if there is one."""
        if self._pending is not None:
            call, self._pending = self._pending, None
            mx.eval(call.logits)
            call.pacer.forward(call.began, (call.part,))

    def call(self, network: Any, pacer: Pacer, tokens: mx.array, **keywords: Any) -> mx.array:
        self.settle()
        began, part = time.perf_counter(), ForwardPart(tokens.size, _context(keywords.get("cache")))
        logits = network(tokens, **keywords)
        mx.async_eval(logits)
        self._pending = _Call(pacer, began, part, logits)
        return logits

    def take(self) -> Paced:
        """The times of all calls that were settled since the last `take`."""
        return sum(filter(None, (pacer.take() for pacer in self._pacers)), Paced())


class PacedNetwork:
    """A paced model: calls are paced, everything else is the model's."""

    def __init__(self, network: Any, device: PacedDevice, pacer: Pacer) -> None:
        self._network = network
        self._device = device
        self._pacer = pacer

    def __call__(self, tokens: mx.array, **keywords: Any) -> mx.array:
        """(B, L) tokens to (B, L, V) logits."""
        return self._device.call(self._network, self._pacer, tokens, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def _context(cache: Any) -> int:
    """Tokens in mlx-lm's cache, which has an entry for each layer. A batch's rows are padded to the longest."""
    offset = getattr(cache[0], "offset", 0) if cache else 0
    return int(mx.max(offset)) if isinstance(offset, mx.array) else int(offset)
