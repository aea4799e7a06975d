"""The draft engine and its model's folder: the given ones, unless they do not fit the target or the machine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.downloads.default_target import default_target
from orchestrator.machine.drafts.auto_draft import AutoDraft, place_of
from orchestrator.machine.drafts.converted_draft import (
    converted_draft,
    holds_drafter,
    is_converted,
    source_of,
)
from orchestrator.machine.drafts.shipped_drafts import default_draft, shipped_draft
from orchestrator.machine.drafts.trained_drafter import is_exit, trained_draft
from orchestrator.machine.hardware import neural_engine
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.machine.pairs.recommended_pairs import draft_beside
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.coreml.neural_engine import EngineVerdict, recorded
from protocol.contracts.drafters.detection import is_drafter, read_drafter
from protocol.contracts.engines import AUTO, NO_DRAFT, DraftEngineName, draft_model, offered_engines
from protocol.errors import InputError

_FIRST: DraftEngineName = "mlx"
"""The engine that AUTO begins with."""


class DraftChoice(NamedTuple):
    """What the draft worker is told."""

    engine: DraftEngineName
    folder: Path | None
    """None: no model of its own, so that the target's tokenizer is the draft's."""
    note: str = ""
    """One line for the user if this differs from the given options."""
    auto: AutoDraft | None = None
    """The pipeline may change the engine while it runs."""
    target: Path | None = None
    """Of a trained drafter: the target's folder, whose embedding, head or layers it uses."""


def draft_for(
    target: str, engine: DraftEngineName, name: str | None, on_progress: OnProgress, *, own: bool = False
) -> DraftChoice:
    """`draft_choice` beside the target of this name.

    An engine without a model gets none, even if `name` is one. Without a name it is the draft that is shipped for the
    target. If there is none, the target decodes alone, and the note says which drafts fit. `own`: a program of the
    user is the draft; it then gets no model.
    """
    if draft_model(engine) == "none":
        return DraftChoice(engine, None)
    if name is None and not is_exit(engine, name):
        shipped = shipped_draft(resolve(target, "target", on_progress))
        name = None if shipped is None else str(shipped)
    if name is not None or is_exit(engine, name):
        choice = draft_choice(engine, name, on_progress, target)
        automatic = engine == AUTO and not own and (choice.engine == _FIRST or _is_convertible(choice))
        return _automatic(choice, resolve(target, "target", on_progress)) if automatic else choice
    if own:
        return DraftChoice(_FIRST if engine == AUTO else engine, None)
    return DraftChoice(
        NO_DRAFT,
        None,
        f"There is no draft, since no shipped draft fits the target {target}: choose {' or '.join(_fitting(target))}.",
    )


def draft_choice(
    engine: DraftEngineName, name: str | None, on_progress: OnProgress = silent, target: str | None = None
) -> DraftChoice:
    """The engine and the folder of the draft `name`; converts the model if the engine needs a package.

    Without a name it is the default draft, or no model if the engine needs none. Each kind of trained drafter has an
    engine of its own and needs the `target`'s name. AUTO is `first_engine`: Core ML for a converted model, MLX for a
    checkpoint.
    Raises InputError for an unknown engine, for a draft that is not available, and for a drafter that does not fit.
    """
    trained = None if draft_model(engine) == "none" else trained_draft(engine, name, target, on_progress)
    if trained is not None:
        return DraftChoice(trained.engine, trained.folder, target=trained.target)
    engine = first_engine(engine, name)
    model, note = draft_model(engine), ""
    if name is None:
        if model == "none":
            return DraftChoice(engine, None)
        folder, note = default_draft(on_progress)
        name = str(folder)
    if model == "package":
        folder = converted_draft(name, on_progress)
        # On other systems the executor runs the package, so there is no device to examine.
        # A trained drafter's folder was asked for: MLX would run it by another engine.
        examined = engine == "coreml" and sys.platform == "darwin" and not holds_drafter(folder)
        verdict = recorded(place_of(folder)) if examined else None
        choice = weigh(engine, folder, name, verdict)
        return choice._replace(note=_told(note, choice.note))
    return DraftChoice(engine, resolve(name, "draft", on_progress), note)


