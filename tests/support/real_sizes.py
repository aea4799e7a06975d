"""What a step of each kind of trained drafter costs at the sizes of models that people run, with random weights.

`python -m tests.support.real_sizes [WIDTH VOCABULARY]` prints a table for each size, or for the one that is named:
processor time of one core in a draft's environment, the fastest of some steps. All layers of a drafter share one
layer's weights, which are far larger than any cache, so that a table of hidden size 5,120 takes 9 GB.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map

from draft_worker.drafters.block import BlockDrafter
from draft_worker.drafters.block_forward import Asked, Block, BlockRows, BlockRunner, MlxBlockRunner
from draft_worker.drafters.eagle3 import Eagle3
from draft_worker.drafters.peagle import PeagleRunner
from draft_worker.drafters.token_ends import TokenEnds
from draft_worker.engine import Engine
from draft_worker.engines.block import BlockEngine
from draft_worker.sequence import DraftSequence
from orchestrator.machine.hardware import worker_environment
from protocol.contracts.drafters.description import BlockForm, Eagle3Form
from protocol.features.ring import affordable_layout
from protocol.inference.device import compute_on_processor
from protocol.kv.arena_header import ElementType
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.features import FeatureForm
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start
from protocol.speculation.rolling_context import RollingContext
from protocol.speculation.token_tree import Calibration
from protocol.transport import Stamp, encode
from tests.support.paths import DEMO_TARGET

SIZES = ((4096, 151_936), (5120, 248_320))
"""Of Qwen3-8B and Qwen3.8-27B: hidden size and vocabulary."""
KINDS = ("DFlash", "DSpark", "DFlash2", "JetSpec", "P-EAGLE", "EAGLE-3")
CONTEXT = 512
NODES = CHILDREN = 16
_OUTPUTS = (1, 16, 31, 46, 61)
_INNER = {4096: 12_288, 5120: 17_408}
LIKELY = slice(0, 4000, 100)
"""Tokens that every row of a block believes in."""
_HEAD = 128
"""Elements of a head."""


def block_form(kind: str, width: int, vocabulary: int, block: int) -> BlockForm:
    """As published: five layers, windows of 2,048 and a selector for DFlash2, rank 256."""
    own: dict[str, Any] = {
        "DFlash": {},
        "DSpark": {"anchor_predicts": True, "markov": "vanilla", "rank": 256},
        "DFlash2": {
            **{"taps": 2, "tap_group": 16, "choices": CHILDREN, "rank": 256},
            **{"windows": (2048,) * 5, "causal": "none"},
        },
        "JetSpec": {"causal": "all"},
    }[kind]
    shared = BlockForm(
        width=width,
        layers=5,
        heads=width // _HEAD,
        kv_heads=min(8, width // _HEAD),
        head_width=_HEAD,
        inner=_INNER.get(width, 4 * width),
        vocabulary=vocabulary,
        outputs=_OUTPUTS,
        output_width=width,
        block=block,
        mask_token=vocabulary - 1,
        anchor_predicts=False,
        positions=40_960,
    )
    return msgspec.structs.replace(shared, **own)


def eagle3_form(kind: str, width: int, vocabulary: int, block: int) -> Eagle3Form:
    """One layer; four and the target's head for P-EAGLE. Three outputs."""
    own: dict[str, Any] = {"layers": 4, "mask_token": vocabulary - 1, "depths": block, "own_head": False}
    form = Eagle3Form(
        outputs=_OUTPUTS[::2],
        width=width,
        inner=_INNER.get(width, 4 * width),
        heads=width // _HEAD,
        kv_heads=min(8, width // _HEAD),
        head_width=_HEAD,
        vocabulary=vocabulary,
        output_width=width,
        head_size=vocabulary if kind == "P-EAGLE" else min(32_000, vocabulary),
    )
    return msgspec.structs.replace(form, **own) if kind == "P-EAGLE" else form


class Ends(NamedTuple):
    """Of a target, without its table of embeddings: a row of it is nothing beside a step."""

    weight: mx.array

    def embed(self, tokens: mx.array) -> mx.array:
        return mx.random.normal((*tokens.shape, self.weight.shape[1]))

    def head(self, states: mx.array) -> mx.array:
        return states @ self.weight.T


def filled(shape: tuple[int, ...]) -> mx.array:
    """Weights whose rows are alike, in memory of their own: as many random numbers would take minutes."""
    made = mx.contiguous(mx.broadcast_to(mx.random.normal(shape[-1:]) * shape[-1] ** -0.5, shape))
    mx.eval(made)
    return made


def shared_layers(network: Any, layers: Sequence[nn.Module]) -> int:
    """Let all layers have the weights of the first. Returns how many parameters there would be without that."""
    count = sum(array.size for _, array in _flat(network))
    for layer in layers[1:]:
        layer.update(layers[0].parameters())
    made: dict[int, mx.array] = {}

    def fill(array: mx.array) -> mx.array:
        if id(array) not in made:
            made[id(array)] = filled(array.shape)
        return made[id(array)]

    network.update(tree_map(fill, network.parameters()))
    return count


def _flat(network: nn.Module) -> list[tuple[str, mx.array]]:
    flat: Any = tree_flatten(network.parameters())
    return flat


class Replayed:
    """A `BlockRunner` whose forwards take no time: what is left of a step is the host's."""

    def __init__(self, runner: BlockRunner, rows: BlockRows) -> None:
        self._runner = runner
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, asked: Sequence[Asked]) -> list[list[BlockRows]]:
        return [[self._rows] * len(blocks) for _, blocks in asked]


