"""Which workers fit together, and which requests they can serve. Each check returns a sentence or None. Pure."""

from orchestrator.core.events import Request
from protocol.contracts.engines import DraftModel, offered_engines
from protocol.messages.worker import Hello


def mismatch(one: Hello, other: Hello) -> str | None:
    """Why this draft and this target can't be a pair, or None. Vocabulary sizes and added tokens may differ."""
    target, draft = (one, other) if one.role == "target" else (other, one)
    if draft.tokenizer_fingerprint and draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        return foreign_tokenizer(draft.model, target.model)
    return None


def foreign_tokenizer(draft: str, target: str, difference: str = "") -> str:
    """That these models can't be a pair. `difference`: a clause that says where their tokenizers differ, if known."""
    where = f" ({difference})" if difference else ""
    return (
        f"The draft {draft} has another tokenizer than the target {target}{where}, so its guesses would be gibberish. "
        f"Choose a draft of the same model family, or the draft engine {_engines('none')}."
    )


def refusal(request: Request, target: Hello) -> str | None:
    """Why this target can't serve a request, or None. A draft whose context is shorter drafts on the last tokens."""
    length = len(request.tokens)
    if length >= target.context:
        return (
            f"The prompt has {length:,} tokens, but {target.model} has a context of {target.context:,}. "
            "Shorten the prompt or choose a target with a longer context."
        )
    if max(request.tokens) >= target.vocabulary:
        return (
            f"The prompt holds token {max(request.tokens)}, but {target.model} knows only ids below "
            f"{target.vocabulary:,}. Encode the prompt with the target's own tokenizer."
        )
    return None


def _engines(model: DraftModel) -> str:
    """The offered engines that draft with this."""
    return " or ".join(name for name, engine in offered_engines().items() if engine.model == model)
