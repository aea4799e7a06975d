"""The folder of a first light: which program made it on what, its results, and the archive to send."""

import platform
import subprocess
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from orchestrator.lab.first_light.redaction import Redactor
from orchestrator.lab.first_light.report import LightReport, Run, StageReport, question_rows
from orchestrator.lab.first_light.stages import LightSettings, Question
from orchestrator.machine import hardware as machine_facts
from orchestrator.machine.conditions import is_virtual
from protocol.errors import InputError
from protocol.security.private_files import kept, write_private
from protocol.system import system_build

REPORT, PAGE, _RUN = "report.json", "index.html", "run.json"
_STAGES, _LOGS = "stages", "logs"
_ARCHIVED = Path("first-light")
"""The folder in the archive: the user's own name for it may name somebody."""


class LightFolder:
    """Where a first light writes. A stage's result is there, whole, as soon as the stage is done."""

    def __init__(self, path: Path, run: Run, redactor: Redactor, resumed: bool) -> None:
        """`resumed`: it had results before."""
        self.path = path
        self.run = run
        self.resumed = resumed
        self._redactor = redactor

    @classmethod
    def of(cls, path: Path, run: Run, redactor: Redactor, wanted: Collection[str]) -> "LightFolder":
        """`path`, or a numbered one beside it: the one that an equal run has left unfinished, else a new one.

        `wanted`: the stages with whose results a folder is finished; none: an equal run's folder is never finished.
        Raises InputError for a folder that holds other things, and for one that can't be written.
        """
        run = msgspec.convert(redactor.values(msgspec.to_builtins(run)), Run)
        for candidate in _candidates(path):
            if not candidate.exists():
                return cls._new(candidate, run, redactor)
            earlier = kept(candidate / _RUN, Run)
            if earlier is None and candidate == path:
                if candidate.is_dir() and not any(candidate.iterdir()):
                    return cls._new(candidate, run, redactor)
                raise InputError(f"{candidate} holds other things: choose another folder for --out.")
            if earlier is not None and msgspec.structs.replace(earlier, began=run.began) == run:
                folder = cls(candidate, earlier, redactor, resumed=True)
                if not wanted or not folder.done().keys() >= set(wanted):
                    return folder
        raise AssertionError("there is always a next name")

    @classmethod
    def _new(cls, path: Path, run: Run, redactor: Redactor) -> "LightFolder":
        folder = cls(path, run, redactor, resumed=False)
        try:
            for part in (path / _STAGES, path / _LOGS):
                part.mkdir(parents=True, exist_ok=True)
            folder._write(_RUN, _json(run))
        except OSError as error:
            raise InputError(f"{path} can't be written ({error.strerror}): choose another folder for --out.") from error
        return folder

    def results(self) -> dict[str, StageReport]:
        """The results that are there, by stage. A damaged one is measured again."""
        found: dict[str, StageReport] = {}
        for file in sorted((self.path / _STAGES).glob("*.json")):
            if (report := kept(file, StageReport)) is not None:
                found[report.stage] = report
        return found

    def done(self) -> dict[str, StageReport]:
        """The results that the next start keeps: it measures a stage that failed again."""
        return {name: report for name, report in self.results().items() if report.status != "failed"}

    def save(self, report: StageReport, log: str) -> StageReport:
        """Write a stage's log, its files and its result, the result last. Returns the result as it is written."""
        shown = msgspec.convert(self._redactor.values(msgspec.to_builtins(report)), StageReport)
        self._write(f"{_LOGS}/{report.stage}.txt", self._redactor.text(log))
        for attachment in shown.findings.attachments:
            self._write(Path(attachment.name).name, attachment.text)
        shown = msgspec.structs.replace(shown, findings=msgspec.structs.replace(shown.findings, attachments=()))
        self._write(f"{_STAGES}/{report.stage}.json", _json(shown))
        return shown

    def report(self, stages: Iterable[StageReport], questions: Iterable[Question]) -> LightReport:
        """The stages, which may be results and others, as one report."""
        shown = msgspec.convert(self._redactor.values(msgspec.to_builtins(list(stages))), tuple[StageReport, ...])
        rows = tuple(question_rows(questions, shown))
        return LightReport(**msgspec.structs.asdict(self.run), questions=rows, stages=shown)

    def write(self, report: LightReport, page: str) -> None:
        """The one JSON and the page, both of a report of this folder."""
        self._write(REPORT, _json(report))
        self._write(PAGE, page)

    def archive(self) -> Path:
        """The folder as one file beside it, for an issue. A zip names no user, as a tar would."""
        whole = self.path.resolve()
        packed = whole.with_name(f"{whole.name}.zip")
        unfinished = whole.with_name(f"{whole.name}.zip.new")
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(path for path in self.path.rglob("*") if path.is_file()):
                archive.write(file, _ARCHIVED / file.relative_to(self.path))
        return unfinished.replace(packed)

    def _write(self, name: str, text: str) -> None:
        """The whole text or, if this process ends, the file that was there before."""
        write_private(self.path / name, text.encode())


def _json(value: msgspec.Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    whole = path.resolve()
    yield from (whole.with_name(f"{whole.name}-{number}") for number in count(2))


_LIBRARIES = ("mlx", "mlx-lm", "coremltools", "numpy")
_GIB = 1 << 30


def this_run(settings: LightSettings, began: str) -> Run:
    """Of this program on this machine with these options."""
    options = tuple(f"{name}: {value}" for name, value in msgspec.structs.asdict(settings).items())
    return Run(program=_program(), machine=tuple(_machine()), options=options, began=began)


def _program() -> str:
    version = machine_facts.installed_version("launch-pipeline") or "unknown version"
    checkout, commit = Path(__file__).parents[3], ""
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
        with suppress(OSError, subprocess.TimeoutExpired):
            commit = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    return f"launch-pipeline {version}" + (f", commit {commit}" if commit else "")


def _machine() -> Iterator[str]:
    cores = len(machine_facts.usable_cores())
    virtual = ", a virtual machine" if is_virtual() else ""
    yield f"{machine_facts.chip()}, {machine_facts.memory_bytes() / _GIB:.0f} GiB, {cores} cores{virtual}"
    yield f"{system_build()}, {platform.machine()}, Python {platform.python_version()}"
    versions = {name: machine_facts.installed_version(name) for name in _LIBRARIES}
    yield ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items())
