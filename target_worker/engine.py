"""What the target knows of each sequence, and one forward at a time. Knows no messages' flow and no clock."""

from collections.abc import Sequence

import mlx.core as mx

from protocol.inference.joint_forward import ForwardPart
from protocol.inference.tree_model import TreeModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.exchange import KvExchange
from protocol.kv.prefix_cache import Found
from protocol.messages.base import NodeId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Start, Verdict
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.sampling.logits_processors import LogitsProcessors
from protocol.sampling.sampler import Noise
from protocol.speculation.token_tree import node_id
from target_worker.kv.adoption import Adoption, adopt
from target_worker.kv.checkpoint import KvCheckpoint
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

    def open(
        self, start: Start, restraint: LogitsProcessors, found: "Found[TargetSequence] | None" = None
    ) -> "TargetSequence":
        """A sequence at `start`. What another one or the arena that `start` names holds of the same tokens is not
        evaluated again. `found.tokens` of them count as adopted: none if they are this sequence's own."""
        shared = 0 if found is None else found.kv.shared(start)
        adoption = self._adopt(start, shared)
        if adoption.tokens:
            return TargetSequence(self, start, restraint, adoption, self._checkpoint(adoption.tokens))
        if found is None or not shared:
            return TargetSequence(self, start, restraint, adoption, self._checkpoint())
        adoption = adoption._replace(cache=found.kv.release(shared, found.free), tokens=min(found.tokens, shared))
        return TargetSequence(self, start, restraint, adoption, self._continued(found, start, shared))

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

    def _continued(self, found: "Found[TargetSequence]", start: Start, shared: int) -> KvCheckpoint | None:
        """Another sequence's checkpoint, if nothing in its arena is of other tokens."""
        theirs = found.kv.checkpoint
        if theirs is not None and found.free and theirs.covered <= shared and not theirs.given_up:
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
        self.prefilled = 0
        """Tokens evaluated since the start."""
        self.seconds = 0.0
        """Time spent on them, and on what was adopted."""

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def unprefilled(self) -> bool:
        return self.cache.committed < self.position

    @property
    def unsaved(self) -> bool:
        """Enough was committed since the last save for another one."""
        return self.checkpoint is not None and not self.unprefilled and self.checkpoint.due(self.cache.committed)

    def shared(self, start: Start) -> int:
        """Tokens of `start` before its root whose KV is here."""
        return min(_common_prefix(self.tokens, start.tokens[:-1]), self.cache.committed)

    def alike(self, start: Start) -> int:
        """Tokens of `start` before its root that are also here before the root, with KV or without."""
        return min(_common_prefix(self.tokens, start.tokens[:-1]), self.position)

    def take_over(self, found: "Found[TargetSequence]") -> None:
        """Go on with what another sequence has of the same tokens, if that is more."""
        gained = found.kv.shared(self.start) - self.cache.committed
        if gained > 0:
            self.cache = found.kv.release(found.kv.shared(self.start), found.free)
            self.adopted += gained

    def release(self, length: int, free: bool) -> TreeSequence:
        """The KV of the first `length` tokens for somebody else: this sequence's own if it is `free`, or a copy."""
        if not free:
            return self.cache.copy(length)
        self.cache.truncate(length)
        return self.cache

    def close(self) -> None:
        """Save nothing more."""
        if self.checkpoint is not None:
            self.checkpoint.close()

    def prefill(self) -> None:
        """Evaluate one chunk of the tokens before the root."""
        begin = self.cache.committed
        chunk = self.tokens[begin : min(begin + self._engine.prefill_chunk, self.position)]
        self.cache.prefill(chunk)
        self.prefilled += len(chunk)

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


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
