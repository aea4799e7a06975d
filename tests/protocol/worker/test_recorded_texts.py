"""Laws of the file of recorded texts: what is written is read, and what does not fit is refused."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.errors import InputError
from protocol.messages.sampling import Sampling
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts, request_sampling

_TARGET = RecordedTarget(model_fingerprint="abc", vocabulary=100, context=512, texts=3)
_TEXTS = (
    RecordedText(prompt=(1, 2), temperature=0.0, seed=0, tokens=(3, 4, 5)),
    RecordedText(prompt=(1, 2), temperature=1.0, seed=0, tokens=(6, 7)),
    RecordedText(prompt=(1, 2), temperature=1.0, seed=1, tokens=(8, 9)),
)


def _written(path: Path, target: RecordedTarget = _TARGET) -> Path:
    RecordedTexts(target, _TEXTS).write(path / "texts.jsonl")
    return path / "texts.jsonl"


@pytest.fixture
def read(tmp_path: Path) -> RecordedTexts:
    return RecordedTexts.read(_written(tmp_path), "abc")


def test_what_is_written_is_read(read: RecordedTexts):
    assert (read.target, read.texts) == (_TARGET, _TEXTS)


@pytest.mark.parametrize(
    ("tokens", "temperature", "seed", "text"),
    [
        ((1, 2), 1.0, 1, _TEXTS[2]),
        ((1, 2), 1.0, 2, None),
        ((1, 3), 1.0, 1, None),
        ((1, 2), 0.0, 77, _TEXTS[0]),  # a seed has no effect at temperature 0
        ((1, 2, 8), 1.0, 1, _TEXTS[2]),
        ((1, 2, 9), 1.0, 1, None),
    ],
)
def test_a_text_is_found_by_its_tokens_temperature_and_seed(
    read: RecordedTexts, tokens: tuple[int, ...], temperature: float, seed: int, text: RecordedText | None
):
    assert read.beginning_with(tokens, request_sampling(temperature, seed)) == text
    assert read.of_prompt(tokens, request_sampling(temperature, seed)) == (text if len(tokens) == 2 else None)


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"logprobs": 1}])
def test_other_parameters_have_no_recorded_text(read: RecordedTexts, changes: dict):
    assert read.beginning_with((1, 2), replace(Sampling(temperature=1.0, seed=1), **changes)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_fingerprint": "abd"}, r"another target generated its texts.*record again"),
        ({"version": 2}, "it has version 2, and this program reads version 1"),
        ({"vocabulary": 9}, "beyond the target's vocabulary"),
    ],
)
def test_a_file_of_another_target_or_version_is_refused(tmp_path: Path, changes: dict, words: str):
    with pytest.raises(InputError, match=words):
        RecordedTexts.read(_written(tmp_path, replace(_TARGET, **changes)), "abc")


@pytest.mark.parametrize("kept", range(0, 300, 7))
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, kept: int):
    path = _written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: min(kept, len(content) - 2)])

    with pytest.raises(InputError, match="can't be replayed"):
        RecordedTexts.read(path, "abc")


def test_an_absent_file_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        RecordedTexts.read(tmp_path / "absent.jsonl", "abc")
