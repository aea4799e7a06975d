"""Why the target can't evaluate a tree, or go on with a sequence, as messages. Pure."""

from protocol.messages.worker import Fault, Verify
from target_worker.engine import TargetSequence


def too_little(tokens: int, others: int) -> str:
    """That memory does not suffice, as a sentence. `tokens`: of the sequence that ends; `others`: live beside it."""
    beside = f" beside {others} other{'s' if others > 1 else ''}" if others else ""
    return (
        f"The target's memory does not suffice for this request, with {tokens:,} tokens so far{beside}: shorten it, or "
        "start the pipeline with a smaller --context, fewer --concurrent requests or --kv-bits 8."
    )


def refused(verify: Verify, text: str) -> Fault:
    """The answer to a tree that can't be evaluated."""
    return Fault("refused", text, verify.sequence, len(verify.tokens) - 1)


def out_of_step(sequence: TargetSequence, verify: Verify) -> str | None:
    """How the sequence differs from the one in the message, as a sentence; None if it does not."""
    if sequence.prefilling:
        return "The target is still prefilling this sequence."
    held = (sequence.round, sequence.position, sequence.root, sequence.tokens[-1])
    sent = (verify.round, verify.position, verify.root, verify.tokens[0])
    if held != sent:
        return f"The target is at round {held[0]}, position {held[1]}; the message is for {sent[0]}, {sent[1]}."
    return None
