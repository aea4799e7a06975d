"""Laws of conversion: complete or absent, once for two processes, and one sentence for whatever can't be read."""

import json
import os
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.machine.cache_entries import exclusive
from orchestrator.machine.checkpoints import resolve
from orchestrator.machine.gguf import folder as folder_module
from orchestrator.machine.gguf.folder import gguf_folder, gguf_place
from protocol.contracts.coreml import Progress
from protocol.errors import InputError
from tests.support.models.gguf_files import write_gguf


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-Q4_1.gguf"
    write_gguf(path, kinds={"token_embd": "Q8_0", "": "Q4_1"})
    return path


@pytest.fixture(autouse=True)
def cache(home: Path) -> Path:
    return home


def folders(cache: Path) -> list[Path]:
    """Everything in the cache but locks."""
    return [path for path in cache.glob("**/gguf/*") if path.suffix != ".lock"]


def refusal(path: Path, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        gguf_folder(path)
    assert folders(cache) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_converted_once_and_again_when_it_has_changed(original: Path, cache: Path):
    copy, reports = cache / "copy.gguf", list[Progress]()
    copy.write_bytes(original.read_bytes())
    first = gguf_folder(copy, reports.append)
    count = len(reports)

    assert gguf_folder(copy, reports.append) == first
    assert (len(reports), reports[-1].done) == (count, reports[-1].total)
    assert folders(cache) == [first]
    write_gguf(copy, kinds={"": "Q4_0"})
    assert gguf_folder(copy) != first


def test_a_moved_file_keeps_its_folder_and_another_in_its_place_gets_one(original: Path, cache: Path):
    """Even one of the same size and time, as files of an archive may be."""
    first, second = cache / "tiny-Q4_1.gguf", cache / "moved" / "tiny-Q4_1.gguf"
    first.write_bytes(original.read_bytes())
    folder = gguf_folder(first)
    second.parent.mkdir()
    first.rename(second)
    content = bytearray(second.read_bytes())
    content[-1000:] = bytes(1000)
    first.write_bytes(content)
    times = second.stat()
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert gguf_folder(second) == folder
    assert gguf_folder(first) != folder


@pytest.mark.parametrize("parent", [False, True], ids=["file", "folder"])
def test_a_model_may_be_a_file_or_the_folder_around_it(original: Path, parent: bool):
    assert resolve(str(original.parent if parent else original), "target") == gguf_folder(original)


def test_a_folder_with_several_files_is_asked_back(original: Path, tmp_path: Path):
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).write_bytes(original.read_bytes())

    with pytest.raises(InputError, match=r"holds several GGUF files: pass one of them: a-Q4_0\.gguf, b-Q8_0\.gguf"):
        resolve(str(tmp_path), "target")


def test_a_blob_without_an_ending_is_known_by_its_content(original: Path, tmp_path: Path):
    blob = tmp_path / "sha256-1234"
    blob.write_bytes(original.read_bytes())

    assert (resolve(str(blob), "target") / "model.safetensors").is_file()


def test_ends_of_a_turn_and_of_a_text_end_an_answer(tmp_path: Path):
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata={"tokenizer.ggml.eot_token_id": 265})

    assert json.loads((gguf_folder(path) / "config.json").read_bytes())["eos_token_id"] == [263, 265]


def test_a_file_cut_off_anywhere_is_refused(original: Path, tmp_path: Path):
    content = original.read_bytes()
    rng = random.Random(7)
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, len(content) - 1, *(rng.randrange(len(content)) for _ in range(40))]:
        cut.write_bytes(content[:length])
        assert str(cut) in refusal(cut, tmp_path)


def test_random_damage_of_the_header_never_raises_anything_else(original: Path, tmp_path: Path):
    content = original.read_bytes()
    rng = random.Random(11)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(120):
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(4, 12_000)] = rng.randrange(256)
        damaged.write_bytes(changed)
        with suppress(InputError):
            assert (gguf_folder(damaged) / "model.safetensors").is_file()
        assert not list(tmp_path.glob("**/*.unfinished"))


