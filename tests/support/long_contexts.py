"""`adaptive` beside `ar` behind a long context, with real processes.

`python -m tests.support.long_contexts KIND TOKENS FOLDER shared,apart PAIRS`

The network is random, with the attention of a model that people run: heads, head sizes, windows, states, ranks and
experts are real, its features, layers and vocabulary few. The draft is a program that is given the target's answer and
guesses a stated share of its tokens. Every pipeline takes the prompt's KV from one disk cache; the answers take turns.
Prints one JSON line a pair of answers.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from draft_worker.engine import Batch, Engine, EngineSequence
from draft_worker.worker import DraftWorker
from orchestrator import Pipeline, SamplingParams
from orchestrator.api.sampling import UNFILTERED
from orchestrator.machine.hardware import partition_cores, usable_cores, worker_environment
from protocol.contracts.kv_bits import UNQUANTIZED, kv_fingerprint
from protocol.inference.language_model import LanguageModel
from protocol.inference.layer_cache import FoldingCache, RowCache
from protocol.messages.client import Statistics
from protocol.messages.sampling import Sampling
from protocol.own_modules import module_command
from protocol.paths import PREFIXES_VARIABLE
from protocol.speculation.candidates import Candidates
from protocol.worker.process import WorkerSetup, serve
from target_worker.assembly import device
from target_worker.disk_cache.cache import DiskCache
from target_worker.disk_cache.snapshot import CacheShape
from tests.support.paths import DEMO_TARGET

ANSWER = 64
"""Tokens."""
VOCABULARY = 4096
READ = 1024
"""Tokens of the prompt that are read; the KV of a longer prompt repeats theirs."""
_COMMON = {
    "eos_token_id": 0,
    "hidden_size": 512,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": True,
}
_FULL = {
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
}
KINDS: dict[str, tuple[dict[int, int], dict[str, Any]]] = {
    "full": ({8192: 3, 32_768: 1}, _FULL),
    "latent": (
        {8192: 2, 32_768: 1},
        {
            "model_type": "deepseek_v3",
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "first_k_dense_replace": 8,
            "kv_lora_rank": 512,
            "q_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
    ),
    "windows": (
        {8192: 6, 32_768: 6},
        {
            "model_type": "gemma3_text",
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    ),
    "hybrid": (
        {8192: 4, 32_768: 4},
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "full_attention_interval": 4,
                "linear_num_value_heads": 32,
                "linear_num_key_heads": 16,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
            },
        },
    ),
    "experts": (
        {8192: 2, 32_768: 1},
        {
            "model_type": "qwen3_moe",
            "rope_theta": 1_000_000.0,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_size": 1024,
            "moe_intermediate_size": 512,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
}
"""As Qwen3-8B, GLM-4.7-Flash, Gemma 3 4B, Qwen3.5-4B and Qwen3-30B-A3B: layers by context, and the form."""


def write_network(kind: str, context: int, folder: Path) -> Path:
    """A model of this kind in a new folder, with the demo pair's tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO_TARGET / name, folder / name)
    layers, form = KINDS[kind]
    own = {**_COMMON, "num_hidden_layers": layers[context]}
    config = {**own, **form, **({"text_config": {**own, **form["text_config"]}} if "text_config" in form else {})}
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run([*module_command("tests.support.models.random_weights"), str(folder)], check=True)
    return folder


# The draft ----------------------------------------------------------------------------------------


class InformedEngine(Engine):
    """Guesses the recorded text's next token with probability `right`, else another one. A step takes `seconds`."""

    name = "informed"
    architecture = "a recorded text"

    def __init__(self, texts: Path, right: float, seconds: float) -> None:
        self._texts, self.right, self.seconds = texts, right, seconds

    def open(self, sampling: Sampling, vocabulary: int) -> "InformedSequence":
        texts = json.loads(self._texts.read_text()) if self._texts.is_file() else {}
        return InformedSequence(self, texts.get(str(sampling.temperature), []))


