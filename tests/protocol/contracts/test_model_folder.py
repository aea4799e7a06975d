"""Laws of a model's folder: what its files state is what it takes, and files that are not whole are refused."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.paths import UNPACKED_VARIABLE
from tests.support.models.architectures import configuration, tiny
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

_INDEX = "model.safetensors.index.json"
_FIRST, _SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with two whole shards and their index."""
    files = {"a": _FIRST, "b": _SECOND}
    for name, file in files.items():
        mx.save_safetensors(str(tmp_path / file), {name: mx.ones((4, 4))})
    (tmp_path / _INDEX).write_text(json.dumps({"weight_map": files}))
    return tmp_path


def test_whole_shards_have_every_tensor(shards: Path):
    assert set(ModelFolder(shards).examined_tensors()) == {"a", "b"}


def _cut(folder: Path, keep: int) -> None:
    (folder / _FIRST).write_bytes((folder / _FIRST).read_bytes()[:keep])


def _headed(header: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / _FIRST).write_bytes(len(header).to_bytes(8, "little") + header)


_DAMAGES: list[tuple[str, Callable[[Path], object]]] = [
    (f"lacks 1 of its weight files, first {_SECOND}", lambda folder: (folder / _SECOND).unlink()),
    (
        f"lacks 1 of its weight files, first {_SECOND}",
        lambda folder: [(folder / name).unlink() for name in (_SECOND, _INDEX)],
    ),
    (
        f"the tensor b in both {_SECOND} and model.safetensors: remove",
        lambda folder: mx.save_safetensors(str(folder / "model.safetensors"), {"b": mx.zeros((4, 4))}),
    ),
    *(
        (f"is cut: it has {has} of 149 bytes", partial(_cut, keep=keep))
        for has, keep in [(100, 100), (139, -10), (148, -1)]
    ),
    *(
        ("has no whole header", _headed(header))
        for header in (b"", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b"\xff\xff")
    ),
    *(
        (f"unfinished ({_SECOND}.{ending})", lambda folder, ending=ending: (folder / f"{_SECOND}.{ending}").touch())
        for ending in ("part", "aria2", "crdownload")
    ),
    (
        "git lfs pull",
        lambda folder: (folder / _FIRST).write_text("version https://git-lfs.github.com/spec/v1\noid"),
    ),
]


@pytest.mark.parametrize(("words", "damage"), _DAMAGES)
def test_a_folder_that_is_not_whole_is_refused_with_what_is_wrong(
    shards: Path, words: str, damage: Callable[[Path], object]
):
    damage(shards)

    with pytest.raises(InputError, match=re.escape(words)):
        ModelFolder(shards).examined_tensors()


# Weights in memory --------------------------------------------------------------------------------


def _loaded(folder: Path) -> int:
    parameters = tree_flatten(LanguageModel.load(folder).network.parameters())
    return sum(array.nbytes for _, array in parameters if isinstance(array, mx.array))


@pytest.mark.parametrize("folder", [DEMO_TARGET, DEMO_DRAFT])
def test_on_a_processor_every_weight_is_in_float32(folder: Path):
    assert ModelFolder(folder).loaded_bytes(on_processor=True) == _loaded(folder)


def test_elsewhere_weights_are_as_their_files_hold_them():
    target = ModelFolder(DEMO_TARGET)

    assert target.loaded_bytes(on_processor=False) == pytest.approx(target.size, abs=1 << 16)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU keeps quantized weights")
def test_quantized_weights_are_unpacked_on_a_processor_that_has_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    network, config = quantize_model(tiny("llama"), configuration("llama"), group_size=32, bits=4)
    save_model(tmp_path, network)
    save_config(config, tmp_path / "config.json")

    assert json.loads((tmp_path / "config.json").read_text())["quantization"]["bits"] == 4
    packed, unpacked = (ModelFolder(tmp_path).loaded_bytes(on_processor) for on_processor in (False, True))
    assert unpacked == _loaded(tmp_path)
    assert packed < unpacked / 3

    expected = LanguageModel.load(tmp_path).sequence().evaluate([1, 2, 3], [-1, 0, 1])
    monkeypatch.setenv(UNPACKED_VARIABLE, str(unpacked - 1))
    found = LanguageModel.load(tmp_path).sequence().evaluate([1, 2, 3], [-1, 0, 1])
    assert packed <= ModelFolder(tmp_path).loaded_bytes(on_processor=True, most=unpacked - 1) == _loaded(tmp_path)
    assert mx.allclose(found, expected, atol=0.01)


class _Group:
    """The first of two ranks, which is asked for sizes alone."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_holds_its_share_of_the_layers_and_the_whole_embedding_and_head(tied: bool, tmp_path: Path):
    network = tiny("llama", tie_word_embeddings=tied)
    save_model(tmp_path, network)
    network = tiny("llama", tie_word_embeddings=tied)
    network.shard(_Group())
    held = sum(array.nbytes for _, array in tree_flatten(network.parameters()) if isinstance(array, mx.array))

    assert ModelFolder(tmp_path).loaded_bytes(on_processor=True, ranks=2) == pytest.approx(held, rel=0.01)


def test_files_that_mlx_lm_does_not_read_do_not_count(tmp_path: Path):
    save_model(tmp_path, tiny("llama"))
    alone = ModelFolder(tmp_path).loaded_bytes(on_processor=True)
    mx.save_safetensors(str(tmp_path / "consolidated.safetensors"), {"x.layers.0.weight": mx.ones((4, 4))})

    assert ModelFolder(tmp_path).loaded_bytes(on_processor=True) == alone


@pytest.mark.parametrize("bits", [0, -4, 1e400])
def test_impossible_bits_are_no_error_of_the_estimate(bits: float, tmp_path: Path):
    network, config = quantize_model(tiny("llama"), configuration("llama"), group_size=32, bits=4)
    save_model(tmp_path, network)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": {"bits": bits, "group_size": 32}}))

    assert ModelFolder(tmp_path).loaded_bytes(on_processor=True) > 0


# Which model it is --------------------------------------------------------------------------------


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

    assert ModelFolder(tmp_path / "copy").fingerprint == ModelFolder(folder).fingerprint


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
    before = ModelFolder(folder).fingerprint
    change(folder)

    assert ModelFolder(folder).fingerprint != before


def test_a_folder_without_a_model_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"can't be read.*name a folder"):
        _ = ModelFolder(tmp_path).fingerprint


# What its config states ---------------------------------------------------------------------------


def test_the_shape_of_a_target_is_read_from_its_config(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        '{"text_config": {"hidden_size": 8, "num_hidden_layers": 3}, "vocab_size": 9}'
    )

    assert ModelFolder(tmp_path).shape == (3, 8, 9)
    assert ModelFolder(DEMO_TARGET).shape == (6, 256, 4096)


def test_a_target_that_states_no_shape_gets_a_sentence(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"hidden_size": true, "vocab_size": 9}')

    with pytest.raises(InputError, match="states no layers, width or vocabulary"):
        _ = ModelFolder(tmp_path).shape
