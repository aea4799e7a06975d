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


def test_what_is_written_is_read(tmp_path: Path):
    read = RecordedTexts.read(_written(tmp_path), "abc")

    assert (read.target, read.texts) == (_TARGET, _TEXTS)


def test_a_text_is_found_by_prompt_temperature_and_seed(tmp_path: Path):
    read = RecordedTexts.read(_written(tmp_path), "abc")

    assert read.of_prompt((1, 2), request_sampling(1.0, 1)) == _TEXTS[2]
    assert read.of_prompt((1, 2), request_sampling(1.0, 2)) is None
    assert read.of_prompt((1, 3), request_sampling(1.0, 1)) is None


def test_the_seed_has_no_effect_at_temperature_0(tmp_path: Path):
    read = RecordedTexts.read(_written(tmp_path), "abc")

    assert read.of_prompt((1, 2), request_sampling(0.0, 77)) == _TEXTS[0]


def test_a_sequence_that_has_begun_is_found_by_its_tokens(tmp_path: Path):
    read = RecordedTexts.read(_written(tmp_path), "abc")

    assert read.beginning_with((1, 2, 8), request_sampling(1.0, 1)) == _TEXTS[2]
    assert read.beginning_with((1, 2, 9), request_sampling(1.0, 1)) is None


@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"logprobs": 1}, {"verification": "rejection"}])
def test_other_parameters_have_no_recorded_text(tmp_path: Path, changes: dict):
    read = RecordedTexts.read(_written(tmp_path), "abc")

    assert read.beginning_with((1, 2), replace(Sampling(temperature=1.0, seed=1), **changes)) is None


def test_a_file_of_another_target_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"another target generated its texts.*record again"):
        RecordedTexts.read(_written(tmp_path), "abd")


def test_a_file_of_another_version_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="it has version 2, and this program reads version 1"):
        RecordedTexts.read(_written(tmp_path, replace(_TARGET, version=2)), "abc")


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="beyond the target's vocabulary"):
        RecordedTexts.read(_written(tmp_path, replace(_TARGET, vocabulary=9)), "abc")


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
