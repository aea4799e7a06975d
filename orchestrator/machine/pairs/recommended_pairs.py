"""Recommended pairs of a target and a draft, as pairs.toml lists them, and what they take of this machine's memory."""

import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from orchestrator.core.options import Options
from orchestrator.machine.checkpoints import LocalModel, cached, gguf_file, known_folder, local_models
from orchestrator.machine.default_target import VARIABLE
from orchestrator.machine.hardware import computes_on_processor, memory_bytes
from orchestrator.machine.memory import budget
from orchestrator.machine.memory.kv_form import KvSizes, kv_form
from orchestrator.machine.memory.kv_plan import kv_plan
from protocol.contracts.coreml import Choices
from protocol.contracts.drafters.description import DrafterKind
from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError

PROCESSOR_BITS = 32
"""On a processor weights are unpacked to float32."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    parameters: Annotated[float, Meta(gt=0.0)]
    """Billions."""
    bits: Annotated[float, Meta(gt=0.0, le=32.0)]
    """Per weight, scales included."""
    kv: tuple[int, ...] = ()
    """As of `KvSizes`: elements of a token in layers that see every token, in layers with a window, its tokens, and
    bytes of a state. Empty: not known without its config.json."""
    kind: DrafterKind | None = None
    """Of a trained drafter, which was made for its pair's target. The fields below are those of one."""
    format: str = ""
    """Whose packaging, as `Drafter.format` names it."""
    size: str = ""
    """As its source states it."""
    licence: str = ""
    """As its source states it."""
    source: str = ""
    """Where the facts come from."""
    refused: str = ""
    """Why no engine runs it; empty if one should."""

    def weights(self, on_processor: bool) -> float:
        """Bytes of all weights, estimated."""
        return self.parameters * 1e9 * (PROCESSOR_BITS if on_processor else self.bits) / 8


class Pair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Model
    draft: Model


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    target: Model | str
    """Or the name of an entry with the same target."""
    draft: Model


@cache
def published() -> Mapping[str, Pair]:
    """All that are listed, by name, with those that no engine runs."""
    content = (resources.files("orchestrator.machine.pairs") / "pairs.toml").read_text(encoding="utf-8")
    entries = msgspec.convert(tomllib.loads(content), dict[str, _Entry])
    return {name: Pair(target=_target(entries, entry), draft=entry.draft) for name, entry in entries.items()}


def _target(entries: Mapping[str, _Entry], entry: _Entry) -> Model:
    while isinstance(entry.target, str):
        entry = entries[entry.target]
    return entry.target


def pairs() -> dict[str, Pair]:
    """Those that an engine should run, by name."""
    return {name: pair for name, pair in published().items() if not pair.draft.refused}


def runnable(name: str) -> Pair:
    """The pair of this name. Raises InputError for one that no engine runs."""
    pair = published()[name]
    if pair.draft.refused:
        raise InputError(
            f"The drafter of {name}, {pair.draft.id}, can't be run yet: {pair.draft.refused}. See `launch-pipeline "
            f"pairs --pair {name}` for others of its target."
        )
    return pair


def beside(target: Model) -> dict[str, Pair]:
    """All drafts that are listed for a target, by the names of their pairs."""
    return {name: pair for name, pair in published().items() if pair.target.id == target.id}


def draft_beside(target: str) -> str | None:
    """The Hugging Face id of the draft that a pair has beside the target with this id."""
    return next((pair.draft.id for pair in pairs().values() if pair.target.id == target), None)


# For who names none ----------------------------------------------------------------------------------

TALK = ("qwen2.5-3b", "qwen2.5-1.5b")
"""The best first. They answer at once, without a thought before."""
AGENTS = ("qwen3-14b", "qwen3-8b", "qwen3-4b", "qwen2.5-1.5b")
"""The best first. Their chat templates know tools."""
_WITHOUT_TOOLS = ("smollm2-1.7b", "gemma2-9b", "gemma3-12b", "gemma3-27b")
"""Their publishers' chat templates know none."""
_PACKING = re.compile(r"(?:[-.](?:\d+bit|mxfp4|i?q\d\w*|gguf))+$")
_OLLAMA_OMITS = re.compile(r"^meta|instruct|it$")


class LocalPair(NamedTuple):
    """A recommended pair on this disk. `target` and `draft` are what the options take."""

    name: str
    origin: str
    target: str
    draft: str

    def __str__(self) -> str:
        return f"{self.name}, which {self.origin} has put on this disk"


def modest(names: Sequence[str]) -> str | None:
    """The first of these pairs that takes at most half of this machine's memory: on every machine models may use it."""
    processor, room = computes_on_processor(), memory_bytes() // 2
    return next((name for name in names if fits(published()[name], processor, room)), None)


def first_pair(tools: bool) -> LocalPair | None:
    """What is used in place of the default pair, which gains nothing on a Mac's GPU: of the recommended pairs on this
    disk that take at most half of its memory, the one with the largest target; with `tools`, of those that know them.

    None elsewhere, and where the environment says which default target is wanted.
    """
    if sys.platform != "darwin" or os.environ.get(VARIABLE):
        return None
    found: list[tuple[float, LocalPair]] = []
    for origin, local in groupby(local_models(), lambda model: model.origin):
        there = list(local)
        for name, pair in pairs().items():
            if tools and name in _WITHOUT_TOOLS:
                continue
            target, draft = (
                next((one for one in there if _is(model, one)), None) for model in (pair.target, pair.draft)
            )
            if target and draft and budget.fits(target.bytes + draft.bytes, memory_bytes() // 2):
                found.append((pair.target.parameters, LocalPair(name, origin, target.target, draft.target)))
    found.sort(key=lambda each: each[0], reverse=True)
    return next((pair for _, pair in found if all(map(_can_be_read, (pair.target, pair.draft)))), None)


def _can_be_read(model: str) -> bool:
    """Other programs' GGUF files may hold what we can't: an image model beside the text's, for instance."""
    from orchestrator.machine.gguf.folder import planned

    try:
        file = None if known_folder(model) is not None else gguf_file(model, fetch=False)
        return file is None or bool(planned(file))
    except (InputError, OSError):
        return False


def _is(model: Model, local: LocalModel) -> bool:
    """Whether this is the model, perhaps in another packing. No trained drafter is: none was tried."""
    if model.kind is not None:
        return False
    name, given = (_plain(text.split("/")[-1]) for text in (model.id, local.name))
    return given == name or (local.origin == "Ollama" and given == _OLLAMA_OMITS.sub("", name))


def _plain(name: str) -> str:
    name = name.lower().rsplit(":", 1)[-1] if name.lower().endswith(".gguf") else name.lower()
    return re.sub(r"[-_:]", "", _PACKING.sub("", name))


# Memory ----------------------------------------------------------------------------------------------

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
