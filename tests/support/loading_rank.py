"""One rank of a divided model that loads, slowly if told to, and reports its sums: `HOSTS RANK FOLDER SECONDS`.

Prints JSON: the time when its weights were loaded, and of each `all_sum` the times of its call and of its return and
whether it names the processor, by the system's monotonic clock.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol.contracts.target_hosts import read_hosts
from protocol.inference.light_import import import_models


def main() -> None:
    import_models()
    from mlx_lm.models.llama import Model

    from protocol.inference.language_model import LanguageModel
    from target_worker.tensor_parallel.ranks import GroupDivision, connect

    hosts, rank, folder, seconds = sys.argv[1:]
    loaded: list[float] = []
    sums: list[tuple[float, float, bool]] = []
    real, shard = mx.distributed.all_sum, Model.shard

    def all_sum(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        if not loaded:
            loaded.append(time.monotonic())
        began = time.monotonic()
        total = real(x, group=group, stream=stream)
        mx.eval(total)
        sums.append((began, time.monotonic(), stream is mx.cpu))
        return total

    def slow_shard(self: Any, group: Any = None) -> None:
        shard(self, group)
        time.sleep(float(seconds))

    mx.distributed.all_sum, Model.shard = all_sum, slow_shard
    LanguageModel.load(Path(folder), GroupDivision(connect(read_hosts(Path(hosts)), int(rank))))
    print(json.dumps({"loaded": loaded[0], "sums": sums}))


if __name__ == "__main__":
    main()
