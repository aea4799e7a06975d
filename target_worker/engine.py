"""What the target knows of each sequence, and one forward at a time. Knows no messages' flow and no clock."""

from collections.abc import Sequence

import mlx.core as mx

from protocol.inference.joint_forward import ForwardPart
from protocol.inference.tree_model import TreeModel
from protocol.kv.exchange import KvExchange
from protocol.kv.prefix_cache import Found
from protocol.kv.prefix_sharing import shared_tokens
from protocol.messages.base import NodeId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start, Verdict
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.sampling.logits_processors import LogitsProcessors
from protocol.sampling.sampler import Noise
from protocol.speculation.token_tree import node_id
from target_worker.kv.checkpoint import KvCheckpoint
from target_worker.kv.target_kv import Adoption, TargetKv, adopt
from target_worker.verification.coupled import Acceptance, coupled
from target_worker.verification.likelihood import likelihoods
from target_worker.verification.proposed_tree import ProposedTree
from target_worker.verification.rejection import rejection


class TargetEngine:
    """A model with the noise for its vocabulary; opens sequences."""

    def __init__(self, model: TreeModel, prefill_chunk: int = 512, exchange: KvExchange | None = None) -> None:
        """Without `exchange` no KV is shared with anybody."""
        self.model = model
        self.noise = Noise(model.vocabulary)
        self.prefill_chunk = prefill_chunk
        self._exchange = exchange
        self._grammars = Grammars(model.folder, model.vocabulary)

    def restraint(self, start: Start) -> LogitsProcessors:
        """What the sequence's past does to its tokens. Raises GrammarError."""
        return LogitsProcessors.at(start, self._grammars)

    def open(self, start: Start, restraint: LogitsProcessors, found: Found[TargetKv] | None = None) -> "TargetSequence":
        """A sequence at `start`. It begins with the KV that was found, or with the arena that `start` names if that
        holds more."""
        shared = 0 if found is None else found.tokens
        adoption = self._adopt(start, shared)
        if adoption.tokens or found is None or not shared:
            return TargetSequence(self, start, restraint, adoption, self._checkpoint(adoption.tokens))
        adoption = adoption._replace(cache=found.kv.first(shared, found.exclusive), tokens=shared)
        return TargetSequence(self, start, restraint, adoption, self._continued(found, start))

    def reopen(self, sequence: "TargetSequence", start: Start, restraint: LogitsProcessors) -> "TargetSequence":
        """The same request at another `start`, which goes on with its own KV: none of that counts as adopted."""
        own = Found(sequence.kv, shared_tokens(sequence, start.tokens[:-1]), exclusive=True)
        reopened = self.open(start, restraint, own)
        if reopened.cache is sequence.cache:
            reopened.adopted = 0
        return reopened

    def verify(self, asked: Sequence[tuple["TargetSequence", ProposedTree]]) -> list[Acceptance | GrammarError]:
        """One forward over the proposals of different sequences, and a walk down each or the reason for none."""
        logits = self.model.evaluate_together([sequence.part(proposal) for sequence, proposal in asked])
        # Grammars are read while the device computes.
        mx.async_eval(*logits)
        return [sequence.walk(rows, proposal) for rows, (sequence, proposal) in zip(logits, asked, strict=True)]

    def _adopt(self, start: Start, shared: int) -> Adoption:
        reference = start.adopt
        if reference is None or reference.tokens <= shared:
            return Adoption(self.model.sequence())
        if reference.tokens >= len(start.tokens):
            return Adoption(self.model.sequence(), warning="The KV offered for adoption goes beyond the root.")
        return adopt(self.model, self._exchange, reference)

    def _continued(self, found: Found[TargetKv], start: Start) -> KvCheckpoint | None:
        """Another sequence's checkpoint, if nothing in its arena is of other tokens."""
        theirs = found.kv.checkpoint
        if theirs is not None and found.exclusive and theirs.covered <= found.tokens and not theirs.closed:
            return theirs
        return self._checkpoint(start.adopt.tokens if start.adopt else 0)

    def _checkpoint(self, covered: int = 0) -> KvCheckpoint | None:
        return None if self._exchange is None else KvCheckpoint(self._exchange, covered)