class InformedSequence(EngineSequence):
    def __init__(self, engine: InformedEngine, text: Sequence[int]) -> None:
        self._engine, self._text = engine, text
        self._committed: list[int] = []
        self._next_row = 0
        self._rows: dict[int, tuple[int, int, bool]] = {}
        """Of a node: its token, its place in the text, and whether all tokens up to it are the text's."""

    @property
    def committed(self) -> int:
        return len(self._committed)

    @property
    def next_row(self) -> int:
        return self._next_row

    def prefill(self, tokens: Sequence[int]) -> None:
        self._committed += tokens

    def evaluate(self, batch: Batch) -> list[Candidates]:
        time.sleep(self._engine.seconds)
        self._committed += batch.committed
        self._next_row += len(batch.committed)
        begin = self._next_row
        for token, parent in zip(batch.tokens, batch.parents, strict=True):
            place, known = (len(self._committed), True) if parent < 0 else self._rows[parent][1:]
            known = known and place < len(self._text) and self._text[place] == token
            self._rows[self._next_row] = token, place + 1, known
            self._next_row += 1
        return [self._guess(row, batch.limit) for row in range(begin, self._next_row)]

    def _guess(self, row: int, limit: int) -> Candidates:
        token, place, known = self._rows[row]
        source = random.Random(f"{token} {place}")
        tokens = source.sample(range(1, VOCABULARY), limit + 1)
        if place < len(self._text):
            right = self._text[place]
            tokens = [each for each in tokens if each != right]
            if known and source.random() < self._engine.right:
                tokens.insert(0, right)
        claimed = self._engine.right or 0.5
        rest = [(1 - claimed) / 2 ** (rank + 2) for rank in range(limit - 1)]
        return Candidates(tokens[:limit], [claimed, *rest])

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._committed += [self._rows[row][0] for row in path]
        self._rows = {row: self._rows[row] for row in surviving}

    def truncate(self, length: int) -> None:
        del self._committed[length:]
        self._rows = {}


# Measuring ----------------------------------------------------------------------------------------


def prompt_of(context: int) -> list[int]:
    source = random.Random(0)
    return [source.randrange(5, VOCABULARY) for _ in range(context)]


def write_kv(target: Path, prompt: Sequence[int]) -> None:
    """Put the KV of this prompt into the disk cache: that of its first tokens, repeated."""
    model = LanguageModel.load(target)
    short, long, length = model.sequence(), model.sequence(), len(prompt)
    short.prefill(prompt[:READ])
    for cache, read in zip(long.caches, short.caches, strict=True):
        if isinstance(cache, FoldingCache) and isinstance(read, FoldingCache):
            cache.resume(length, read.state(READ))
        elif isinstance(cache, RowCache) and isinstance(read, RowCache):
            first = 0 if cache.window is None else length - READ
            keys, values = read.rows(slice(0, READ))
            cache.adopt(_repeated(keys, length - first), _repeated(values, length - first), first)
    long.resumed(prompt)
    disk = DiskCache(kv_fingerprint(target, UNQUANTIZED), device(), str(target), CacheShape.of(long), 30 << 30, 1 << 34)
    disk.keep(long, prompt)
    while disk.waits or disk._turns:
        disk.step() if disk.waits else time.sleep(0.01)
    disk.close()


