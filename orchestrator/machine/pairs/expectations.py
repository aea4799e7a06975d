"""What a recommended pair takes of this machine's memory, and whether its tokenizers match. Prints nothing."""

from orchestrator.core.options import Options
from orchestrator.machine.checkpoints import cached
from orchestrator.machine.memory import budget
from orchestrator.machine.memory.kv_form import KvSizes, kv_form
from orchestrator.machine.memory.kv_plan import kv_plan
from orchestrator.machine.pairs.recommended_pairs import Model, Pair
from protocol.contracts.coreml import Choices
from protocol.contracts.model_folder import ModelFolder
from protocol.contracts.tokenizer_fingerprint import vocabulary_fingerprint

_FP16_BYTES = 2
_LONG_CONTEXT = 1 << 17
"""Tokens, of a model whose own are not known."""


def memory(pair: Pair, on_processor: bool, core_ml: bool = False) -> float:
    """Bytes that the pair needs, estimated. `core_ml`: while the draft is also loaded for the Neural Engine.

    Core ML has the weights in fp16, once for every loaded function (coremltools issue 2351). The draft is in MLX too,
    until a trial has shown which of the two is faster.
    """
    return _weights(pair, on_processor, core_ml) + budget.OVERHEAD


def fits(pair: Pair, on_processor: bool, available: int, core_ml: bool = False) -> bool:
    """`available`: bytes that a pipeline may use."""
    return budget.fits(_weights(pair, on_processor, core_ml), available)


def kept_tokens(pair: Pair, on_processor: bool, available: int) -> int | None:
    """Tokens of conversations that the pair keeps in `available` bytes, about; None if the sizes of the target's KV
    are not known, or the pair does not fit. A trained drafter has little KV, which does not count."""
    forms = {role: _kv_form(model) for role, model in (("target", pair.target), ("draft", pair.draft))}
    drafts = pair.draft.kind is None
    if forms["target"] is None or (drafts and forms["draft"] is None) or not fits(pair, on_processor, available):
        return None
    needs = budget.PipelineNeeds(
        models=(
            budget.ModelNeed(budget.TARGET, int(pair.target.weights(on_processor)), forms["target"], quantizes=True),
            budget.ModelNeed(budget.DRAFT, int(pair.draft.weights(on_processor)), forms["draft"] if drafts else None),
        ),
        context=_LONG_CONTEXT,
        on_processor=on_processor,
    )
    return kv_plan(needs, budget.MemorySettings(), available, concurrent=Options().concurrent).tokens or None


def _kv_form(model: Model) -> KvSizes | None:
    folder = cached(model.id)
    if folder is not None:
        return kv_form(ModelFolder(folder).config)
    return KvSizes(*model.kv) if model.kv else None


def _weights(pair: Pair, on_processor: bool, core_ml: bool) -> float:
    converts = core_ml and pair.draft.kind is None
    package = pair.draft.parameters * 1e9 * _FP16_BYTES * len(Choices().widths) if converts else 0.0
    return pair.target.weights(on_processor) + pair.draft.weights(on_processor) + package


def tokenizers(pair: Pair) -> tuple[bool, bool]:
    """Whether the tokenizers match, and whether both models' files were compared (else the listed names are).

    A trained drafter has its target's tokenizer, and no file of its own to compare.
    """
    if pair.draft.kind is not None:
        return True, False
    folders = cached(pair.target.id), cached(pair.draft.id)
    if None in folders:
        return pair.target.tokenizer == pair.draft.tokenizer, False
    target, draft = (vocabulary_fingerprint(folder) for folder in folders if folder is not None)
    return target == draft, True
