"""A rival's program that needs no environment: it speaks the bench's JSON lines and imports no MLX.

It continues any prompt with 1, 2, 3, ... and drafts three tokens a round, of which it accepts two. `FAKE_RIVAL` in its
environment makes it fail: `load` while it loads, `job` in its first job; or silent for a minute: `hang` while it
loads, `hang in job`.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    setup = json.loads(sys.argv[1])
    if os.environ.get("FAKE_RIVAL") == "load":
        sys.exit(f"no model in {setup['target']}")
    if os.environ.get("FAKE_RIVAL") == "hang":
        time.sleep(60)
    _write({"precision": "none"})
    for line in sys.stdin:
        if os.environ.get("FAKE_RIVAL") == "job":
            sys.exit("out of memory")
        if os.environ.get("FAKE_RIVAL") == "hang in job":
            time.sleep(60)
        _write(_result(json.loads(line)))


def _result(job: dict[str, Any]) -> dict[str, Any]:
    # One token more than asked for, as a loop whose round ends beyond the last token.
    count = job["max_tokens"] + 1
    rounds = [] if job["loop"] == "greedy" else [(3, 2)] * (count // 3)
    return {
        "tokens": list(range(1, count + 1)),
        "seconds": 0.1 * count,
        "forwards": len(rounds) or count,
        "rounds": rounds,
        "arrivals": [0.5 + 0.1 * index for index in range(count)],
    }


def _write(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
