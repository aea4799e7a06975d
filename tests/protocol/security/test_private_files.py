"""Whatever writes prompts, answers or what they can be computed from, writes for this user alone."""

import stat
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from draft_worker.training.rows import whole_file
from orchestrator.core.events import Tick
from orchestrator.lab.simulate.workers import modelled_hello
from orchestrator.runtime.recording import Journal, Recording
from orchestrator.text.prompt_files import write_prompts
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts
from protocol.worker.spans import SpanRing
from protocol.worker.tracing import TracedWorker
from tests.support.paths import DEMO_TARGET


def journal(file: Path) -> None:
    written = Journal(str(file))
    written.write(Tick(), 0.0)
    written.close()


def trace(file: Path) -> None:
    recording = Recording(file.parent)
    recording.arrived("target", 1, modelled_hello("target"))
    recording.save()


def script(file: Path) -> None:
    TracedWorker(None, SpanRing()).save(file.parent, file.stem)  # pyright: ignore[reportArgumentType]


def texts(file: Path) -> None:
    header = RecordedTarget(model_fingerprint="", vocabulary=9, context=9, texts=1)
    RecordedTexts(header, [RecordedText(prompt=(1,), temperature=0.0, seed=0, tokens=(2,))]).write(file)


def prompts(file: Path) -> None:
    data = file.parents[1] / "data.txt"
    data.write_text('{"turns": ["A prompt."]}')
    write_prompts([data], DEMO_TARGET, file)


def training(file: Path) -> None:
    with whole_file(file) as unfinished:
        mx.save_safetensors(str(unfinished), {"a": mx.zeros(1)})


WRITERS: dict[str, Callable[[Path], None]] = {
    "events": journal,
    "trace.json": trace,
    "worker.script": script,
    "texts.jsonl": texts,
    "prompts.jsonl": prompts,
    "answers.safetensors": training,
}


@pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=[*WRITERS])
def test_private_text_can_be_read_by_this_user_alone_also_in_a_file_that_others_could_read(
    tmp_path: Path, name: str, write: Callable[[Path], None]
):
    known, new = tmp_path / "known" / name, tmp_path / "new" / name
    known.parent.mkdir()
    known.touch(0o644)
    if write not in (prompts, training):
        new.parent.mkdir(0o700)  # by who asks for the record
    for file in (known, new):
        write(file)

    assert [stat.S_IMODE(file.stat().st_mode) for file in (known, new, new.parent)] == [0o600, 0o600, 0o700]
    assert all(file.stat().st_size for file in (known, new))