REFUSED: list[tuple[Mapping[str, Any], str]] = [
    ({"llama.expert_count": 8}, "mixture of experts"),
    ({"llama.block_count": None}, "the metadata llama.block_count is missing"),
    ({"llama.context_length": "long"}, "llama.context_length has a value that can't be used"),
    ({"llama.attention.head_count": 3}, "has the shape"),
    ({"llama.rope.dimension_count": 8}, "rotates 8 of a head's 64 dimensions"),
    ({"llama.rope.scaling.type": "spiral"}, "scales positions by 'spiral'"),
    ({"split.count": 3}, "one of 3 parts"),
    ({"split.no": 1}, "is not part 1 of the model of m.gguf, by split.no"),
    ({"llama.block_count": (1 << 32) - 1}, "llama.block_count has a value that can't be used"),
    ({"llama.attention.key_length": (1 << 32) - 1}, "llama.attention.key_length has a value that can't be used"),
    ({"llama.nextn_predict_layers": "one"}, "is broken"),
    ({"tokenizer.ggml.pre": "tarot"}, "'tarot'"),
    ({"tokenizer.ggml.model": [1, 2]}, "tokenizer of the kind"),
    ({"tokenizer.ggml.model": "llama"}, "is broken"),
    ({"tokenizer.ggml.merges": ["he zz"]}, "is broken"),
    ({"tokenizer.ggml.merges": ["he"]}, "is broken"),
    ({"tokenizer.ggml.token_type": [1]}, "is broken"),
    ({"tokenizer.ggml.bos_token_id": 9999, "tokenizer.ggml.add_bos_token": True}, "is broken"),
    ({"tokenizer.ggml.pre": None}, "not known here ('not told')"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer of the kind 'gpt2'"),
    # Tensors beside the model's.
    ({"rope_freqs.weight": np.linspace(1, 7, 32, dtype=np.float32)}, "scales its rope in an unknown way"),
    ({"blk.0.ssm_a": np.ones(4, np.float32)}, "has a tensor 'blk.0.ssm_a'"),
]
REPLACED = [
    (b"llama", b"rwkv7", "is of the architecture 'rwkv7'"),
    (b"blk.0.attn_k.weight", b"blk.0.attn_v.weight", "two tensors of one name"),
    (b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eos_token_id twice"),
]


@pytest.mark.parametrize(("stated", "words"), REFUSED)
def test_what_cannot_be_converted_is_told_by_its_reason(tmp_path: Path, stated: Mapping[str, Any], words: str):
    path = tmp_path / "m.gguf"
    tensors = {key: value for key, value in stated.items() if isinstance(value, np.ndarray)}
    write_gguf(path, metadata={} if tensors else stated, extra=tensors)

    assert words in refusal(path, tmp_path)


@pytest.mark.parametrize(("stated", "instead", "words"), REPLACED)
def test_a_file_with_other_bytes_is_refused(original: Path, tmp_path: Path, stated: bytes, instead: bytes, words: str):
    path = tmp_path / "m.gguf"
    path.write_bytes(original.read_bytes().replace(stated, instead, 1 if stated == b"llama" else -1))

    assert words in refusal(path, tmp_path)


def test_tensors_over_the_same_bytes_are_refused(original: Path, tmp_path: Path):
    """Otherwise a small file would become a folder that fills the disk."""
    path, content = tmp_path / "m.gguf", bytearray(original.read_bytes())
    _, _, entry = content.partition(b"output_norm.weight")
    offset = len(content) - len(entry) + 4 + 8 + 4
    content[offset : offset + 8] = bytes(8)
    path.write_bytes(content)

    assert "lies over another tensor" in refusal(path, tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(original: Path, tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(original.read_bytes())

    with pytest.raises(InputError, match="changed while it was read"):
        gguf_folder(path, lambda _: os.utime(path, (1, 1)))
    assert folders(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"GGUF\x01\x00\x00\x00", b"GGUF\x00\x00\x00\x03"])
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "m.gguf"
    path.write_bytes(content + bytes(40) if content else b"")

    assert str(path) in refusal(path, tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_pipe_or_a_folder_by_the_name_of_a_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]):
    path = tmp_path / "m.gguf"
    make(path)

    assert "is not a regular file" in refusal(path, tmp_path)


def test_a_full_disk_leaves_nothing(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(file: Path, *_: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_safetensors", full)

    assert "No space left on device" in refusal(original, tmp_path)


def test_what_a_killed_process_left_is_removed(original: Path, cache: Path):
    place = gguf_folder(original)
    half = place.with_name(f"{place.name}.unfinished")
    place.rename(half)
    (half / "model.safetensors").write_bytes(b"half")
    of_another, at_work = place.with_name("other.unfinished"), place.with_name("third.unfinished")
    of_another.mkdir()
    at_work.mkdir()

    with exclusive(place.with_name("third")):
        assert (gguf_folder(original) / "model.safetensors").stat().st_size > 4
    assert set(folders(cache)) == {place, at_work}


def test_a_link_in_the_place_of_a_lock_is_not_followed(original: Path, cache: Path):
    """Otherwise whoever can write the cache folder empties a file of this user."""
    place, letter = gguf_place(original), cache / "letter"
    place.parent.mkdir(parents=True)
    letter.write_text("Dear")
    place.with_name(f"{place.name}.lock").symlink_to(letter)

    assert "can't be written" in refusal(original, cache)
    assert letter.read_text() == "Dear"
