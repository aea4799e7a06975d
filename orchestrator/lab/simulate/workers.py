"""The real workers over engines without models, at a device's pace on the virtual clock. Imports MLX, through them.

Random by seed alone: the same messages give the same work.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from msgspec.structs import replace

from draft_worker.engine_interface import Batch, Engine, EngineSequence
from draft_worker.worker import DraftWorker
from orchestrator.core.options import Options
from orchestrator.core.policy.strategies import STRATEGIES
from orchestrator.lab.simulate.acceptance import VOCABULARY, Language
from orchestrator.lab.simulate.devices import Devices, Wires
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.worker_host import BuildWorker, SimulatedWorker, Work
from protocol.inference.tree_sequence import Tokens, TreeSequence
from protocol.kv.prefix_sharing import Found
from protocol.messages.base import Level, NodeId, RequestId, Role
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import Fault, Hello, Ping, Pong, Start, ToWorker
from protocol.sampling.logits_processors import LogitsProcessors
from protocol.speculation.token_tree import Candidates, node_id
from protocol.worker.interface import WorkerReply
from protocol.worker.pacing import DevicePace, Pacer
from target_worker.engine import Proposal, TargetEngine, TargetSequence
from target_worker.kv import Adoption, TargetKv
from target_worker.verification import Acceptance
from target_worker.worker import TargetWorker

CONTEXT = 1 << 17

Build: TypeAlias = Callable[[Callable[[], float], Pacer], DraftWorker | TargetWorker]
"""Makes a worker from its clock and its pacer."""


class VirtualWorker:
    """A real worker. Its own code takes no time; its forwards take the times of a device's pace."""

    def __init__(self, build: Build, pace: DevicePace) -> None:
        self._now = 0.0
        self._worker = build(self._clock, Pacer(pace, self._clock, self._sleep))
        self.hello = self._worker.hello()

    def handle(self, message: ToWorker) -> Work:
        if isinstance(message, Ping):
            return Work((Pong(message.sent),))
        return self._timed(lambda: self._worker.handle(message))

    def work(self) -> Work | None:
        return self._timed(self._worker.work) if self._worker.has_work else None

    def _timed(self, act: Callable[[], Iterable[WorkerReply]]) -> Work:
        began = self._now
        # Blocks go to other machines alone.
        replies = tuple(reply for reply in act() if not isinstance(reply, tuple))
        return Work(replies, self._now - began)

    def _clock(self) -> float:
        return self._now

    def _sleep(self, seconds: float) -> None:
        self._now += seconds


class ModelledDraft(VirtualWorker):
    """A draft that guesses as a language says."""

    def __init__(
        self, language: Language, pace: DevicePace, context: int = CONTEXT, kept: int = 0, block: int = 1
    ) -> None:
        """`kept`: tokens of ended sequences whose KV it keeps. `block`: as of `Devices`."""
        engine = _GuessEngine(language, context, block)
        super().__init__(lambda clock, pacer: DraftWorker(engine, clock, pacer=pacer, prefix_cache=kept), pace)
        self.hello: Hello = replace(modelled_hello("draft", context, pace), block=block)


class ModelledTarget(VirtualWorker):
    """A target whose tokens are those of a language."""

    def __init__(self, language: Language, pace: DevicePace, context: int = CONTEXT, level: Level = "tree") -> None:
        self._engine, hello = _LanguageEngine(language, context, level), modelled_hello("target", context, level=level)
        super().__init__(lambda clock, pacer: TargetWorker(self._engine, clock, hello, pacer), pace)

    def root(self, sequence: RequestId) -> tuple[int, int]:
        """The round and the position of a live sequence's root."""
        held = self._engine.sequences[sequence]
        return held.round, held.position

    def handle(self, message: ToWorker) -> Work:
        """The orchestrator must send no tree that one forward can't verify."""
        work = super().handle(message)
        unfit = next((each for each in work.replies if isinstance(each, Fault) and each.nodes), None)
        assert unfit is None, f"a tree that the target can't verify: {unfit}"
        return work


def modelled_workers(
    language: Language, devices: Devices, context: int = CONTEXT, level: Level = "tree"
) -> BuildWorker:
    """Targets of this level and drafts, of this language, with the times of these devices."""

    def build(role: Role) -> SimulatedWorker:
        if role == "target":
            return ModelledTarget(language, devices.target, context, level)
        return ModelledDraft(language, devices.draft, context, block=devices.block)

    return build


