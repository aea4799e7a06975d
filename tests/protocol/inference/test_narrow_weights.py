"""A network whose weights are read from 16 bits computes the same numbers, and its copies go when it goes."""

import os
import platform
import subprocess
import sys

import pytest

from orchestrator.machine.blas.library import blas_environment
from protocol.paths import NARROW_VARIABLE
from tests.support.paths import DEMO_TARGET

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="bridges are for these"
)
_MODEL = """
import sys
from pathlib import Path
import mlx.core as mx
from protocol.inference.light_import import import_models
import_models()
import protocol.inference.language_model as loading
from protocol.inference.narrow_weights import keep_narrow

copied = []
loading.keep_narrow = lambda network: copied.append(keep_narrow(network))
model = loading.LanguageModel.load(Path(sys.argv[1]))
sequence = model.sequence()
found = [sequence.prefill(list(range(3, 40))), sequence.evaluate([7], [-1]), sequence.evaluate([9, 8, 5], [0, 1, 1])]
print(copied[0])
print(*(float(mx.abs(logits).sum()).hex() for logits in found))
"""
_LAYER = """
import gc, weakref
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from protocol.inference.narrow_weights import keep_narrow

def layer(value):
    made = nn.Linear(512, 256, bias=False)
    made.weight = mx.full((256, 512), value)
    mx.eval(made.weight)
    return made
"""
_ONE = "print(keep_narrow(layer(0.5)))"
_SEVERAL = """
copies, empty = [], np.empty
def recorded(*given):
    made = empty(*given)
    copies.append(weakref.ref(made))
    return made
np.empty = recorded

half, third, small = layer(0.5), layer(1 / 3), nn.Linear(8, 8)
mx.eval(small.parameters())
assert keep_narrow(half) == 2 * 256 * 512
assert keep_narrow(third) == keep_narrow(small) == 0
assert copies[0]() is not None
weight, x = half.weight, mx.ones((1, 512))
assert float((x @ weight.T)[0, 0]) == 256
del half
gc.collect()
assert copies[0]() is None
assert float((x @ weight.T)[0, 0]) == 256
"""


def run(program: str, memory: int, environment: dict[str, str]) -> list[str]:
    command = [sys.executable, "-c", program, str(DEMO_TARGET)]
    variables = {**os.environ, **environment, "OPENBLAS_NUM_THREADS": "2", NARROW_VARIABLE: str(memory)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_logits_are_the_same_to_the_last_bit():
    copied, logits = run(_MODEL, 1 << 30, blas_environment())
    none, right = run(_MODEL, 0, blas_environment())

    assert int(copied) > 8 << 20
    assert none == "0"
    assert logits == right


def test_copies_beyond_the_memory_allowed_are_not_made():
    bytes = 2 * 256 * 512
    assert run(_LAYER + _ONE, bytes, blas_environment()) == [str(bytes)]
    assert run(_LAYER + _ONE, bytes - 1, blas_environment()) == ["0"]


def test_without_the_bridge_there_are_no_copies():
    assert run(_LAYER + _ONE, 1 << 30, {}) == ["0"]


def test_only_what_16_bits_hold_is_copied_and_copies_go_with_their_network():
    run(_LAYER + _SEVERAL, 1 << 30, blas_environment())
