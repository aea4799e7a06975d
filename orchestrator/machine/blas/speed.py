"""How long a forward over several tokens takes, beside one over a single token: what decides whether speculation helps.

Measured in a child process, by products of the default target's sizes without a model.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

_PROGRAM = """
import json, statistics, time
import mlx.core as mx
hidden, keys, inner = 576, 192, 1536
shapes = [(hidden + 2 * keys, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
layers = [[mx.full(shape, 1 / shape[1]) for shape in shapes] for _ in range(6)]
mx.eval(layers)
def seconds(tokens):
    began, x = time.perf_counter(), mx.ones((tokens, hidden))
    for attention, output, up, down in layers:
        x = (x @ attention.T)[:, :hidden] @ output.T
        x = (x @ up.T)[:, :inner] @ down.T
    mx.eval(x)
    return time.perf_counter() - began
seconds(1), seconds(8)
rounds = [(seconds(1), seconds(8)) for _ in range(5)]
print(json.dumps([statistics.median(times) for times in zip(*rounds)]))
"""


class ForwardTimes(NamedTuple):
    """Seconds of six layers over one token and over eight."""

    one: float
    eight: float


def forward_times(environment: Mapping[str, str]) -> ForwardTimes | None:
    """Of a process with these variables beside this one's; None if it fails or takes a minute."""
    command = [sys.executable, "-c", _PROGRAM]
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=60)
        return msgspec.json.decode(done.stdout, type=ForwardTimes)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        return None
