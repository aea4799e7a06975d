"""`doctor --draft MODEL`: what kind of draft it is, what it reads of its target, and whether the two fit."""

from pathlib import Path

from orchestrator.machine.drafts.converted_draft import holds_drafter, is_converted
from orchestrator.machine.drafts.draft_choice import draft_choice
from orchestrator.machine.drafts.trained_drafter import is_exit
from orchestrator.machine.finding import Finding
from orchestrator.machine.models.checkpoints import resolve
from orchestrator.machine.progress import OnProgress, silent
from protocol.contracts.drafters.description import FINAL, Drafter
from protocol.contracts.drafters.detection import has_own_head, read_drafter
from protocol.contracts.drafters.target_shape import TargetShape, target_shape
from protocol.contracts.engines import AUTO
from protocol.errors import InputError
from protocol.shown_names import model_name

_NAME = "draft"


def draft_finding(name: str, target: str | None = None, on_progress: OnProgress = silent) -> Finding:
    """`target`: the name of the target, if it is asked for beside one. Both may be downloaded for it."""
    try:
        if target is not None:
            choice = draft_choice(AUTO, name, on_progress, target)
            assert choice.folder is not None
            shape = target_shape(choice.target) if choice.target is not None else None
            return _described(choice.folder, shape, own_head=choice.engine == "mtp")
        if is_exit(AUTO, name):
            raise InputError(f"{name} is the target's own first layers: name the target too (--target).")
        folder = Path(name).expanduser()
        return _described(folder if is_converted(folder) else resolve(name, "draft", on_progress), None)
    except InputError as error:
        return Finding(_NAME, "fail", str(error))


def _described(folder: Path, target: TargetShape | None, *, own_head: bool = False) -> Finding:
    if is_converted(folder):
        reads = "a trained drafter, which reads its target's states" if holds_drafter(folder) else "a language model"
        return Finding(
            _NAME,
            "ok",
            f"{model_name(folder)} is a Core ML package of {reads}: it was compared with MLX when it was made.",
        )
    drafter = read_drafter(folder, with_own_head=own_head)
    if drafter is not None:
        return Finding(_NAME, "ok", told(folder, drafter, target))
    name = model_name(folder)
    text = f"{name} is a language model: it reads tokens alone, and any target with its tokenizer can have it."
    if has_own_head(folder):
        text += " It has an MTP head too, which drafts for the model itself."
    return Finding(_NAME, "ok", text)


def told(folder: Path, drafter: Drafter, target: TargetShape | None) -> str:
    """What the drafter is, in sentences. `target`: the one that it fits, if it is known."""
    parts = [
        f"{model_name(folder)} holds {drafter.name} ({drafter.format} format) for the draft engine {drafter.engine}."
    ]
    if drafter.kind == "exit":
        parts.append(f"It is the target's first {drafter.layers} layers, and reads none of its states.")
    else:
        parts.append(
            f"It reads {_outputs(drafter, target)} of the target, {drafter.feature_bytes:,} bytes a token in 16 bits."
        )
    if drafter.drafted is not None and drafter.target_vocabulary is not None:
        parts.append(f"It drafts {drafter.drafted:,} of {drafter.target_vocabulary:,} tokens.")
    if drafter.block > 1:
        parts.append(f"One forward guesses {drafter.block} tokens.")
    if drafter.kind != "exit":
        read, head = (drafter.read, "") if target is None else (drafter.read_beside(target), ", head included")
        held = _millions(drafter.parameters)
        parts.append(f"A growth step reads {_millions(read)} parameters{head}; its files hold {held}.")
    parts.append("It fits this target." if target is not None else "With --target it is checked against a target.")
    return " ".join(parts)


def _outputs(drafter: Drafter, target: TargetShape | None) -> str:
    if drafter.stated_outputs is None and target is None:
        return f"{drafter.count} outputs (a low, a middle and a high one)"
    outputs = drafter.outputs(target) if target is not None else drafter.stated_outputs or ()
    if outputs == (FINAL,):
        return "the last output behind the final norm"
    return f"the outputs of layers {', '.join(map(str, outputs))} (from 0)"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} M"
