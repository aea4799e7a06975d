"""MLX's group of ranks, and the network that is divided among them. Knows no calls and no messages."""

import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import msgspec

from protocol.contracts.target_hosts import TargetHosts
from protocol.errors import InputError

_CONNECT_SECONDS = 30.0


def connect(hosts: TargetHosts, rank: int) -> mx.distributed.Group:
    """MLX's group of all ranks, which must all be about to connect. Raises RuntimeError if that fails."""
    jaccl = bool(hosts.devices) and mx.distributed.is_available("jaccl")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(hosts.devices if jaccl else hosts.addresses))
        file.flush()
        os.environ["MLX_RANK"] = str(rank)
        os.environ["MLX_JACCL_COORDINATOR"] = hosts.addresses[0][0]
        os.environ["MLX_IBV_DEVICES" if jaccl else "MLX_HOSTFILE"] = file.name
        # This call holds the interpreter's lock: only the kernel can end it if a rank has died since the rendezvous.
        signal.setitimer(signal.ITIMER_REAL, _CONNECT_SECONDS)
        try:
            return mx.distributed.init(backend="jaccl" if jaccl else "ring", strict=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def divided(group: mx.distributed.Group) -> Callable[[Any], None]:
    """What divides a network among the ranks of `group`, before its weights are read."""

    def divide(network: Any) -> None:
        if not callable(getattr(network, "shard", None)):
            raise InputError(
                f"mlx-lm can't divide a model of type {network.args.model_type} among hosts: "
                "choose a Llama, Qwen2 or Qwen3 model, or leave --target-hosts out."
            )
        network.shard(group)

    return divide