def first_engine(engine: DraftEngineName, name: str | None) -> DraftEngineName:
    """The engine itself, or for AUTO the one that fits the draft `name` and is taken while no trial says otherwise.

    A trained drafter in a folder keeps AUTO, since its kind and its target decide.
    """
    if engine != AUTO or name is None:
        return _FIRST if engine == AUTO else engine
    folder = Path(name).expanduser()
    if is_converted(folder):
        return "coreml"
    return engine if is_exit(engine, name) or is_drafter(folder) else _FIRST


def weigh(engine: DraftEngineName, folder: Path, name: str, verdict: EngineVerdict | None) -> DraftChoice:
    """The engine on the converted `folder`, or MLX on the model that was converted if the verdict says so.

    `name`: the draft as it was asked for, a model or a converted folder.
    """
    if verdict is None or verdict.choice != "mlx":
        return DraftChoice(engine, folder)
    source = source_of(folder) if is_converted(Path(name).expanduser()) else resolve(name, "draft")
    note = f"The draft runs in MLX, not on the Neural Engine ({verdict.reason}): see launch-pipeline doctor."
    return DraftChoice("mlx", source, note)


def _is_convertible(choice: DraftChoice) -> bool:
    """Whether it is a trained drafter of a kind that has a form for Core ML."""
    if choice.target is None or choice.folder is None:
        return False
    drafter = read_drafter(choice.folder)
    return drafter is not None and drafter.converts


def _automatic(choice: DraftChoice, target: Path) -> DraftChoice:
    """The engine that was found faster for this draft beside this target; MLX until that is known."""
    runtime = neural_engine()
    if runtime is None or choice.folder is None:
        return choice
    auto = AutoDraft.on_this_machine(choice.folder, target, runtime, choice.engine)
    verdict = auto.verdict()
    if verdict is None:
        return choice._replace(auto=auto)
    if verdict.choice == "mlx":
        return choice._replace(
            note=_told(choice.note, f"The draft runs in MLX ({verdict.reason}): see launch-pipeline doctor.")
        )
    note = _told(choice.note, f"The draft runs on the Neural Engine ({verdict.reason}).")
    return DraftChoice("coreml", auto.package, note, auto)


def _told(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _fitting(target: str) -> Iterator[str]:
    """What this target can have as a draft."""
    draft = draft_beside(target)
    yield f"the draft {draft}" if draft else "a draft of the target's family"
    for name, engine in offered_engines().items():
        if engine.model == "none":
            yield f"the draft engine {name}"


class PairChoice(NamedTuple):
    target: Path
    draft: DraftChoice
    """Its note is about the draft alone."""
    note: str
    """One line for the user if the target is not the one to be expected."""


def pair_for(
    target: str | None, engine: DraftEngineName, draft: str | None, on_progress: OnProgress, *, own: bool = False
) -> PairChoice:
    """The folders of these names (None: the default), fetched or converted on first use; `engine` is the draft's.

    `own`: a program of the user is the draft. Raises InputError for a model that can't be had.
    """
    note = ""
    if target is None:
        found = default_target(on_progress)
        target, note = str(found.folder), found.note
    choice = draft_for(target, engine, draft, on_progress, own=own)
    return PairChoice(resolve(target, "target", on_progress), choice, note)


def measured_pair(target: str | None, draft: str | None, on_progress: OnProgress = silent) -> PairChoice:
    """As of `pair_for` with the engine mlx, for measurements of a language model as the draft. Raises InputError for a
    trained drafter too."""
    if draft is not None and (drafter := read_drafter(resolve(draft, "draft", on_progress))) is not None:
        raise InputError(
            f"{draft} holds {drafter.name}, and the draft that is measured here is a language model: choose one in "
            f"mlx-lm's format. `launch-pipeline bench --draft {draft}` measures trained drafters."
        )
    return pair_for(target, "mlx", draft, on_progress)
