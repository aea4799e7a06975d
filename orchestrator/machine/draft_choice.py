"""Which engine drafts, on which folder: what was asked for, unless that does not fit the target or the machine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from orchestrator.machine.checkpoints import demo_model, resolve
from orchestrator.machine.converted_draft import converted_draft, is_converted, source_of
from orchestrator.machine.downloads.default_target import default_draft, is_default_target
from orchestrator.machine.hardware import chip, system_build
from orchestrator.machine.progress import OnProgress, silent
from orchestrator.machine.recommended_pairs import pair_with_target
from protocol.contracts.engines import NO_DRAFT, DraftEngineName, draft_model, offered_engines
from protocol.contracts.neural_engine import EngineVerdict, ExaminedSystem, package_fingerprint, recorded
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint


class DraftChoice(NamedTuple):
    """What the draft worker is told."""

    engine: DraftEngineName
    folder: Path | None
    """None: no model of its own, so that the target's tokenizer is the draft's."""
    note: str = ""
    """One line for the user, if it is not what he asked for."""


def draft_for(
    target: str | None, engine: DraftEngineName, name: str | None, on_progress: OnProgress, *, own: bool = False
) -> DraftChoice:
    """`draft_choice` beside the target of this name (None: the demo target).

    Without a name, a shipped draft is taken only if the target has its tokenizer. Otherwise there is no draft, and the
    note says which ones fit; beside the default target the n-gram engine drafts. `own`: a program of the user's
    drafts, which then gets no model.
    """
    if name is not None or draft_model(engine) == "none":
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
        f"add {' or '.join(_fitting(target or ''))}.",
    )


def draft_choice(engine: DraftEngineName, name: str | None, on_progress: OnProgress = silent) -> DraftChoice:
    """The engine and the folder of the draft `name`; converts it if need be.

    Without a name it is the demo draft, or no model if the engine needs none. Raises InputError for an engine that
    there is not and a draft that can't be had.
    """
    model = draft_model(engine)
    if model == "package":
        folder = converted_draft(name, on_progress)
        # Elsewhere the executor runs the package, and there is nothing to find out.
        verdict = recorded(place_of(folder)) if sys.platform == "darwin" else None
        return weigh(engine, folder, name, verdict)
    if model == "none" and name is None:
        return DraftChoice(engine, None)
    return DraftChoice(engine, resolve(name, "draft", on_progress))


def weigh(engine: DraftEngineName, folder: Path, name: str | None, verdict: EngineVerdict | None) -> DraftChoice:
    """The engine on the converted `folder`, or MLX on the model that it was made from if the verdict says so."""
    if verdict is None or verdict.choice != "mlx":
        return DraftChoice(engine, folder)
    given = name is None or not is_converted(Path(name).expanduser())
    source = resolve(name, "draft") if given else source_of(folder)
    note = f"The draft runs in MLX, not on the Neural Engine ({verdict.reason}): see launch-pipeline doctor."
    return DraftChoice("mlx", source, note)


def place_of(folder: Path) -> ExaminedSystem:
    """What a verdict on a converted model, found here and now, is about."""
    return ExaminedSystem(system_build(), chip(), package_fingerprint(folder))


def _fitting(target: str) -> Iterator[str]:
    """Options that give this target a draft."""
    pair = pair_with_target(target)
    yield f"--pair {pair}" if pair else "--draft MODEL of the target's family"
    for name, engine in offered_engines().items():
        if engine.model == "none":
            yield f"--draft-engine {name}"
