"""The draft engine and its model's folder: the given ones, unless they do not fit the target or the machine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.checkpoints import demo_model, resolve
from orchestrator.machine.converted_draft import converted_draft, is_converted, source_of
from orchestrator.machine.downloads.default_target import default_draft, is_default_target
from orchestrator.machine.hardware import chip, system_build
from orchestrator.machine.progress import OnProgress, silent
from orchestrator.machine.recommended_pairs import draft_beside
from protocol.contracts.engines import NO_DRAFT, DraftEngineName, draft_model, offered_engines
from protocol.contracts.neural_engine import EngineVerdict, ExaminedSystem, package_fingerprint, recorded
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint


class DraftChoice(NamedTuple):
    """What the draft worker is told."""

    engine: DraftEngineName
    folder: Path | None
    """None: no model of its own, so that the target's tokenizer is the draft's."""
    note: str = ""
    """One line for the user if this differs from the given options."""


def draft_for(
    target: str | None, engine: DraftEngineName, name: str | None, on_progress: OnProgress, *, own: bool = False
) -> DraftChoice:
    """`draft_choice` beside the target of this name (None: the demo target).

    An engine without a model gets none, even if `name` is one. Without a name, a shipped draft is taken only if the
    target has its tokenizer. Otherwise there is no draft, and the note says which drafts fit; beside the default target
    the n-gram engine drafts. `own`: a program of the user is the draft; it then gets no model.
    """
    if draft_model(engine) == "none":
        return DraftChoice(engine, None)
    if name is not None:
        return draft_choice(engine, name, on_progress)
    folder = demo_model("target") if target is None else resolve(target, "target", on_progress)
    for shipped in filter(None, (default_draft(), demo_model("draft"))):
        if tokenizer_fingerprint(shipped) == tokenizer_fingerprint(folder):
            return draft_choice(engine, None if shipped == demo_model("draft") else str(shipped), on_progress)
    if own:
        return DraftChoice(engine, None)
    if engine == "mlx" and is_default_target(folder):
        return DraftChoice("ngram", None, "The n-gram engine drafts: the default target has no draft of its own yet.")
    return DraftChoice(
        NO_DRAFT,
        None,
        f"There is no draft, since the demo draft has another tokenizer than the target {target}: "
        f"choose {' or '.join(_fitting(target or ''))}.",
    )


def draft_choice(engine: DraftEngineName, name: str | None, on_progress: OnProgress = silent) -> DraftChoice:
    """The engine and the folder of the draft `name`; converts the model if the engine needs a package.

    Without a name it is the demo draft, or no model if the engine needs none. Raises InputError for an unknown engine
    and for a draft that is not available.
    """
    model = draft_model(engine)
    if model == "package":
        folder = converted_draft(name, on_progress)
        # On other systems the executor runs the package, so there is no device to examine.
        verdict = recorded(place_of(folder)) if sys.platform == "darwin" else None
        return weigh(engine, folder, name, verdict)
    if model == "none" and name is None:
        return DraftChoice(engine, None)
    return DraftChoice(engine, resolve(name, "draft", on_progress))


def weigh(engine: DraftEngineName, folder: Path, name: str | None, verdict: EngineVerdict | None) -> DraftChoice:
    """The engine on the converted `folder`, or MLX on the folder's source model if the verdict says so."""
    if verdict is None or verdict.choice != "mlx":
        return DraftChoice(engine, folder)
    given = name is None or not is_converted(Path(name).expanduser())
    source = resolve(name, "draft") if given else source_of(folder)
    note = f"The draft runs in MLX, not on the Neural Engine ({verdict.reason}): see launch-pipeline doctor."
    return DraftChoice("mlx", source, note)


def place_of(folder: Path) -> ExaminedSystem:
    """What a verdict that is found now on this machine is about: system, chip and converted model."""
    return ExaminedSystem(system_build(), chip(), package_fingerprint(folder))


def _fitting(target: str) -> Iterator[str]:
    """What this target can have as a draft."""
    draft = draft_beside(target)
    yield f"the draft {draft}" if draft else "a draft of the target's family"
    for name, engine in offered_engines().items():
        if engine.model == "none":
            yield f"the draft engine {name}"
