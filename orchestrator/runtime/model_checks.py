"""What `doctor` finds about a target, a draft, and a converted draft on the Neural Engine."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from orchestrator.machine.check import Check
from orchestrator.machine.checkpoints import complete, resolve
from orchestrator.machine.drafts.converted_draft import converted_draft, is_converted
from orchestrator.machine.drafts.draft_choice import draft_choice, place_of
from orchestrator.machine.drafts.shipped_drafts import default_draft
from orchestrator.machine.gguf import conversion_of
from orchestrator.machine.hardware import computes_on_processor, usable_bytes, worker_environment
from orchestrator.machine.memory.budget import size
from orchestrator.machine.memory.kv_plan import about
from orchestrator.machine.neural_engine import EXAMINER, LIMITS, PREDICTS, Limits, OnStage, examine
from orchestrator.machine.target import MEANINGS
from orchestrator.runtime.memory_plan import kept_alone
from protocol.child_process import module_command
from protocol.contracts.coreml import OnProgress, silent
from protocol.contracts.coreml import record as record_verdict
from protocol.contracts.drafters.description import FINAL, Drafter
from protocol.contracts.drafters.detection import has_own_head, read_drafter
from protocol.contracts.drafters.readings import keys_as_read
from protocol.contracts.engines import AUTO
from protocol.contracts.model_folder import ModelFolder, TargetShape
from protocol.contracts.model_report import Loaded, ModelRefusal, ModelReport, record
from protocol.errors import InputError
from protocol.messages.base import Role
from protocol.shown_names import model_name

_PATIENCE = 1800.0
"""Seconds for loading a model of hundreds of GB."""
_AGAIN = "run launch-pipeline doctor --neural-engine again while nothing else runs"


def target_finding(name: str, on_progress: OnProgress = silent) -> Check:
    """`doctor --target MODEL`: what one forward of it verifies, by a process that loads it. The model may be downloaded
    or converted for it."""
    try:
        folder = resolve(name, "target", on_progress)
    except InputError as error:
        return Check("target", "fail", str(error))
    report = _examination("target", "target_worker.model_examination", str(folder))
    if report is None or isinstance(report, Loaded):
        return _not_loaded("target", folder)
    finding = described(folder, report)
    if finding.status != "ok":
        return finding
    more = [finding.text, *weights_told(folder)]
    if tokens := kept_alone(folder):
        more.append(f"Alone it keeps {about(tokens)} tokens of conversations in this machine's memory.")
    return replace(finding, text=" ".join(more))


def weights_told(folder: Path) -> Iterator[str]:
    """What a GGUF file's weights became, and what packed weights take here."""
    model, conversion = ModelFolder(folder), conversion_of(folder)
    if conversion is not None:
        yield f"It was converted from {conversion.text}."
    if computes_on_processor() and model.config.get("quantization"):
        unpacked, most = model.loaded_bytes(on_processor=True), usable_bytes()
        choice = "expanded to" if unpacked <= most else f"not expanded, since {size(most)} may be used here, to"
        yield f"A processor multiplies packed weights slowly: they are {choice} {size(unpacked)} of float32."


def _examination(role: Role, module: str, *arguments: str) -> ModelReport | ModelRefusal | Loaded | None:
    """What a process says that loads a model; None if it crashed or hung."""
    environment = {**os.environ, **worker_environment(role, ())}
    command = [*module_command(module), *arguments]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False, env=environment
        )
        return msgspec.json.decode(answer.stdout, type=ModelReport | ModelRefusal | Loaded)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        return None


def _not_loaded(role: Role, folder: Path) -> Check:
    text = f"{folder} could not be loaded: the process that loads it crashed or hung"
    return Check(role, "fail", text, "free memory, download the model again, or choose a smaller one")


def described(folder: Path, report: ModelReport | ModelRefusal) -> Check:
    if isinstance(report, ModelRefusal):
        return Check("target", "fail", report.text)
    higher = f" It is no higher level: {report.reason.rstrip('.')}." if report.reason else ""
    joint = "share a forward" if report.joins else "are evaluated in turns"
    deviation = f"{report.joint_deviation:.2g} standard deviations" if report.joint_deviation is not None else ""
    if deviation and not report.joins:
        joint += f", since logits in one forward for several deviate by {deviation}"
    states = "Its states can't be recorded, so that no trained drafter can draft for it."
    if report.recorded_layers:
        states = f"The states of its {report.recorded_layers} layers can be recorded for a trained drafter."
    if report.batch_dependent:
        states += (
            f" In a forward for several requests logits deviate by {deviation}, which is more than rounding: a text "
            "may depend on the requests beside it. One with a seed shares no forward."
        )
    return Check(
        "target",
        "ok",
        f"{model_name(folder)} ({report.architecture}) is a {report.level} model: {MEANINGS[report.level]}.{higher} "
        f"Several requests {joint}; the context is {report.context:,} tokens. {states}",
    )


