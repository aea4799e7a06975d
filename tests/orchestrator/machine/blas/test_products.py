"""Laws of the bridge's own products of a few rows: right, and equal to the last bit however many rows there are."""

import os
import platform
import subprocess
import sys

import pytest

from orchestrator.machine.blas.library import blas_environment

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="bridges are for these"
)
_SETTING = """
import ctypes, os, threading
import numpy as np
library, real = ctypes.CDLL(None), ctypes.c_float
def product(a, b, alpha=1.0, beta=0.0, c=None, transposed=True):
    rows, columns, sums = len(a), len(b), a.shape[1]
    b = b if transposed else np.ascontiguousarray(b.T)
    c = np.zeros((rows, columns), np.float32) if c is None else c.copy()
    data = [ctypes.c_void_p(each.ctypes.data) for each in (a, b, c)]
    library.cblas_sgemm(
        101, 111, 112 if transposed else 111, rows, columns, sums,
        real(alpha), data[0], sums, data[1], b.shape[1], real(beta), data[2], columns,
    )
    return c
def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
SHAPES = (
    (1, 1), (3, 17), (5, 15), (64, 16), (130, 64), (257, 333), (1536, 576), (577, 1530), (64, 600), (80, 1100),
    (66, 2500),
)
"""
"""Each shape: columns and summands. The last six are shared by threads; of the last one up to 13 rows are copied."""


def run(program: str, threads: int) -> None:
    environment = {**os.environ, **blas_environment(), "OPENBLAS_NUM_THREADS": str(threads)}
    ended = subprocess.run(
        [sys.executable, "-c", _SETTING + program], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("transposed", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_row_does_not_depend_on_the_rows_beside_it(threads: int, transposed: bool):
    run(
        f"""
for columns, sums in SHAPES:
    if not {transposed} and columns > 512:
        continue  # OpenBLAS multiplies
    a, b = numbers(1, 32, sums), numbers(2, columns, sums)
    alone = np.concatenate([product(a[i : i + 1], b, transposed={transposed}) for i in range(32)])
    for rows in range(2, 33):
        assert np.array_equal(product(a[:rows], b, transposed={transposed}), alone[:rows]), (columns, sums, rows)
""",
        threads,
    )


@pytest.mark.parametrize("transposed", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_are_right(threads: int, transposed: bool):
    run(
        f"""
plain = product
def product(*given, **named): return plain(*given, **named, transposed={transposed})
for columns, sums in SHAPES:
    b = numbers(2, columns, sums)
    exact = b.T.astype(np.float64)
    for rows in (1, 2, 3, 4, 5, 8, 31, 32, 33, 70):
        a, c = numbers(rows, rows, sums), numbers(3, rows, columns)
        right = a.astype(np.float64) @ exact
        found = product(a, b), (product(a, b, 0.5, 2.0, c) - 2 * c) * 2, product(a, b, c=np.full_like(c, np.nan))
        assert np.abs(np.subtract(found, right)).max() < 1e-4 * sums ** 0.5, (columns, sums, rows)
""",
        threads,
    )


def test_products_of_several_threads_at_once_are_right():
    run(
        """
a, b = numbers(1, 8, 576), numbers(2, 1536, 576)
right, wrong = product(a, b), []
def repeat():
    for _ in range(200):
        if not np.array_equal(product(a, b), right):
            wrong.append(True)
threads = [threading.Thread(target=repeat) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong
""",
        3,
    )


def test_a_forked_process_computes_without_its_parents_threads():
    run(
        """
a, b = numbers(1, 8, 576), numbers(2, 1536, 576)
right = product(a, b)
child = os.fork()
if not child:
    os._exit(0 if np.array_equal(product(a, b), right) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
        2,
    )


_NARROWING = """
def stored(form, *shape):
    found = numbers(7, *shape)
    if form == "half":
        found *= np.float32(2.0) ** np.random.default_rng(1).integers(-30, 4, shape).astype(np.float32)
        return found.astype(np.float16).astype(np.float32)
    return (found.view(np.uint32) & 0xFFFF0000).view(np.float32)
def narrowed(b):
    copy = np.full(b.size, 0xFFFF, np.uint16)
    at = [ctypes.c_void_p(each.ctypes.data) for each in (b, copy)]
    return copy if library.bridge_narrow_weights(at[0], ctypes.c_int64(b.size), at[1]) else None
def forget(b):
    library.bridge_forget_weights(ctypes.c_void_p(b.ctypes.data))
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", ["half", "bfloat"])
def test_products_with_weights_in_16_bits_are_the_same_to_the_last_bit(form: str, threads: int):
    run(
        f"""{_NARROWING}
for columns, sums in ((1, 16), (64, 17), (130, 64), (256, 333), (1536, 576), (80, 1100), (66, 2400)):
    both = stored("{form}", 2 * columns, sums)
    b = both[:columns]
    # Of a matrix that several products share, each finds its own numbers; those behind it have no copy.
    shares = (b, b[columns // 3 :], both[columns:], both)
    given = [(a, each) for rows in (1, 2, 3, 4, 5, 8, 31, 32) for a in [numbers(rows, rows, sums)] for each in shares]
    wide = [product(*each) for each in given]
    copy = narrowed(b)
    assert copy is not None
    assert all(np.array_equal(product(*each), right) for each, right in zip(given, wide))

    copy[:] = 0
    assert not np.array_equal(product(*given[0]), wide[0])  # It is read.
    forget(b)
    assert np.array_equal(product(*given[0]), wide[0])
""",
        threads,
    )


def test_weights_that_16_bits_do_not_hold_stay_in_32():
    run(
        f"""{_NARROWING}
for value in (1 / 3, 1e-30, 70000.0):
    b = stored("half", 64, 576)
    b[50, 500] = value
    assert narrowed(b) is None
    assert np.array_equal(product(numbers(1, 3, 576), b), product(numbers(1, 3, 576), b.copy()))
assert narrowed(stored("half", 3, 5)) is None
""",
        1,
    )