class TargetSequence:
    """One request: its tokens so far (the last is the root), its round, and the KV before the root."""

    def __init__(
        self,
        engine: TargetEngine,
        start: Start,
        restraint: LogitsProcessors,
        adoption: Adoption,
        checkpoint: KvCheckpoint | None = None,
    ) -> None:
        self._engine = engine
        self.start = start
        self.cache = adoption.cache
        self.adopted = adoption.tokens
        """Tokens whose KV was taken over at the start."""
        self.warning = adoption.warning
        self.checkpoint = checkpoint
        self.tokens = list(start.tokens)
        self.round = start.round
        self.root: NodeId = start.root
        self.sampling: Sampling = start.sampling
        self.restraint = restraint
        self.verdict: Verdict | None = None
        """The last one given, for a Verify that comes again."""
        self.evaluated = 0
        """Tokens prefilled since the start."""
        self.seconds = 0.0
        """Time spent on them, and on what was adopted."""

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def kv(self) -> TargetKv:
        return TargetKv(self.cache, self.checkpoint)

    @property
    def prefix(self) -> list[int]:
        """Tokens before the root."""
        return self.tokens[:-1]

    @property
    def prefilled(self) -> int:
        """How many of them have KV."""
        return self.cache.committed

    @property
    def prefilling(self) -> bool:
        """Some of them have none yet."""
        return self.cache.committed < self.position

    @property
    def unsaved(self) -> bool:
        """Enough was committed since the last save for another one."""
        return self.checkpoint is not None and not self.prefilling and self.checkpoint.due(self.cache.committed)

    def take_over(self, found: Found[TargetKv]) -> None:
        """Go on with what another sequence has of the same tokens, which is more."""
        self.adopted += found.tokens - self.prefilled
        self.cache = found.kv.first(found.tokens, found.exclusive)

    def prefill(self) -> None:
        """Evaluate one chunk of the tokens before the root."""
        begin = self.cache.committed
        chunk = self.tokens[begin : min(begin + self._engine.prefill_chunk, self.position)]
        self.cache.prefill(chunk)
        self.evaluated += len(chunk)

    def part(self, proposal: ProposedTree) -> ForwardPart:
        """Its share of a forward over the proposal. The rows wait for `advance`."""
        first = self.cache.next_row
        return ForwardPart(self.cache, proposal.tokens, [-1, *(first + parent for parent in proposal.parents[1:])])

    def walk(self, logits: mx.array, proposal: ProposedTree) -> Acceptance | GrammarError:
        """What of the proposal is accepted; `logits` is (L, V), a row an entry. An error leaves the sequence where
        it was."""
        rule = coupled if self.sampling.verification == "coupled" else rejection
        try:
            restrained = self.restraint.applied(logits, proposal.paths)
        except GrammarError as error:
            self.cache.truncate(self.cache.committed)
            return error
        walk = rule(restrained, proposal, self.tokens, self.sampling, self._engine.noise)
        if self.sampling.logprobs is None:
            return walk
        told = likelihoods(logits, (0, *walk.accepted), _chosen(proposal, walk), self.sampling.logprobs)
        return walk._replace(likelihoods=told)

    def advance(self, proposal: ProposedTree, walk: Acceptance, verdict: Verdict) -> None:
        """Commit what the walk accepted; its bonus token is the new root."""
        first = self.cache.next_row - len(proposal.tokens)
        self.cache.keep([first, *(first + entry for entry in walk.accepted)], ())
        tokens = _chosen(proposal, walk)
        self.tokens += tokens
        self.restraint.advance(tokens)
        self.root = node_id((self.root, *verdict.path)[-1], walk.bonus)
        self.round = verdict.round + 1
        self.verdict = verdict


def _chosen(proposal: ProposedTree, walk: Acceptance) -> list[int]:
    """Tokens of the accepted path, and the bonus."""
    return [*(proposal.tokens[entry] for entry in walk.accepted), walk.bonus]