def draft_findings(name: str, target: str | None = None, on_progress: OnProgress = silent) -> list[Check]:
    """`doctor --draft MODEL`: what kind of draft it is, what it reads of its target, and whether the two fit.

    `target`: the name of the target, if it is asked for beside one. Both may be downloaded for it. Then also each key
    of the drafter's config.json as it was read, and whether another reading guesses more of the target's own text.
    """
    try:
        if target is not None:
            choice = draft_choice(AUTO, name, on_progress, resolve(target, "target", on_progress))
            assert choice.folder is not None
            shape = ModelFolder(choice.target).shape if choice.target is not None else None
            finding = _described(choice.folder, shape, own_head=choice.engine == "mtp")
            if choice.target is None or is_converted(choice.folder):
                return [finding]
            findings = [finding, _keys(choice.folder, own_head=choice.engine == "mtp")]
            if not complete(choice.target):
                return findings
            return _loaded(choice.engine, choice.folder, choice.target, findings)
        folder = Path(name).expanduser()
        return [_described(folder if is_converted(folder) else resolve(name, "draft", on_progress), None)]
    except InputError as error:
        return [Check("draft", "fail", str(error))]


def _keys(folder: Path, *, own_head: bool) -> Check:
    keys = [*keys_as_read(folder, with_own_head=own_head)]
    lines = [f"{key} {value}: {use}" for key, value, use in keys if use]
    unused = ", ".join(f"{key} {value}" for key, value, use in keys if not use)
    return Check("keys", "ok", "\n".join([*lines, f"Not used: {unused or 'none'}."]))


def _loaded(engine: str, folder: Path, target: Path, findings: list[Check]) -> list[Check]:
    """`findings` and what a process finds that loads a trained drafter and its target; if it can't, that alone."""
    match _examination("draft", "draft_worker.drafter_examination", engine, str(folder), str(target)):
        case ModelRefusal(text=text):
            return [Check("draft", "fail", text)]
        case Loaded() as report:
            record(folder, target, report)
            return [*findings, Check("reading", "warn" if report.wrong else "ok", report.guessed)]
        case _:
            return [_not_loaded("draft", folder)]


def _described(folder: Path, target: TargetShape | None, *, own_head: bool = False) -> Check:
    if is_converted(folder):
        return Check("draft", "ok", f"{model_name(folder)} is a Core ML package of a language model.")
    drafter = read_drafter(folder, with_own_head=own_head)
    if drafter is not None:
        return Check("draft", "ok", told(folder, drafter, target))
    name = model_name(folder)
    text = f"{name} is a language model: it reads tokens alone, and any target with its tokenizer can have it."
    if has_own_head(folder):
        text += " It has an MTP head too, which drafts for the model itself."
    return Check("draft", "ok", text)


def told(folder: Path, drafter: Drafter, target: TargetShape | None) -> str:
    """What the drafter is, in sentences. `target`: the one that it fits, if it is known."""
    held = f"{model_name(folder)} holds {drafter.name} ({drafter.format} format) for the draft engine {drafter.engine}."
    fits = "It fits this target." if target is not None else "With --target it is checked against a target."
    outputs = drafter.stated_outputs if target is None else drafter.outputs(target)
    read, count = "three outputs (a low, a middle and a high one)", 3
    if outputs is not None:
        read, count = f"the outputs of layers {', '.join(map(str, outputs))} (from 0)", len(outputs)
    if outputs == (FINAL,):
        read = "the last output behind the final norm"
    return f"{held} It reads {read} of the target, {2 * count * drafter.width:,} bytes a token in 16 bits. {fits}"


def examined(
    draft: str | None,
    *,
    on_progress: OnProgress = silent,
    on_stage: OnStage = lambda _: None,
    examiner: Sequence[str] = EXAMINER,
    predicts: int = PREDICTS,
    limits: Limits = LIMITS,
) -> list[Check]:
    """`doctor --neural-engine`: findings on the draft model `draft` (None: the default draft), and on which engine the
    pipeline uses for it.

    The verdict replaces what is stored by system build, chip and package.
    """
    model, note = (draft, "") if draft is not None else default_draft(on_progress)
    folder = converted_draft(str(model), on_progress)
    _, findings, verdict = examine(
        folder, place_of(folder), examiner=examiner, limits=limits, predicts=predicts, on_stage=on_stage
    )
    findings = [*([Check("draft", "warn", note)] if note else []), *findings]
    core_ml, file = verdict.choice == "coreml", record_verdict(verdict)
    if verdict.choice == "unknown":
        return [*findings, Check("verdict", "warn", f"not known: the failure may not come again ({file})", _AGAIN)]
    text = f"--draft-engine coreml {'uses Core ML' if core_ml else 'drafts in MLX'} here ({file})"
    return [*findings, Check("verdict", "ok" if core_ml else "warn", text)]