def _repeated(rows: mx.array, length: int) -> mx.array:
    return mx.contiguous(mx.concatenate([rows] * -(-length // READ), axis=2)[:, :, :length])


def measure(kind: str, context: int, folder: Path, placements: Sequence[str], pairs: int) -> None:
    """Pairs of answers by `ar` and `adaptive`, for a draft that is right in 3 of 4 places and one that never is."""
    os.environ[PREFIXES_VARIABLE] = str(folder / "kv")
    target = folder / "network"
    prompt = prompt_of(context)
    if not target.exists():
        write_network(kind, context, target)
        program = module_command("tests.support.long_contexts")
        variables = {**os.environ, **worker_environment("target", ())}
        subprocess.run([*program, "kv", str(target), str(context)], env=variables, check=True)
    texts = folder / "texts.json"

    def opened(stack: ExitStack, name: str, **own: Any) -> Pipeline:
        # Each writes its answers beside the prompt, and removes what they make superfluous.
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(folder / "kv", folder / name, copy_function=os.link)
        os.environ[PREFIXES_VARIABLE] = str(folder / name)
        return stack.enter_context(Pipeline(str(target), disk_cache=30.0, memory_check="off", **own))

    for placement in placements:
        with ExitStack() as stack:
            # macOS lacks it, and there a target's cores don't depend on the draft.
            set_affinity: Any = getattr(os, "sched_setaffinity", None)
            everywhere = usable_cores()
            if set_affinity and placement == "apart":
                # The cores that the target has beside a draft.
                set_affinity(0, partition_cores()["target"])
            plain = opened(stack, "ar", draft_engine="none")
            if set_affinity:
                set_affinity(0, everywhere)
            drafted = {
                right: opened(stack, str(right), placement=placement, lookup="off", draft_command=command(texts, right))
                for right in (0.75, 0.0)
            }
            for temperature in (0.0, 0.7):
                params = SamplingParams(temperature=temperature, seed=5, **UNFILTERED, max_tokens=ANSWER)
                before = used(plain)
                began = plain.generate(prompt, params)
                wanted = began.tokens
                # A pipeline's first answer is slow without a draft too.
                cell = {"kind": kind, "context": context, "placement": placement, "t": temperature}
                say(**cell, first={"ar": figures(began.statistics, used(plain) - before)})
                known = json.loads(texts.read_text()) if texts.is_file() else {}
                texts.write_text(json.dumps({**known, str(temperature): [*prompt, *wanted]}))
                for right, pipeline in drafted.items():
                    # The first answer shows what the draft is worth.
                    for pair in range(pairs + 1):
                        found = {}
                        for name in ("ar", "adaptive") if pair % 2 else ("adaptive", "ar"):
                            asked = plain if name == "ar" else pipeline
                            before = used(asked)
                            answer = asked.generate(prompt, params)
                            assert answer.tokens == wanted
                            found[name] = figures(answer.statistics, used(asked) - before)
                        ratios = {
                            name: round(found["ar"][name] / found["adaptive"][name], 3) for name in ("seconds", "used")
                        }
                        say(**cell, right=right, pair=pair, ratio=ratios, **found)


def figures(statistics: Statistics, used: float) -> dict[str, float]:
    return {
        "seconds": round(statistics.elapsed - statistics.time_to_first_token, 3),
        "first": round(statistics.time_to_first_token, 3),
        "used": round(used, 2),
        "rounds": statistics.rounds,
        "cached": statistics.adopted_tokens,
        "busy": round(statistics.target_busy, 3),
        "overhead": round(1e3 * statistics.overhead_per_round, 2),
    }


def command(texts: Path, right: float) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.support.long_contexts", "draft", str(texts), str(right), "0.004")


def used(pipeline: Pipeline) -> float:
    """Seconds of processor time of all processes of a pipeline."""
    session, ticks = str(Path(pipeline.address.removeprefix("ipc://")).parent).encode(), 0
    for process in Path("/proc").iterdir():
        # Other processes end meanwhile.
        with suppress(OSError):
            if process.name.isdigit() and session in (process / "cmdline").read_bytes():
                ticks += sum(map(int, (process / "stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> int:
    if sys.argv[1] == "kv":
        write_kv(Path(sys.argv[2]), prompt_of(int(sys.argv[3]))[:-1])
        return 0
    if sys.argv[1] == "draft":
        setup = WorkerSetup.from_arguments()
        texts, right, seconds = sys.argv[2:5]
        engine = InformedEngine(Path(texts), float(right), float(seconds))
        return serve(setup, lambda: DraftWorker(engine, time.perf_counter))
    kind, context, folder, placements, pairs = sys.argv[1:6]
    measure(kind, int(context), Path(folder), placements.split(","), int(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
