"""The draft engine and its model's folder: the given ones, unless they do not fit the target or the machine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.checkpoints import complete, resolve
from orchestrator.machine.default_target import default_target
from orchestrator.machine.drafts.auto_draft import AutoDraft, place_of
from orchestrator.machine.drafts.converted_draft import (
    converted_draft,
    is_converted,
    source_of,
)
from orchestrator.machine.drafts.shipped_drafts import default_draft, shipped_draft
from orchestrator.machine.hardware import neural_engine
from orchestrator.machine.pairs.recommended_pairs import draft_beside
from protocol.contracts.coreml import EngineVerdict, OnProgress, recorded, silent
from protocol.contracts.drafters.description import Drafter
from protocol.contracts.drafters.detection import has_own_head, is_drafter, read_drafter
from protocol.contracts.engines import AUTO, NO_DRAFT, DraftEngineName, draft_model, offered_engines
from protocol.contracts.model_folder import ModelFolder, stated_shape
from protocol.contracts.model_report import recorded as recorded_check
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
    """Of a trained drafter: the target's folder, whose embedding or head it uses."""


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
    folder = resolve(target, "target", on_progress)
    if name is None:
        shipped = shipped_draft(folder)
        name = None if shipped is None else str(shipped)
    if name is not None:
        choice = draft_choice(engine, name, on_progress, folder)
        automatic = engine == AUTO and not own and choice.engine == _FIRST
        return _automatic(choice, folder) if automatic else choice
    if own:
        return DraftChoice(_FIRST if engine == AUTO else engine, None)
    return DraftChoice(
        NO_DRAFT,
        None,
        f"There is no draft, since no shipped draft fits the target {target}: choose {' or '.join(_fitting(target))}.",
    )


def draft_choice(
    engine: DraftEngineName, name: str | None, on_progress: OnProgress = silent, target: Path | None = None
) -> DraftChoice:
    """The engine and the folder of the draft `name`; converts the model if the engine needs a package.

    Without a name it is the default draft, or no model if the engine needs none. Each kind of trained drafter has an
    engine of its own and needs the `target`'s folder. AUTO is `first_engine`: Core ML for a converted model, MLX for a
    checkpoint.
    Raises InputError for an unknown engine, for a draft that is not available, and for a drafter that does not fit.
    """
    trained = None if draft_model(engine) == "none" else _trained_draft(engine, name, target, on_progress)
    if trained is not None:
        return trained
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
        examined = engine == "coreml" and sys.platform == "darwin"
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
    return engine if is_drafter(folder) else _FIRST


def weigh(engine: DraftEngineName, folder: Path, name: str, verdict: EngineVerdict | None) -> DraftChoice:
    """The engine on the converted `folder`, or MLX on the model that was converted if the verdict says so.

    `name`: the draft as it was asked for, a model or a converted folder.
    """
    if verdict is None or verdict.choice != "mlx":
        return DraftChoice(engine, folder)
    source = source_of(folder) if is_converted(Path(name).expanduser()) else resolve(name, "draft")
    note = f"The draft runs in MLX, not on the Neural Engine ({verdict.reason}): see launch-pipeline doctor."
    return DraftChoice("mlx", source, note)


def _automatic(choice: DraftChoice, target: Path) -> DraftChoice:
    """The engine that was found faster for this draft beside this target; MLX until that is known."""
    runtime = neural_engine()
    if runtime is None or choice.folder is None:
        return choice
    auto = AutoDraft.on_this_machine(choice.folder, target, runtime)
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


# Trained drafters ---------------------------------------------------------------------------------


def _trained_draft(
    engine: DraftEngineName, name: str | None, target: Path | None, on_progress: OnProgress
) -> DraftChoice | None:
    """The draft `name` beside `target`, if it is a trained drafter; None for an ordinary model.

    Raises InputError for a drafter that is damaged, that does not fit the target or the engine, and for an engine of
    drafters beside an ordinary model.
    """
    if name is None or is_converted(Path(name).expanduser()):
        return None
    folder = resolve(name, "draft", on_progress)
    drafter = _read(folder, engine, target)
    if drafter is None:
        return None
    target = _required(target, folder)
    drafter.fitting(folder, target)
    return DraftChoice(drafter.engine, folder, _reading_note(folder, target), target=target)


def _reading_note(folder: Path, target: Path) -> str:
    """What `doctor` has found wrong with the drafter's config.json, or that it was not asked yet."""
    report = recorded_check(folder, target)
    if report is not None or not complete(target):
        return report.guessed if report is not None and report.wrong else ""
    command = f"launch-pipeline doctor --draft {folder} --target {target}"
    return f"Whether the draft's config.json is read rightly was never checked: run `{command}` once."


def _read(folder: Path, engine: DraftEngineName, target: Path | None) -> Drafter | None:
    drafter = read_drafter(folder, with_own_head=engine == "mtp")
    if drafter is None and engine == AUTO and target is not None:
        drafter = _own_head(folder, target)
    if drafter is None:
        if draft_model(engine) == "drafter":
            raise InputError(
                f"{folder} is an ordinary language model, which the draft engine {engine} can't run: leave out the "
                "engine, or choose a drafter that was trained for the target."
            )
        return None
    if engine not in (AUTO, drafter.engine):
        raise InputError(
            f"{folder} holds {drafter.name}, which the draft engine {engine} can't run: leave out the engine or choose "
            f"{drafter.engine}, or choose a draft in mlx-lm's format."
        )
    return drafter


def _own_head(folder: Path, target: Path) -> Drafter | None:
    """The MTP head of a checkpoint that has the target's shape. A smaller model of the family drafts as a model."""
    same = [stated_shape(ModelFolder(each).config) for each in (folder, target)]
    return read_drafter(folder, with_own_head=True) if same[0] == same[1] and has_own_head(folder) else None


def _required(target: Path | None, draft: Path) -> Path:
    if target is None:
        raise InputError(
            f"The draft {draft} uses the embedding of its target: name the target's folder or Hugging Face "
            "id too (--target), the same as on the other machine."
        )
    return target
