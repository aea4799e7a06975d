"""What workers are told of a sequence: the Start that serves it, and the Reroot by which a draft follows it. Pure."""

from msgspec.structs import replace

from orchestrator.core.sequence import Sequence
from protocol.messages.base import MAX_EOS_TOKENS
from protocol.messages.kv import KvReference
from protocol.messages.plans import GrowthPlan
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Reroot, Start


def start_message(
    sequence: Sequence,
    plan: GrowthPlan | None = None,
    vocabulary: int | None = None,
    adopt: KvReference | None = None,
    sampling: Sampling | None = None,
) -> Start:
    """The Start that serves the sequence from its committed tokens.

    The target is asked for log-probabilities of the prompt until it has told all. A draft's Start names the growth
    plan, the target's vocabulary and perhaps a `sampling` of its own. Both may name an arena to adopt.
    """
    chosen, wanted = sampling or sequence.request.sampling, plan is None and sequence.untold
    return Start(
        sequence=sequence.id,
        round=sequence.round,
        tokens=tuple(sequence.tokens),
        root=sequence.tree.root.id,
        sampling=chosen if wanted else replace(chosen, prompt_logprobs=False),
        vocabulary=vocabulary,
        plan=plan,
        adopt=adopt,
        prompt_tokens=len(sequence.request.tokens),
        eos_tokens=tuple(sorted(sequence.request.eos_tokens))[:MAX_EOS_TOKENS],
    )


def reroot_message(
    sequence: Sequence, tokens: list[int], missed: bool, plan: GrowthPlan | None, anew: bool = False
) -> Reroot:
    """The Reroot by which a draft follows the sequence's last commit, of `tokens`."""
    return Reroot(
        sequence=sequence.id,
        round=sequence.round,
        position=sequence.position - len(tokens),
        tokens=tuple(tokens),
        root=sequence.tree.root.id,
        missed=missed,
        plan=plan,
        anew=anew,
    )
