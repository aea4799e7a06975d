"""Weight files that are not whole are refused before any tensor is read."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from protocol.contracts.weight_files import examined_weights
from protocol.errors import InputError

_INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with two whole shards and their index."""
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        mx.save_safetensors(str(tmp_path / file), {name: mx.ones((4, 4))})
    (tmp_path / _INDEX).write_text(json.dumps({"weight_map": files}))
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as refused:
        examined_weights(folder)
    return str(refused.value)


def test_whole_shards_have_every_tensor(shards: Path):
    assert set(examined_weights(shards)) == {"a", "b"}


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_named(shards: Path, indexed: bool):
    (shards / "model-00002-of-00002.safetensors").unlink()
    if not indexed:
        (shards / _INDEX).unlink()

    assert "lacks 1 of its weight files, first model-00002-of-00002.safetensors" in refusal(shards)


def test_a_stray_file_that_repeats_tensors_is_named(shards: Path):
    mx.save_safetensors(str(shards / "model.safetensors"), {"b": mx.zeros((4, 4))})

    assert "the tensor b in both model-00002-of-00002.safetensors and model.safetensors: remove" in refusal(shards)


def test_a_cut_file_is_refused_with_its_sizes(shards: Path):
    file = shards / "model-00001-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])

    assert f"is cut: it has {len(whole) - 10} of {len(whole)} bytes" in refusal(shards)


@pytest.mark.parametrize("ending", ["part", "aria2", "crdownload"])
def test_an_unfinished_download_is_refused(shards: Path, ending: str):
    (shards / f"model-00002-of-00002.safetensors.{ending}").touch()

    assert f"unfinished (model-00002-of-00002.safetensors.{ending})" in refusal(shards)


def test_a_pointer_of_git_lfs_is_named(shards: Path):
    (shards / "model-00001-of-00002.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid …\n")

    assert "git lfs pull" in refusal(shards)
