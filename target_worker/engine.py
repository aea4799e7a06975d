"""What the target knows of each sequence, and one forward at a time. Knows no messages' flow and no clock."""

from collections.abc import Sequence

from protocol.messages import NodeId, Sampling, Start, Verdict
from protocol.sampling import Noise
from protocol.token_tree import node_id
from protocol.tree_model import TreeModel, TreeSequence
from target_worker.proposal import Proposal
from target_worker.rejection import rejection
from target_worker.sampling import Walk, coupled


class TargetEngine:
    """A model with the noise for its vocabulary; opens sequences."""

    def __init__(self, model: TreeModel, prefill_chunk: int = 512) -> None:
        self.model = model
        self.noise = Noise(model.vocabulary)
        self.prefill_chunk = prefill_chunk

    def open(self, start: Start, previous: "TargetSequence | None" = None) -> "TargetSequence":
        """A sequence at `start`. What `previous` holds of the same tokens is not evaluated again."""
        if previous is None:
            return TargetSequence(self, start, self.model.sequence())
        held = previous.cache
        shared = min(_common_prefix(previous.tokens, start.tokens[:-1]), held.committed)
        held.truncate(shared)
        return TargetSequence(self, start, held)


class TargetSequence:
    """One request: its tokens so far (the last is the root), its round, and the KV before the root."""

    def __init__(self, engine: TargetEngine, start: Start, cache: TreeSequence) -> None:
        self._engine = engine
        self.start = start
        self.cache = cache
        self.tokens = list(start.tokens)
        self.round = start.round
        self.root: NodeId = start.root
        self.sampling: Sampling = start.sampling
        self.verdict: Verdict | None = None
        """The last one given, for a Verify that comes again."""
        self.prefilled = 0
        """Tokens evaluated since the start."""
        self.seconds = 0.0
        """Time spent on them."""

    @property
    def position(self) -> int:
        """Absolute position of the root."""
        return len(self.tokens) - 1

    @property
    def unprefilled(self) -> bool:
        return self.cache.committed < self.position

    def prefill(self) -> None:
        """Evaluate one chunk of the tokens before the root."""
        begin = self.cache.committed
        chunk = self.tokens[begin : min(begin + self._engine.prefill_chunk, self.position)]
        self.cache.prefill(chunk)
        self.prefilled += len(chunk)

    def verify(self, proposal: Proposal) -> Walk:
        """One forward over the proposal and a walk down it. Its rows wait for `advance`."""
        first = self.cache.next_row
        parents = [-1, *(first + parent for parent in proposal.parents[1:])]
        logits = self.cache.evaluate(proposal.tokens, parents)
        rule = coupled if self.sampling.verification == "coupled" else rejection
        return rule(logits, proposal, self.tokens, self.sampling, self._engine.noise)

    def advance(self, proposal: Proposal, walk: Walk, verdict: Verdict) -> None:
        """Commit what the walk accepted; its bonus token is the new root."""
        first = self.cache.next_row - len(proposal.tokens)
        self.cache.keep([first, *(first + entry for entry in walk.accepted)], ())
        self.tokens += [*(proposal.tokens[entry] for entry in walk.accepted), walk.bonus]
        self.root = node_id((self.root, *verdict.path)[-1], walk.bonus)
        self.round = verdict.round + 1
        self.verdict = verdict


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
