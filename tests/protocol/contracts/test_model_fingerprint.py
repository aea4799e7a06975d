"""Two models have the same fingerprint exactly if they can share KV."""

import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from protocol.contracts.model_fingerprint import model_fingerprint
from protocol.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    save(tmp_path / "model", mx.zeros((100, 1000)))
    return tmp_path / "model"


def save(folder: Path, weights: mx.array, name: str = "model.safetensors") -> None:
    mx.save_safetensors(str(folder / name), {"weights": weights})


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "copy")

    assert model_fingerprint(tmp_path / "copy") == model_fingerprint(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"model_type": "qwen2"}'),
        lambda folder: save(folder, mx.zeros((1000, 100))),
        lambda folder: save(folder, mx.zeros((100, 1001))),
        lambda folder: save(folder, mx.ones((100, 1000))),
        lambda folder: save(folder, mx.zeros((100, 1000), mx.float16)),
        lambda folder: save(folder, mx.zeros((2, 2)), "more.safetensors"),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
    ],
    ids=["config", "shape", "size", "values", "type", "another file", "name"],
)
def test_another_model_has_another_fingerprint(folder: Path, change: Callable[[Path], None]):
    before = model_fingerprint(folder)
    change(folder)

    assert model_fingerprint(folder) != before


def test_a_folder_without_a_model_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"can't be read.*name a folder"):
        model_fingerprint(tmp_path)
