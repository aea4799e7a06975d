"""The program that runs mlx-dspark's own loops: `ENVIRONMENT/bin/python -I mlx_dspark_program.py SETUP`.

It runs in the rival's environment and imports nothing of ours; `messages` describes what it reads and writes.
"""
# pyright: reportMissingImports=false

import json
import os
import signal
import sys
import time
from typing import Any

import mlx.core as mx
from mlx_dspark.calibrate import apply_small_m
from mlx_dspark.dflash_model import DFlashCtxWindow
from mlx_dspark.generate import dflash_generate, greedy_generate, speculative_generate
from mlx_dspark.load import load_dflash, load_drafter, load_target
from mlx_dspark.lookup import lookup_generate
from mlx_lm.utils import dequantize_model

_LOOPS = {
    "greedy": greedy_generate,
    "lookup": lookup_generate,
    "dspark": speculative_generate,
    "dflash": dflash_generate,
}
_PREFILL_CHUNK = 512


def main() -> int:
    setup = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if setup["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup["cores"])
    # Output of libraries must not mix with the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    target, precision = _loaded(setup["target"])
    drafters = {kind: _drafter(kind, folder) for kind, folder in setup["drafters"].items()}
    _write(results, {"precision": precision})
    for line in sys.stdin:
        job = json.loads(line)
        _write(results, _decode(target, drafters.get(job["loop"]), job))
    return 0


class _Client:
    """What a loop takes for a tokenizer: its end tokens are the job's, and each token is one character of text.

    So the loop streams to it as to any client, and `on_text` counts tokens.
    """

    eos_token_id = None
    unk_token_id = None

    def __init__(self, ends: list[int]) -> None:
        self.eos_token_ids = ends
        self.detokenizer = self
        self.text = ""
        self.arrivals: list[float] = []

    def add_token(self, token: int) -> None:
        self.text += "."

    def finalize(self) -> None:
        """Holds nothing back."""

    def decode(self, tokens: list[int]) -> str:
        return self.text

    def convert_tokens_to_ids(self, name: str) -> int:
        """No name adds an end token."""
        return -1

    def on_text(self, text: str) -> None:
        self.arrivals += [time.perf_counter()] * len(text)


def _decode(target: Any, drafter: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job. The loop's own clock starts when the caches hold all but the prompt's last token."""
    began = time.perf_counter()
    cache = target.make_cache()
    prefix = job["tokens"][:-1]
    seen = None if drafter is None else _Seen(target, drafter, job["loop"])
    _prefill(target, cache, prefix, seen)
    arguments = {} if seen is None else {"drafter": drafter, "ctx_caches": seen.caches(len(prefix))}
    client = _Client(job["ends"])
    rounds: list[tuple[int, int]] = []

    def on_round(*, drafted: int, accepted: int, **_: Any) -> None:
        if drafted:
            rounds.append((drafted, accepted))

    result = _LOOPS[job["loop"]](
        target,
        client,
        prompt_ids=job["tokens"],
        cache=cache,
        reuse_len=len(prefix),
        max_new_tokens=job["max_tokens"],
        temperature=job["temperature"],
        seed=job["seed"],
        on_text=client.on_text,
        on_round=on_round,
        **arguments,
        **job["options"],
    )
    ended = time.perf_counter()
    # The greedy loop computes ahead: that work must not run into the next contender's time.
    mx.synchronize()
    # An end token has no text.
    arrivals = client.arrivals + [ended] * (len(result.token_ids) - len(client.arrivals))
    return {
        "tokens": result.token_ids,
        "seconds": result.seconds,
        "forwards": result.target_forwards,
        "rounds": rounds,
        "arrivals": [arrival - began for arrival in arrivals],
    }


def _prefill(target: Any, cache: Any, prefix: list[int], seen: "_Seen | None") -> None:
    for first in range(0, len(prefix), _PREFILL_CHUNK):
        chunk = mx.array([prefix[first : first + _PREFILL_CHUNK]])
        if seen is None:
            target.prefill(chunk, cache)
        else:
            seen.read(target.prefill(chunk, cache, seen.layers)[1], first)
        mx.eval([layer.state for layer in cache])


class _Seen:
    """What a drafter has seen of the prompt, in the form that its loop takes."""

    def __init__(self, target: Any, drafter: Any, loop: str) -> None:
        self.layers = list(drafter.config.target_layer_ids)
        """Of the target, whose outputs the drafter reads."""
        self._drafter = drafter
        self._rows: list[mx.array] = []
        self._caches: list[Any] = []
        if loop == "dspark":
            self._caches = drafter.make_ctx_cache()
        elif getattr(drafter, "embed_tokens", None) is None:
            drafter.bind(target.model)

    def read(self, states: mx.array, first: int) -> None:
        """The target's states of the tokens from `first` on."""
        if self._caches:
            self._drafter.update_context(states, ctx_offset=first, ctx_caches=self._caches)
            mx.eval([cache.k for cache in self._caches])
        else:
            self._rows.append(self._drafter.project_ctx(states))
            mx.eval(self._rows)

    def caches(self, tokens: int) -> list[Any]:
        if self._caches:
            return self._caches
        window = DFlashCtxWindow()
        if self._rows:
            window.set(mx.concatenate(self._rows, axis=1), end=tokens)
        return [window]


def _drafter(kind: str, folder: str) -> Any:
    """In the precision in which it is fastest: float32 on a processor; in 4 bits, its own default, elsewhere."""
    processor = mx.default_device() == mx.Device(mx.cpu)
    drafter, _ = (load_drafter if kind == "dspark" else load_dflash)(folder, quantize=not processor)
    if processor:
        drafter.set_dtype(mx.float32)
        mx.eval(drafter.parameters())
    return drafter


def _loaded(folder: str) -> tuple[Any, str]:
    """The rival's target in the precision in which it is fastest: float32 on a processor, where quantized weights take
    twice as long a token; as stored, with the rival's own kernel for few rows, on Metal."""
    target, _ = load_target(folder)
    if mx.default_device() == mx.Device(mx.cpu):
        # Changes the target's network itself.
        dequantize_model(target.model).set_dtype(mx.float32)
        mx.eval(target.model.parameters())
        return target, "float32"
    if mx.metal.is_available():
        apply_small_m(target, target_repo=folder)
    return target, "as stored"


def _write(pipe: Any, message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


if __name__ == "__main__":
    sys.exit(main())
