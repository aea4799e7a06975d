"""Laws of drafters' files: what is written is read again, and what is damaged is refused with a sentence."""

import json
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from draft_worker.drafters.block import read_block
from draft_worker.drafters.token_ends import target_ends
from protocol.contracts.drafters.detection import read_drafter
from protocol.errors import InputError
from tests.support.models.block_files import write_block
from tests.support.models.trained_drafters import (
    BLOCK_KINDS,
    SHORT_HEAD,
    block_network,
    pack_as_speculators,
    write_block_folder,
    write_target,
)

DAMAGED = ("z-lab", "vanilla", "DFlash2")


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a folder, which the test may damage."""
    return lambda kind: Path(shutil.copytree(folders[kind], tmp_path / kind, dirs_exist_ok=True))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    mx.eval(loaded)
    change(loaded)
    mx.save_safetensors(str(folder / "model.safetensors"), loaded)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_written_drafter_is_read_again(kind: str, folders: dict[str, Path], tmp_path: Path):
    target = write_target(tmp_path / "target")
    form = write_block_folder(tmp_path / "again", kind, target, norm_epsilon=1e-5, rope_base=1e6)

    found = read_block(tmp_path / "again")

    assert found.network.form == form
    assert form.kind == ("dspark" if form.markov else "dflash2" if kind.startswith("DFlash2") else "dflash")
    expected: Any = tree_flatten(block_network(form).parameters())
    read = dict(tree_flatten(found.network.parameters()))
    assert read.keys() == dict(expected).keys()
    assert all(mx.array_equal(read[name], values).item() for name, values in expected)


_PACKED = ("z-lab", "z-lab with windows", "z-lab with two-way windows", "vanilla", "DFlash2")


@pytest.mark.parametrize(
    ("kind", "short"), [*((kind, False) for kind in _PACKED), *((kind, True) for kind in _PACKED[:-1])]
)
def test_speculators_packaging_holds_the_same_drafter(
    kind: str, short: bool, folders: dict[str, Path], copy: Callable[[str], Path]
):
    expected, target = read_block(folders[kind]), folders["target"]

    folder = pack_as_speculators(copy(kind), target, SHORT_HEAD if short else None)
    found = read_block(folder)

    unstated = msgspec.structs.replace(expected.network.form, target_layers=None)
    assert found.network.form == unstated
    parameters: Any = dict(tree_flatten(expected.network.parameters()))
    for name, values in dict(tree_flatten(found.network.parameters())).items():
        rows = mx.array(SHORT_HEAD) if short and "markov_w2" in name else slice(None)
        assert mx.array_equal(values, parameters[name][rows]).item()
    states, ends = mx.random.normal((3, 32), key=mx.random.key(1)), target_ends(target)
    assert found.ends is not None
    logits = ends.head(states)[:, mx.array(SHORT_HEAD) if short else slice(None)]
    assert mx.allclose(found.ends.head(states), logits, atol=1e-5).item()
    named = None if found.head_tokens is None else found.head_tokens.tolist()
    assert named == (SHORT_HEAD.tolist() if short else None)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ATTENTION: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int | None, ...], str]] = {
    "full": ({}, {}, (), "windows"),
    "sliding layers": (SLIDING, {}, (8, None), "windows"),
    "a nested window": (SLIDING, {"swa_window_size": 9}, (9, None), "windows"),
    "sliding both ways": (SLIDING | {"is_causal": False}, {}, (8, None), "none"),
    "is_causal prevails": (SLIDING | {"is_causal": False}, {"causal": True}, (8, None), "none"),
    "nested causal": (SLIDING, {"causal": True}, (8, None), "all"),
    "causal and full": ({"dflash_query_causal": True}, {}, (), "all"),
    "windows of all layers": ({}, {"use_swa": True, "swa_window_size": 9}, (9, 9), "none"),
    "causal windows of all layers": ({"sliding_window": 7}, {"use_swa": True, "causal": True}, (7, 7), "all"),
}


@pytest.mark.parametrize("stated", ATTENTION)
def test_windows_and_causal_layers_are_read_as_vllm_reads_them(stated: str, copy: Callable[[str], Path]):
    outer, inner, windows, causal = ATTENTION[stated]
    folder = copy("z-lab")
    change_config(folder, lambda config: config.update(outer, dflash_config=config["dflash_config"] | inner))

    form = read_block(folder).network.form

    assert (form.windows, form.causal) == (windows, causal)


@pytest.mark.parametrize("options", [{"rope_is_neox_style": False}, {"is_neox_style": False}])
def test_both_names_of_the_rotation_are_read(options: dict[str, Any], copy: Callable[[str], Path]):
    folder = copy("z-lab")
    change_config(folder, lambda config: config.update(options))

    assert read_block(folder).network.form.rope_interleaved


def test_a_full_disk_leaves_the_drafter_that_was_there(folders: dict[str, Path], copy: Callable[[str], Path]):
    folder, limit = copy("z-lab"), resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(folder.iterdir())
    network = read_block(folder).network
    network.fc.weight = network.fc.weight + 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match=r"model\.safetensors: \[write\]"):
            write_block(folder, network, target_ends(folders["target"]), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    assert sorted(folder.iterdir()) == before
    assert mx.array_equal(read_block(folder).network.fc.weight + 1, network.fc.weight).item()


def test_an_interrupted_write_is_invisible_to_readers(
    folders: dict[str, Path], copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    folder = copy("z-lab")
    network = read_block(folder).network

    def killed(file: str, *_: Any, **__: Any) -> None:
        Path(file).write_bytes(b"half of the weights")
        read_block(folder)
        read_drafter(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(mx, "save_safetensors", killed)
    with pytest.raises(KeyboardInterrupt):
        write_block(folder, network, target_ends(folders["target"]), {})

    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


def test_dspark_brings_copies_of_the_targets_ends(folders: dict[str, Path]):
    ends = read_block(folders["vanilla"]).ends
    model: Any = mx.load(str(folders["target"] / "model.safetensors"))
    states = mx.random.normal((3, 32), key=mx.random.key(1))

    assert ends is not None
    assert mx.array_equal(ends.embed(mx.array([1, 5])), model["model.embed_tokens.weight"][mx.array([1, 5])]).item()
    assert mx.allclose(ends.head(states), states @ model["lm_head.weight"].T, atol=1e-5).item()
    assert read_block(folders["z-lab"]).ends is None


def test_a_drafter_whose_names_begin_with_model_is_read(copy: Callable[[str], Path]):
    folder = copy("z-lab")

    def rename(tensors: dict[str, mx.array]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    change_tensors(folder, rename)

    assert read_block(folder).network.form.rows == 3


def test_a_quantised_drafter_is_read(copy: Callable[[str], Path]):
    folder = copy("z-lab")
    network = read_block(folder).network
    expected = network.fc.weight
    nn.quantize(network, group_size=32, bits=8, class_predicate=lambda path, _: path == "fc")
    nn.quantize(network, group_size=32, bits=4, class_predicate=lambda path, _: path.endswith("o_proj"))
    flat: Any = tree_flatten(network.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(flat))
    change_config(folder, lambda config: config.update(quantization={"group_size": 32, "bits": 8}))

    assert mx.allclose(read_block(folder).network.fc.weight, expected, atol=0.1).item()


def nested(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["dflash_config"].update(changes)


def rope(**scaling: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config.update(rope_scaling=scaling)


CONFIGS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "a rope": ("z-lab", rope(type="spiral"), "rotary embedding"),
    "a list for a rope": ("z-lab", rope(type=["yarn"]), "rotary embedding"),
    "a rope's options": ("z-lab", rope(type="yarn", factor="a"), "rotary embedding"),
    "a rank": ("DFlash2", nested(selector_rank=7), "candidate_selector.predecessor_codebook has the shape"),
    "taps": ("DFlash2", nested(conv_kernel_size=3), "tensor layers.0.attention_conv.base_kernel has"),
    "no convolution": ("DFlash2", nested(conv_kernel_size=None), "its form does not know, layers."),
    "fewer layers": ("z-lab", lambda c: c.update(num_hidden_layers=1), "a tensor that its form does not know"),
}


@pytest.mark.parametrize("damage", CONFIGS)
def test_a_config_that_does_not_fit_is_refused(damage: str, copy: Callable[[str], Path]):
    kind, change, reason = CONFIGS[damage]
    folder = copy(kind)
    change_config(folder, change)

    with pytest.raises(InputError) as refusal:
        read_block(folder)

    assert reason in str(refusal.value)
    assert str(refusal.value).endswith(": download it again, or choose another draft.")


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_weights_are_refused(kind: str, copy: Callable[[str], Path]):
    def poison(tensors: dict[str, mx.array]) -> None:
        name = sorted(tensors)[-1]
        tensors[name] = mx.full(tensors[name].shape, float("nan"))

    def cast(tensors: dict[str, mx.array]) -> None:
        name = sorted(tensors)[0]
        tensors[name] = tensors[name].astype(mx.int32)

    damages: list[tuple[Callable[[dict[str, mx.array]], object], str]] = [
        (lambda tensors: tensors.pop("norm.weight"), "lacks the tensor"),
        (lambda tensors: tensors.update(surprise=mx.zeros((2,))), "a tensor that its form does not know, surprise"),
        (poison, "not finite"),
        (cast, "elements of type"),
    ]
    for change, reason in damages:
        folder = copy(kind)
        change_tensors(folder, change)
        with pytest.raises(InputError, match=reason):
            read_block(folder)


@pytest.mark.parametrize("kind", DAMAGED)
@given(seed=st.integers(0, 1 << 30))
def test_damaged_bytes_are_refused_or_harmless(kind: str, seed: int, folders: dict[str, Path], tmp_path_factory: Any):
    random = np.random.default_rng(seed)
    folder = Path(shutil.copytree(folders[kind], tmp_path_factory.mktemp("damaged") / "drafter"))
    file = folder / ("config.json" if random.random() < 0.5 else "model.safetensors")
    content = bytearray(file.read_bytes())
    for _ in range(random.integers(1, 4)):
        content[random.integers(0, min(len(content), 2000))] = random.integers(0, 256)
    file.write_bytes(content[: random.integers(1, len(content))] if random.random() < 0.3 else content)

    # Any other exception fails the test.
    with suppress(InputError):
        read_block(folder)
