"""How often the drafts of a bench guess what its target wrote, each alone: in a process of the draft worker's package.

The texts are those of the bench's own generations.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from orchestrator.lab.bench.measurement import BenchRequest, Measurement, is_checked
from orchestrator.lab.bench.models import BenchModels
from orchestrator.lab.bench.names import LOOKUP
from orchestrator.machine.drafts.converted_draft import is_converted
from orchestrator.machine.hardware import worker_environment
from orchestrator.machine.reporting_process import reports
from protocol.contracts.coreml.conversion import Failed
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.training import HeldOutAcceptance


class TargetText(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the target wrote behind a prompt, with shared noise."""

    tokens: tuple[int, ...]
    """Of the prompt and of the answer."""
    prompt: int
    """How many of them are the prompt's."""
    temperature: float
    seed: int


class ExaminedDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    engine: str
    model: str
    """Folder; empty for an engine without a model."""


class AcceptanceOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one JSON argument of `python -m orchestrator.lab.bench.guessing`."""

    target: str
    drafts: tuple[ExaminedDraft, ...]
    texts: str
    """File with a JSON list of TargetText."""


class AcceptanceProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", forbid_unknown_fields=True):
    name: str
    done: int
    total: int
    """Texts of all drafts."""


class DraftAcceptance(msgspec.Struct, frozen=True, kw_only=True, tag="draft", forbid_unknown_fields=True):
    """One draft on all texts."""

    name: str
    acceptance: tuple[HeldOutAcceptance, ...]
    """By temperature. A draft that reads tokens alone has one row: it is never stale."""
    seconds_per_guess: float
    """Median, of guesses that follow one another, each a growth step of one node."""


class AcceptanceFinished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """All drafts are reported."""


AcceptanceReport: TypeAlias = AcceptanceProgress | DraftAcceptance | AcceptanceFinished | Failed
"""One JSON object a line of the process's standard output."""


_GRACE = 2.0
_FEWEST_TOKENS = 2


class ExaminedDrafter(NamedTuple):
    """One draft alone."""

    found: DraftAcceptance
    parameters: float | None
    """That a guess reads; None for a draft without any."""


def examined(
    models: BenchModels,
    drafters: Sequence[Path],
    texts: Sequence[TargetText],
    on_text: Callable[[str, int, int], None],
    threads: int,
) -> list[ExaminedDrafter]:
    """The pair's own draft, these, and prompt lookup. `on_text`: name, texts done, texts in all.

    Raises InputError or PipelineError with the process's own sentence.
    """
    folders = {folder.name: folder for folder in drafters}
    own = models.draft.name
    folders = {own if own not in folders else f"{own} of the pair": models.draft, **folders}
    drafts = [ExaminedDraft(name=name, engine=_engine(folder), model=str(folder)) for name, folder in folders.items()]
    drafts.append(ExaminedDraft(name=LOOKUP, engine="ngram", model=""))
    found = []
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        Path(file.name).write_bytes(msgspec.json.encode(texts))
        order = AcceptanceOrder(target=str(models.target), drafts=tuple(drafts), texts=file.name)
        environment = worker_environment("draft", range(threads))
        with closing(
            reports(
                "orchestrator.lab.bench.guessing",
                order,
                AcceptanceReport,
                (AcceptanceFinished,),
                name="The examination of the drafts",
                grace=_GRACE,
                variables=environment,
            )
        ) as messages:
            for message in messages:
                if isinstance(message, DraftAcceptance):
                    folder = folders.get(message.name)
                    read = None if folder is None else models.parameters_per_guess(folder)
                    found.append(ExaminedDrafter(message, read))
                elif not isinstance(message, AcceptanceFinished):
                    on_text(message.name, message.done, message.total)
    return found


def _engine(folder: Path) -> str:
    if is_converted(folder):
        return "coreml"
    drafter = read_drafter(folder)
    return "mlx" if drafter is None else drafter.engine


def written_texts(measurements: Sequence[Measurement], requests: Sequence[BenchRequest]) -> list[TargetText]:
    """What the target wrote in each setting of the first repeat, from the first contender with its tokens."""
    prompts = {(each.prompt, each.turn): each.tokens for each in requests}
    found: dict[tuple[int, int, float], TargetText] = {}
    for measurement in measurements:
        setting, tokens = measurement.setting, measurement.generation.tokens
        own = is_checked(measurement) and measurement.family != "rival" and len(tokens) >= _FEWEST_TOKENS
        # mlx-lm's own sampling draws other noise.
        shared = setting.temperature == 0 or measurement.family == "coupled"
        if setting.repeat == 0 and own and shared:
            prompt = prompts[setting.prompt, setting.turn]
            text = TargetText(
                tokens=(*prompt, *tokens), prompt=len(prompt), temperature=setting.temperature, seed=setting.seed
            )
            found.setdefault((setting.prompt, setting.turn, setting.temperature), text)
    return list(found.values())