def modelled_pipeline(
    options: Options,
    language: Language,
    devices: Devices,
    wires: Wires | None = None,
) -> Simulation:
    """A pipeline whose target is up; its draft too, if the strategy uses one."""
    simulation = Simulation(options, language, modelled_workers(language, devices), wires, slow_down=devices.slow_down)
    simulation.start("target")
    if STRATEGIES[options.strategy].drafts:
        simulation.start("draft")
    return simulation


def modelled_hello(role: Role, context: int = CONTEXT, pace: DevicePace | None = None, level: Level = "tree") -> Hello:
    """With the costs that a worker of this pace measures."""
    return Hello(
        role=role,
        engine="modelled",
        model=f"modelled-{role}",
        architecture="none",
        vocabulary=VOCABULARY,
        context=context,
        tokenizer_fingerprint="",
        device="none",
        pid=1,
        costs=Pacer(pace).costs(),
        context_costs=Pacer(pace).context_costs(),
        level=level,
    )


def prompt_token_logprob(place: int) -> TokenLogprob:
    """What a modelled target reports of the prompt's token behind `place` others and the first one."""
    return TokenLogprob(-float(place))


class _GuessEngine(Engine):
    """Takes candidates from a language."""

    name = "modelled"
    architecture = "none"

    def __init__(self, language: Language, context: int, block: int) -> None:
        self.context = context
        self._language = language
        self._block = block

    def open(self, sampling: Sampling, vocabulary: int) -> EngineSequence:
        return _GuessSequence(self._language, sampling.seed, self._block)


class _Row(NamedTuple):
    """An evaluated node."""

    id: NodeId
    depth: int
    on_target_path: bool


class _GuessSequence(EngineSequence):
    """Counts committed tokens, and knows of each row where it stands."""

    def __init__(self, language: Language, request: int, block: int) -> None:
        self._block, self._guessed = block, 0
        """Tokens that a forward guesses, and up to which position the last one did."""
        self._language = language
        self._request = request
        self._committed = self._next_row = 0
        self._rows: dict[int, _Row] = {}
        self._widths: list[int] = []
        prompt = language.prompt(request)
        self._prompt_tokens = len(prompt)
        self._roots = [node_id(NodeId(0), prompt[-1])]
        """Ids of the nodes on the target's path, from the prompt's last token on."""

    @property
    def committed(self) -> int:
        return self._committed

    @property
    def next_row(self) -> int:
        return self._next_row

    @property
    def forward_widths(self) -> Sequence[int]:
        return self._widths

    def prefill(self, tokens: Sequence[int]) -> None:
        self._committed += len(tokens)

    def evaluate(self, batch: Batch) -> list[Candidates]:
        if batch.committed:
            self.prefill(batch.committed)
        self._next_row += len(batch.committed)
        found = []
        for token, parent in zip(batch.tokens, batch.parents, strict=True):
            row = self._rows[self._next_row] = self._row(token, parent, batch)
            self._next_row += 1
            found.append(
                self._language.candidates(self._request, row.id, row.depth + 1, row.on_target_path, batch.limit)
            )
        evaluated = len(batch.committed) + len(batch.tokens)
        self._widths = [evaluated] if evaluated else []
        if self._block > 1 and batch.tokens:
            rows = range(self._next_row - len(batch.tokens), self._next_row)
            placed = zip((self._rows[row].depth for row in rows), batch.parents, strict=True)
            # A root knows its latest features. Every node that no block reaches begins one.
            anchors = [depth for depth, parent in placed if parent < 0 or depth >= self._guessed]
            self._widths = [self._block] if anchors else []
            self._guessed = min(anchors) + self._block if anchors else self._guessed
        return found

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._committed += len(path)
        self._rows = {row: self._rows[row] for row in surviving}

    def truncate(self, length: int) -> None:
        self._committed = min(self._committed, length)
        self._rows = {}

    @property
    def memory(self) -> int:
        return self._committed

    def reopen(self, length: int, sampling: Sampling, vocabulary: int, *, exclusive: bool) -> "EngineSequence":
        reopened = _GuessSequence(self._language, sampling.seed, self._block)
        reopened._committed = length
        return reopened

    def _row(self, token: int, parent: int, batch: Batch) -> _Row:
        if parent < 0:
            depth = batch.skipped + self._committed
            return _Row(self._root(depth, token), depth, on_target_path=True)
        above = self._rows[parent]
        depth = above.depth + 1
        on_path = above.on_target_path and token == self._language.token(self._request, depth)
        return _Row(node_id(above.id, token), depth, on_path)

    def _root(self, depth: int, token: int) -> NodeId:
        """The id of the root at this position, as in the orchestrator's tree."""
        generated = depth - self._prompt_tokens + 1
        if generated < 0:
            return node_id(NodeId(depth), token)
        while len(self._roots) <= generated:
            position = self._prompt_tokens + len(self._roots) - 1
            self._roots.append(node_id(self._roots[-1], self._language.token(self._request, position)))
        return self._roots[generated]