def random_rows(runner: BlockRunner, seed: int = 0) -> BlockRows:
    """As of one block, with logits as a language model has them: a few tokens are far ahead."""
    form = runner.form
    mx.random.seed(seed)
    logits = 2.0 * mx.random.normal((form.rows, form.vocabulary))
    logits[:, LIKELY] += 8.0
    states = mx.random.normal((form.rows, form.width))
    if runner.selector is None:
        mx.eval(logits, states)
        return BlockRows(logits, states)
    assert isinstance(runner, MlxBlockRunner)
    return runner._rows(logits, states)[0]


class HostSeconds(NamedTuple):
    """Of two steps below a root, from the choice of their nodes to the encoded messages, without the forward."""

    behind: float
    """Of the first step, which ranks what the forward found: one node."""
    inside: float
    """Of the second one: 16 nodes inside the block."""


def host_seconds(runner: BlockRunner, temperature: float, repeats: int, *, lookup: bool = False) -> HostSeconds:
    """With 16 candidates of a node, the fastest of so many. With `lookup` the text has guesses for all nodes."""
    engine = BlockEngine(DEMO_TARGET, Replayed(runner, random_rows(runner)), DEMO_TARGET)  # type: ignore[arg-type]
    found: list[HostSeconds] = []
    for repeat in range(repeats):
        sequence = rooted(engine, temperature, seed=repeat, lookup=lookup)
        times, nodes = [time.process_time()], []
        for _ in range(2):
            nodes.append(step(sequence, engine))
            times.append(time.process_time())
        # Large noise leaves few tokens with a chance, mostly in a small vocabulary.
        if nodes == [CHILDREN, NODES * CHILDREN]:
            found.append(HostSeconds(times[1] - times[0], times[2] - times[1]))
    return HostSeconds(min(each.behind for each in found), min(each.inside for each in found))


def rooted(engine: Engine, temperature: float, seed: int, *, lookup: bool = False) -> DraftSequence:
    """One that grows from a root behind some tokens; with `lookup`, likely ones that always follow in one order."""
    sampling = Sampling(temperature=temperature, seed=seed)
    likely = 10 * [*range(engine.vocabulary)[LIKELY]]
    tokens = tuple(likely[seed % 40 :] if lookup else range(100, 300 + seed))
    plan = BestFirst(width=NODES, fan=CHILDREN, lookup=lookup)
    start = Start(SequenceId(1), 0, tokens, NodeId(1), sampling, plan, engine.vocabulary)
    opened = engine.open(sampling, engine.vocabulary)
    return DraftSequence(start, opened, RollingContext(engine.context), Calibration())


def step(sequence: DraftSequence, engine: Engine) -> int:
    """One growth step and its messages. Returns the number of new nodes."""
    while sequence.prefilling:
        sequence.prefill(512)
    batch = sequence.next_batch()
    nodes = sequence.expand(engine.evaluate_together([(sequence.engine, batch)])[0])
    for message in sequence.publish(nodes, len(batch.tokens)):
        encode(message, Stamp(1, 1))
    return len(nodes)


def forward_seconds(runner: BlockRunner, context: int, repeats: int) -> float:
    """Of one block behind `context` tokens whose features were read."""
    opened, form = runner.open(), runner.form
    opened.tokens = [5] * (context + 1)
    rows = np.random.default_rng(0).standard_normal((context, len(form.outputs) * form.output_width), np.float32)
    opened.feed(0, rows)
    while opened.unread:
        opened.read(512)
    opened.read_all()
    block = Block([7], context)
    return fastest(lambda: runner.forward([(opened, [block])]), repeats)


def row_seconds(network: Eagle3, rows: int, context: int, repeats: int) -> float:
    """Of so many rows of EAGLE-3 behind `context` tokens, logits included."""
    cache, hidden = network.make_cache(), mx.random.normal((1, rows, network.form.width))
    for _ in range(0, context, 512):
        states = network(mx.zeros((1, 512), mx.int32), mx.zeros((1, 512, network.form.width)), cache=cache)
        mx.eval(states)

    def run() -> None:
        mx.eval(network.logits(network(mx.ones((1, rows), mx.int32), hidden, cache=cache)))
        for each in cache:
            each.trim(rows)

    return fastest(run, repeats)


