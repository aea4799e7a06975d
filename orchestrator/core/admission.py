"""Which workers fit together, and which requests they can serve. Each check returns a sentence or None. Pure."""

from orchestrator.core.events import Request
from protocol.contracts.engines import DraftModel, offered_engines
from protocol.messages.features import FeatureForm
from protocol.messages.worker import Hello
from protocol.shown_names import model_name


def mismatch(one: Hello, other: Hello) -> str | None:
    """Why this draft and this target can't be a pair, or None. Vocabulary sizes and added tokens may differ."""
    target, draft = (one, other) if one.role == "target" else (other, one)
    if draft.tokenizer_fingerprint and draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        return foreign_tokenizer(model_name(draft.model), model_name(target.model))
    return None if draft.features is None else _unreadable(draft, draft.features, target)


def shares_first_layers(draft: Hello, target: Hello) -> bool:
    """Whether the draft is the first layers of this target, and can adopt their KV from the target's arenas."""
    ours, theirs = draft.kv, target.kv
    if ours is None or theirs is None or ours.layers > theirs.layers:
        return False
    alike = (ours.kv_heads, ours.head_size, ours.element) == (theirs.kv_heads, theirs.head_size, theirs.element)
    return alike and draft.model_fingerprint == target.model_fingerprint


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
            f"The prompt has {length:,} tokens, but {model_name(target.model)} has a context of {target.context:,}. "
            "Shorten the prompt or choose a target with a longer context."
        )
    if max(request.tokens) >= target.vocabulary:
        return (
            f"The prompt holds token {max(request.tokens)}, but {model_name(target.model)} knows only ids below "
            f"{target.vocabulary:,}. Encode the prompt with the target's own tokenizer."
        )
    return None


def _unreadable(draft: Hello, form: FeatureForm, target: Hello) -> str | None:
    """Why the draft can't read the hidden states of this target, or None."""
    reason = "it reads hidden states, and this target offers none" if target.taps is None else target.taps.lack(form)
    if not reason:
        return None
    name = model_name(draft.model) or draft.engine
    return (
        f"The draft {name} can't draft for the target {model_name(target.model)}: {reason}. "
        "Choose a draft that was trained for this target."
    )


def _engines(model: DraftModel) -> str:
    """The offered engines that draft with this."""
    return " or ".join(name for name, engine in offered_engines().items() if engine.model == model)