class _LanguageModel:
    """What the real engine reads of its model."""

    vocabulary = VOCABULARY
    prompt_logits = True
    chains = False

    def __init__(self, context: int, level: Level) -> None:
        self.context = context
        self.level: Level = level

    def sequence(self) -> TreeSequence:
        return _CountedRows()


class _LanguageNoise:
    """A language chooses its tokens without noise."""

    def draw_ahead(self, seed: int, position: int) -> None:
        """Draws nothing."""


class _LanguageEngine(TargetEngine):
    """Accepts a language's tokens. An arena that is offered counts as adopted."""

    def __init__(self, language: Language, context: int, level: Level) -> None:
        self.model: Any = _LanguageModel(context, level)
        self.noise: Any = _LanguageNoise()
        self.prefill_chunk = 512
        self._exchange = None
        self._language = language
        self.sequences: WeakValueDictionary[RequestId, TargetSequence] = WeakValueDictionary()

    def open(
        self, start: Start, processors: LogitsProcessors | None, found: Found[TargetKv] | None = None
    ) -> TargetSequence:
        sequence = self.sequences[start.request] = super().open(start, processors, found)
        return sequence

    def processors(self, start: Start) -> None:
        return None

    def adoption(self, start: Start, shared: int) -> Adoption:
        offered = 0 if start.adopt is None else start.adopt.tokens
        assert offered < len(start.tokens), "an arena is adopted only up to the root"
        return Adoption(_CountedRows(offered), offered) if offered > shared else Adoption(_CountedRows())

    def begin_forward(self, asked: Sequence[Proposal]) -> list[Any]:
        return [sequence.cache.evaluate(proposal.tokens, proposal.parents) for sequence, proposal in asked]

    def walks(self, logits: Sequence[Any], asked: Sequence[Proposal]) -> list[Any]:
        """Down from the root while the language's token is a node of the tree."""
        found = []
        for sequence, proposal in asked:
            accepted: list[int] = []
            at, position = 0, sequence.position
            while True:
                position += 1
                token = self._language.token(sequence.sampling.seed, position)
                below = proposal.children[at].get(token)
                if below is None:
                    break
                at = below
                accepted.append(at)
            found.append(Acceptance(tuple(accepted), token))
        return found

    def draw_ahead(self, sequence: TargetSequence) -> None:
        """A language has no noise."""

    def prompt_token_logprobs(self, logits: Any, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        return [prompt_token_logprob(place) for place, _ in zip(logits, tokens, strict=False)]


class _CountedRows(TreeSequence):
    """The numbers of rows and of committed tokens, without KV."""

    copyable = False

    def __init__(self, tokens: int = 0) -> None:
        self.recorded = None
        self._tokens_committed = tokens
        self._rows_begun = 0

    @property
    def committed(self) -> int:
        return self._tokens_committed

    @property
    def next_row(self) -> int:
        return self._rows_begun

    @property
    def forgotten(self) -> int:
        return 0

    @property
    def memory(self) -> int:
        return 0

    def prefill(self, tokens: Sequence[int], *, remember: bool = True) -> Any:
        """The tokens' positions in place of their logits."""
        begin = self._tokens_committed
        self._tokens_committed += len(tokens)
        return range(begin, self._tokens_committed)

    def remember(self, tokens: int) -> None:
        """There is nothing to go back to."""

    def evaluate(self, tokens: Tokens, parents: Sequence[int], first: int | None = None) -> Any:
        self._rows_begun += len(tokens)

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        self._tokens_committed += len(path)

    def truncate(self, length: int) -> None:
        self._tokens_committed = min(self._tokens_committed, length)

    def reach(self, length: int) -> int:
        return length

    def forget(self, saved: int) -> None:
        """There is no KV."""
