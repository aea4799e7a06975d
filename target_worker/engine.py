"""The target's model and its sequences; one forward verifies the trees of several. Knows no message flow, no clock."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import mlx.core as mx

from protocol.inference.joint_forward import ForwardPart
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.exchange import KvExchange
from protocol.kv.prefix_sharing import Found, shared_tokens
from protocol.messages.base import Level, NodeId
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import Start, Verdict, Verify
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.sampling.gumbel_noise import Noise
from protocol.sampling.logits_processors import LogitsProcessors
from protocol.speculation.token_tree import node_id
from target_worker.kv import MIN_TOKENS, Adoption, KvCheckpoint, TargetKv, adopt
from target_worker.verification import (
    UNKNOWN,
    Acceptance,
    ProposedTree,
    RowLogprobs,
    Walk,
    as_ids,
    begin_logprobs,
    coupled,
    pick,
    token_logprobs,
)

_ROWS_TOGETHER = 64
_BRANCH = 16
"""A place is remembered so many tokens before the prompt's end, or where its new tokens begin if they are fewer: the
next turn of a conversation continues the answer, or branches off within the template's opening of the answer, which is
no longer."""


class TargetModel(Protocol):
    """What the engine needs of a model: a `LanguageModel` computes logits, a `RecordedModel` knows them."""

    folder: Path
    vocabulary: int
    context: int
    level: Level
    prompt_logits: bool
    chains: bool

    def sequence(self) -> TreeSequence: ...

    def lower(self, reason: str) -> bool: ...

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]: ...


class TargetEngine:
    """A model with the noise of its vocabulary. Opens sequences and verifies their proposals."""

    def __init__(self, model: TargetModel, prefill_chunk: int = 512, exchange: KvExchange | None = None) -> None:
        """Without `exchange` no KV is written to shared memory."""
        self.model = model
        self.noise = Noise(model.vocabulary)
        self.prefill_chunk = prefill_chunk
        self._exchange = exchange
        self._grammars = Grammars(model.folder, model.vocabulary)

    def refusal(self, start: Start) -> str | None:
        """Why this sequence can't be served, as a sentence; None if it can."""
        if len(start.tokens) > self.model.context:
            return (
                f"The prompt has {len(start.tokens):,} tokens and the target's context holds {self.model.context:,}: "
                "shorten the prompt."
            )
        if max(start.tokens) >= self.model.vocabulary:
            return (
                f"The prompt holds token {max(start.tokens)}; the target's vocabulary ends at "
                f"{self.model.vocabulary - 1}."
            )
        if start.sampling.prompt_logprobs and not self.model.prompt_logits:
            return "This target has no log-probabilities of prompts, only of generated tokens: ask for those alone."
        return None

    def processors(self, start: Start) -> LogitsProcessors | None:
        """The logits processors of a sequence at `start`; None if it wants none. Raises GrammarError."""
        return LogitsProcessors.wanted(start, self._grammars)

    def open(
        self, start: Start, processors: LogitsProcessors | None, found: Found[TargetKv] | None = None
    ) -> "TargetSequence":
        """A sequence at `start`. It begins with the KV in `found`, or with the arena that `start` names if the arena
        holds more. With log-probabilities of the prompt it begins empty."""
        if start.sampling.prompt_logprobs:
            return TargetSequence(self, start, processors, Adoption(self.model.sequence()), self._checkpoint(start, 0))
        shared = 0 if found is None else found.tokens
        adoption = self.adoption(start, shared)
        if adoption.tokens or found is None or not shared:
            return TargetSequence(self, start, processors, adoption, self._checkpoint(start, adoption.tokens))
        adoption = adoption._replace(cache=found.kv.first(shared, found.exclusive), tokens=shared)
        return TargetSequence(self, start, processors, adoption, self._continued(found, start))

    def reopen(self, sequence: "TargetSequence", start: Start, processors: LogitsProcessors | None) -> "TargetSequence":
        """The same request at another `start`. It keeps its own KV, which does not count as adopted."""
        shared = shared_tokens(sequence, start.tokens[:-1])
        own = Found(sequence.kv, sequence.cache.reach(shared), exclusive=True)
        reopened = self.open(start, processors, own)
        if reopened.cache is sequence.cache:
            reopened.adopted = 0
        return reopened

    def begin_forward(self, asked: "Sequence[Proposal]") -> list[mx.array]:
        """Begin one forward over the proposals of different sequences. Gives the (L, V) logits of each, which the
        device computes meanwhile."""
        logits = self.model.evaluate_together([sequence.part(proposal) for sequence, proposal in asked])
        recorded = [sequence.cache.recorded for sequence, _ in asked]
        mx.async_eval(*logits, *(rows.rows for rows in recorded if rows is not None))
        return logits

    def walks(self, logits: Sequence[mx.array], asked: "Sequence[Proposal]") -> list[Acceptance | GrammarError]:
        """An acceptance or a grammar error for each proposal of a forward."""
        # The device samples for all of them before the first result is waited for.
        begun = [sequence.begin_walk(rows, proposal) for rows, (sequence, proposal) in zip(logits, asked, strict=True)]
        return [walk if isinstance(walk, GrammarError) else walk() for walk in begun]

    def chains(self, sequence: "TargetSequence") -> bool:
        """Whether a forward over the sequence's next root can begin before that token is read."""
        return self.model.chains and self.model.level == "tree" and sequence.chains

    def begin_picks(self, logits: Sequence[mx.array], sequences: Sequence["TargetSequence"]) -> "list[Pick]":
        """The tokens behind the roots of these sequences, of a forward over the roots alone."""
        return self._begin_sampling(logits, [(sequence, sequence.position + 1) for sequence in sequences])

    def begin_behind(
        self, picks: "Sequence[Pick]", sequences: Sequence["TargetSequence"]
    ) -> "tuple[list[mx.array], list[Pick]]":
        """Commit the roots of these sequences, and begin the forward over the tokens behind them before anybody reads
        these `picks`: its logits and what is picked behind them."""
        for sequence in sequences:
            sequence.cache.keep([sequence.cache.next_row - 1], ())
        chained = zip(sequences, picks, strict=True)
        parts = [ForwardPart(sequence.cache, each.token, [PREFIX]) for sequence, each in chained]
        logits = self.model.evaluate_together(parts)
        return logits, self._begin_sampling(logits, [(sequence, sequence.position + 2) for sequence in sequences])

    def read(
        self, picks: "Sequence[Pick]", logits: Sequence[mx.array], sequences: Sequence["TargetSequence"]
    ) -> list[Acceptance]:
        """Of forwards over roots alone, with these `logits`."""
        found = zip(sequences, picks, logits, strict=True)
        return [sequence.accept(each, rows) for sequence, each, rows in found]

    def _begin_sampling(
        self, logits: Sequence[mx.array], places: "Sequence[tuple[TargetSequence, int]]"
    ) -> "list[Pick]":
        """The token at each position, by the one row of each of `logits`."""
        sampled = zip(logits, places, strict=True)
        picks = [sequence.begin_pick(rows, position) for rows, (sequence, position) in sampled]
        mx.async_eval([(each.token, each.told and each.told.arrays) for each in picks])
        return picks

    def draw_ahead(self, sequence: "TargetSequence") -> None:
        """Begin to draw the noise of the sequence's next tokens."""
        if not sequence.sampling.greedy:
            self.noise.draw_ahead(sequence.sampling.seed, sequence.position + 1)

    def prompt_token_logprobs(self, logits: mx.array, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        """As `token_logprobs`, where row i of `logits` is for `tokens[i]`."""
        found: list[TokenLogprob] = []
        # A few rows at a time: in 32 bits, the rows of a large vocabulary take much memory.
        for first in range(0, len(tokens), _ROWS_TOGETHER):
            some = tokens[first : first + _ROWS_TOGETHER]
            found += token_logprobs(logits, range(first, first + len(some)), some, count)
        return found

    def adoption(self, start: Start, shared: int) -> Adoption:
        """The KV of the arena that `start` names, if it holds more than `shared` tokens; else empty KV."""
        reference = start.adopt
        if reference is None or reference.tokens <= shared:
            return Adoption(self.model.sequence())
        if reference.tokens >= len(start.tokens):
            return Adoption(self.model.sequence(), warning="The KV offered for adoption goes beyond the root.")
        return adopt(self.model.sequence(), self._exchange, reference)

    def _continued(self, found: Found[TargetKv], start: Start) -> KvCheckpoint | None:
        """The checkpoint of the sequence that was found, if its arena holds only shared tokens; else a new one."""
        checkpoint = found.kv.checkpoint
        if checkpoint is not None and found.exclusive and checkpoint.covered <= found.tokens and not checkpoint.closed:
            return checkpoint
        if found.kv.cache.forgotten:
            # What a new arena would need is gone.
            return None
        return self._checkpoint(start, start.adopt.tokens if start.adopt else 0)

    def _checkpoint(self, start: Start, covered: int) -> KvCheckpoint | None:
        """None if no arena holds more than the first `covered` tokens."""
        if self._exchange is None or self._exchange.most < covered + MIN_TOKENS:
            return None
        return KvCheckpoint(self._exchange, covered)


class TargetSequence:
    """One request: its tokens so far (the last one is the root), its round, and the KV before the root."""

    def __init__(
        self,
        engine: TargetEngine,
        start: Start,
        processors: LogitsProcessors | None,
        adoption: Adoption,
        checkpoint: KvCheckpoint | None = None,
    ) -> None:
        self._engine = engine
        self.start = start
        self.cache = adoption.cache
        self.adopted = adoption.tokens
        """Tokens whose KV was adopted or taken over at the start."""
        self.warning = adoption.warning
        self.checkpoint = checkpoint
        self.tokens = list(start.tokens)
        self.round = start.round
        self.root: NodeId = start.root
        self.sampling: Sampling = start.sampling
        self._processors = processors
        self.verdict: Verdict | None = None
        """The last verdict, to answer a repeated Verify."""
        self.evaluated = 0
        """Tokens prefilled since the start."""
        self.seconds = 0.0
        """Time spent on prefill and adoption."""
        self.told: list[TokenLogprob] = []
        """TokenLogprobs of the prompt's tokens from the second one on, if they are wanted and until they are sent."""
        self.ended = False
        """Its request needs it no more."""
        self.branch = 0
        """The first tokens that another conversation had too: others may branch off there."""

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def chains(self) -> bool:
        """Its tokens are sampled from the logits of a forward alone, and nothing else is asked of them, now and behind
        the present root: no penalty, no grammar, no features, no KV to be saved."""
        records = self.cache.tap is not None and self.cache.tap.outputs
        if records or (self._processors is not None and self._processors.reads_paths):
            return False
        return self.checkpoint is None or not self.checkpoint.due(self.cache.committed + 1)

    @property
    def kv(self) -> TargetKv:
        return TargetKv(self.cache, self.checkpoint)

    @property
    def prefix(self) -> list[int]:
        """Tokens before the root."""
        return self.tokens[:-1]

    @property
    def prefilled(self) -> int:
        """Tokens before the root that have KV."""
        return self.cache.committed

    @property
    def prefilling(self) -> bool:
        """Whether some tokens before the root have no KV yet."""
        return self.cache.committed < self.position

    @property
    def unsaved(self) -> bool:
        """Whether enough tokens were committed since the last save to save again."""
        return self.checkpoint is not None and not self.prefilling and self.checkpoint.due(self.cache.committed)

    def take_over(self, found: Found[TargetKv]) -> None:
        """Continue with another sequence's KV, which holds more of the same tokens."""
        self.begin_with(found.kv.first(found.tokens, found.exclusive))

    def begin_with(self, cache: TreeSequence) -> None:
        """Begin with KV of more of the same tokens."""
        self.adopted += cache.committed - self.prefilled
        self.cache = cache
        if cache.forgotten and self.checkpoint is not None:
            # What a new arena would need is gone.
            self.checkpoint.close()

    def prefill(self) -> None:
        """Evaluate one chunk of the tokens before the root."""
        begin = self.cache.committed
        if begin and not self.evaluated and begin > self.position - _BRANCH:
            # So few new tokens have no place of their own.
            self.cache.remember(begin)
        end = min(begin + self._engine.prefill_chunk, self.position)
        branches = [
            place
            for place in (self.start.shared_prefix, self.branch, self.position - _BRANCH)
            if begin < place < self.position
        ]
        if self.cache.chooses_places:
            end = min([end, *branches])
        if not self.start.shared_prefix and end < self.position - _BRANCH:
            branches.append(end)
        chunk = self.tokens[begin:end]
        logits = self.cache.prefill(chunk, remember=False)
        for place in branches:
            if place <= end:
                self.cache.remember(place)
        if self.sampling.prompt_logprobs and logits is not None:
            following = self.tokens[begin + 1 : min(begin + 1 + len(chunk), self.start.prompt_tokens)]
            self.told += self._engine.prompt_token_logprobs(logits, following, self.sampling.logprobs or 0)
        self.evaluated += len(chunk)
        self._forget()

    def part(self, proposal: ProposedTree) -> ForwardPart:
        """This sequence's part of a forward over the proposal. `advance` later keeps or drops the new rows."""
        first = self.cache.next_row
        return ForwardPart(self.cache, proposal.tokens, [-1, *(first + parent for parent in proposal.parents[1:])])

    def begin_walk(self, logits: mx.array, proposal: ProposedTree) -> Walk | GrammarError:
        """Begin to sample; then the accepted part of the proposal can be read. `logits`: (L, V), one row per entry.
        After an error the sequence is unchanged."""
        try:
            return self._walk(logits, proposal, waits=not self._engine.model.chains)
        except GrammarError as error:
            self.cache.truncate(self.cache.committed)
            return error

    def begin_pick(self, logits: mx.array, position: int) -> "Pick":
        """Begin to sample the token at an absolute position from the (1, V) logits of the one before it."""
        begun = self._processors is not None
        processed = logits if self._processors is None else self._processors.begin(logits, [()])
        token = pick(processed, [position], self.sampling, self._engine.noise, begun=begun)
        count = self.sampling.logprobs
        return Pick(token, None if count is None else begin_logprobs(logits, token, count))

    def accept(self, picked: "Pick", logits: mx.array) -> Acceptance:
        """What follows the root, which alone was evaluated."""
        (bonus,) = as_ids(picked.token)
        if bonus == UNKNOWN:
            return self._walk(logits, self.root_alone(), waits=True)()._replace(waited=True)
        return Acceptance((), bonus, () if picked.told is None else picked.told.read((0,)))

    def _walk(self, logits: mx.array, proposal: ProposedTree, *, waits: bool) -> Walk:
        """`waits`: the device may be waited for before the walk is read. It is so in any case while a walk is read that
        ends at a large nucleus."""
        begun = self._processors is not None and not waits
        processed = logits
        if self._processors is not None:
            process = self._processors.begin if begun else self._processors.apply
            processed = process(logits, proposal.paths)
        tell = self._tell(logits)
        walk = coupled(processed, proposal, self.sampling, self._engine.noise, begun=begun, tell=tell)

        def settled() -> Acceptance:
            found = walk()
            if found.bonus == UNKNOWN:
                return self._walk(logits, proposal, waits=True)()
            return self._told(found, logits, proposal)

        return settled

    def _tell(self, logits: mx.array) -> Callable[[mx.array], RowLogprobs] | None:
        """What begins the logprobs of all rows with the sampling, if they are wanted: on a GPU a second wait costs
        more than the rows that are not accepted."""
        count = self.sampling.logprobs
        if count is None or not (len(logits) == 1 or self._engine.model.chains):
            return None
        return lambda picks: begin_logprobs(logits, picks, count)

    def _told(self, found: Acceptance, logits: mx.array, proposal: ProposedTree) -> Acceptance:
        """With token_logprobs, if they are wanted."""
        count = self.sampling.logprobs
        if count is None or found.token_logprobs:
            return found
        rows, tokens = (0, *found.accepted), _chosen(proposal, found)
        return found._replace(token_logprobs=token_logprobs(logits, rows, tokens, count))

    def root_alone(self) -> ProposedTree:
        """The tree of a round that has no other nodes."""
        id = self.start.request
        return ProposedTree(Verify(id, self.round, self.root, self.position, (self.tokens[-1],), (-1,)))

    def undo(self) -> None:
        """Undo a forward that has begun."""
        self.cache.truncate(self.cache.committed)

    def advance(self, proposal: ProposedTree, walk: Acceptance, verdict: Verdict, *, kept: bool = False) -> None:
        """Commit the accepted tokens. The bonus token is the new root. `kept`: their rows are committed already."""
        if not kept:
            first = self.cache.next_row - len(proposal.tokens)
            self.cache.keep([first, *(first + entry for entry in walk.accepted)], ())
        self._forget()
        tokens = _chosen(proposal, walk)
        self.tokens += tokens
        if self._processors is not None:
            self._processors.advance(tokens)
        self.root = node_id((self.root, *verdict.path)[-1], walk.bonus)
        self.round = verdict.round + 1
        self.verdict = verdict

    def _forget(self) -> None:
        """Let go of rows behind windows that need not be saved any more."""
        if self.checkpoint is None or self.checkpoint.closed or self.checkpoint.full:
            self.cache.forget(self.cache.committed)
        else:
            self.cache.forget(self.checkpoint.saved)


Proposal: TypeAlias = tuple[TargetSequence, ProposedTree]


class Pick(NamedTuple):
    """A token that the device samples."""

    token: mx.array
    """(1,)"""
    told: RowLogprobs | None
    """Its token_logprob, if that is wanted."""


def _chosen(proposal: ProposedTree, walk: Acceptance) -> list[int]:
    """The accepted tokens and the bonus token."""
    return [*(proposal.tokens[entry] for entry in walk.accepted), walk.bonus]