def fastest(run: Callable[[], object], repeats: int) -> float:
    """Seconds of processor time."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


class Cost(NamedTuple):
    kind: str
    block: int
    read: int
    """Parameters that a step reads, the head included."""
    forward: float
    """Milliseconds."""
    host: Sequence[HostSeconds]
    """At temperature 0 and 0.7, and at 0.7 with guesses by prompt lookup; empty for a kind whose nodes each have a row
    of their own."""
    ring_row: int
    """Bytes of a token in the feature ring, in 16 bits."""
    ring_rows: int
    kv_row: int
    """Bytes of a token's keys and values, in 16 bits."""


def costs(width: int, vocabulary: int, blocks: Sequence[int] = (8, 16), context: int = CONTEXT) -> list[Cost]:
    mx.random.seed(0)
    ends, found = Ends(filled((vocabulary, width))), []
    for kind in KINDS:
        for block in blocks if kind != "EAGLE-3" else (1,):
            found.append(cost(kind, block, width, vocabulary, ends, context))
    return found


def cost(kind: str, block: int, width: int, vocabulary: int, ends: Ends, context: int) -> Cost:
    host: Sequence[HostSeconds] = ()
    if kind == "EAGLE-3":
        form = eagle3_form(kind, width, vocabulary, block)
        network = Eagle3(form, np.arange(form.head_size, dtype=np.int32))
        network.borrow(ends.embed, ends.head)
        read = shared_layers(network, [])
        seconds, outputs = row_seconds(network, 8, context, 3), form.outputs
        layers, kv_heads = form.layers, form.kv_heads
    else:
        runner, read, layers = block_runner(kind, block, width, vocabulary, ends)
        seconds, outputs = forward_seconds(runner, context, 3), runner.form.outputs
        host = [host_seconds(runner, temperature, 20) for temperature in (0.0, 0.7)]
        host.append(host_seconds(runner, 0.7, 20, lookup=True))
        read, kv_heads = read + vocabulary * width, runner.form.kv_heads
    ring = affordable_layout(FeatureForm(outputs, width), ElementType.BFLOAT16, 4096)
    return Cost(
        kind, block, read, 1e3 * seconds, host, ring.row_bytes, ring.capacity, 2 * 2 * layers * kv_heads * _HEAD
    )


def block_runner(kind: str, block: int, width: int, vocabulary: int, ends: Ends) -> tuple[BlockRunner, int, int]:
    """With the parameters that a step reads of it, and its layers."""
    if kind == "P-EAGLE":
        form = eagle3_form(kind, width, vocabulary, block)
        network = Eagle3(form)
        network.borrow(ends.embed, ends.head)
        return PeagleRunner(network), shared_layers(network, network.layers), form.layers
    form = block_form(kind, width, vocabulary, block)
    drafter = BlockDrafter(form)
    # Tables of which a step reads some rows, or of DSpark one half.
    tables = sum(array.size for name, array in _flat(drafter) if "codebook" in name or "markov_w1" in name)
    read = shared_layers(drafter, drafter.layers) - tables
    return MlxBlockRunner(drafter, TokenEnds(ends.embed, ends.head, width, vocabulary)), read, form.layers


def table(width: int, vocabulary: int) -> str:
    lines = [
        f"hidden size {width:,}, vocabulary {vocabulary:,}, {CONTEXT:,} tokens of context",
        "| kind | block | read, million | forward, ms | behind it, ms: T = 0 / 0.7 "
        "| inside a block, ms: T = 0 / 0.7 / 0.7, lookup "
        "| ring, KiB a token | tokens in a ring | KV, KiB a token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in costs(width, vocabulary):
        behind = " / ".join(f"{1e3 * part.behind:.1f}" for part in each.host[:2]) or "–"
        inside = " / ".join(f"{1e3 * part.inside:.2f}" for part in each.host) or "–"
        lines.append(
            f"| {each.kind} | {each.block} | {each.read / 1e6:,.0f} | {each.forward:,.0f} | {behind} | {inside} "
            f"| {each.ring_row / 1024:.0f} | {each.ring_rows:,} | {each.kv_row / 1024:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    # As in the workers. Libraries are preloaded.
    environment = worker_environment("draft", (0,))
    if not environment.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})
    gc.disable()
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    compute_on_processor()
    numbers = [int(each) for each in sys.argv[1:]]
    for width, vocabulary in [(numbers[0], numbers[1])] if numbers else SIZES:
        print(table(width, vocabulary), flush=True)


if __name__ == "__main__":
    main()
