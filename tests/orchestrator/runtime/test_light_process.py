"""The orchestrator process imports nothing slow that only some pipelines need."""

import subprocess
import sys


def test_numpy_and_asyncio_are_not_loaded():
    program = "import sys, orchestrator.__main__; print({'numpy', 'asyncio', 'rich'} & {*sys.modules})"

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
