"""Laws of conversion: exact tables, shared weights, metadata, and refusals."""

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from mlx.utils import tree_map
from mlx_lm.models import gemma
from mlx_lm.models.rope_utils import initialize_rope

from draft_worker.coreml.conversion.build import Checkpoint, describe, write
from draft_worker.coreml.conversion.build import convert as convert_folder
from draft_worker.coreml.conversion.weights import Palettes, Scaled, compress, head_chunks, restore
from draft_worker.coreml.converted import Converted, require_functions
from draft_worker.coreml.package import HOST, METADATA_KEY, MODEL, Package
from draft_worker.coreml.rotation import Rotation, pair_order
from draft_worker.coreml.runtime.backends.executor import Executor
from orchestrator.cli.app import cli
from orchestrator.machine.conversion import conversion
from protocol.contracts.coreml.conversion import Choices, Finished, Progress
from protocol.contracts.head_tokens import HEAD_TOKENS
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from tests.support.models.coreml_runs import convert, tiny
from tests.support.paths import DEMO_DRAFT

DEMO = DEMO_DRAFT
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"traditional": True},
    "linear": {"scaling_config": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"scaling_config": LLAMA3 | {"original_max_position_embeddings": 64}},
    "yarn": {"scaling_config": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}
SOME = Choices(widths=(1,), context=32)


def random_weights(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((outputs, inputs)).astype(np.float16)


def weight_file(folder: Path) -> Path:
    return next((folder / MODEL).rglob("weight.bin"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("demo") / "converted"
    convert_folder(DEMO, folder, Choices(widths=(1, 8), context=64))
    return Converted.open(folder)


@pytest.mark.parametrize("name", ROPES)
def test_rotation_tables_equal_mlx_lm_s_rotations(name: str):
    rope = initialize_rope(16, 10_000.0, **({"traditional": False, "max_position_embeddings": 512} | ROPES[name]))
    features = np.random.default_rng(4).standard_normal((1, 1, 512, 16)).astype(np.float32)
    cosine, sine = Rotation.measure(rope, pair_order(16, 16, name == "interleaved"), 512)

    turned = np.array(rope(mx.array(features)))
    pairs = features.reshape(512, 8, 2) if name == "interleaved" else features.reshape(512, 2, 8).swapaxes(1, 2)
    expected = np.stack(
        [pairs[..., 0] * cosine - pairs[..., 1] * sine, pairs[..., 0] * sine + pairs[..., 1] * cosine], axis=-1
    )
    expected = expected if name == "interleaved" else expected.swapaxes(1, 2)
    assert np.allclose(turned.reshape(512, -1), expected.reshape(512, -1), atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_quantised_weights_are_dequantised_exactly(bits: int, dtype: mx.Dtype):
    model = tiny()
    model.update(tree_map(lambda weights: weights.astype(dtype), model.parameters()))
    nn.quantize(model, group_size=32, bits=bits)
    layer = model.layers[1].mlp.up_proj
    expected = mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=bits)

    got = Checkpoint(model).half("model.layers.1.mlp.up_proj.weight")

    assert np.array_equal(got.astype(np.float32), np.array(expected.astype(mx.float32)))


def test_int8_is_within_half_a_step_of_each_channel():
    weights = random_weights(48, 96)
    stored = compress(weights, "int8")

    assert isinstance(stored, Scaled)
    error = np.abs(restore(stored).astype(np.float32) - weights)
    assert (error <= stored.scale.astype(np.float32) * 0.5 + np.abs(weights) * 2**-10).all()


def test_four_bits_are_near_the_best_sixteen_levels():
    weights = random_weights(300, 2048)
    stored = compress(weights, "4bit")

    assert isinstance(stored, Palettes)
    assert stored.tables.shape == (300, 16)
    # The least mean square error of sixteen levels for a Gaussian is 0.009497 (Max 1960).
    assert ((restore(stored).astype(np.float32) - weights) ** 2).mean() < 0.0098


@pytest.mark.parametrize("kind", ["int8", "4bit"])
@pytest.mark.parametrize("value", [0.0, 1e-7, -3.5])
def test_a_constant_channel_stays_what_it_is(kind: Any, value: float):
    weights = np.full((3, 32), value, np.float16)

    assert np.allclose(restore(compress(weights, kind)), weights, rtol=2**-9, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 67, 16_384, 16_385, 128_256, 151_936, 152_064])
def test_a_head_is_divided_into_few_aligned_chunks(vocabulary: int):
    sizes = [len(chunk) for chunk in head_chunks(range(vocabulary))]

    assert sum(sizes) == vocabulary
    assert max(sizes) <= 16_384
    assert all(size % 32 == 0 for size in sizes[:-1])
    assert len(sizes) == -(-vocabulary // 16_384)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["fp16", "int8", "4bit"])
def test_functions_share_their_weights(kind: str, tmp_path: Path):
    one = convert(tiny(), tmp_path / "one", widths=(1,), weights=kind)
    three = convert(tiny(), tmp_path / "three", widths=(1, 8, 32), weights=kind)

    assert weight_file(three.folder).stat().st_size == weight_file(one.folder).stat().st_size


@pytest.mark.thorough
def test_fewer_bits_take_less_room(tmp_path: Path):
    sizes = [
        weight_file(convert(tiny(hidden_size=128), tmp_path / kind, widths=(1,), weights=kind).folder).stat().st_size
        for kind in ("fp16", "int8", "4bit")
    ]

    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_a_package_describes_its_model(demo: Converted):
    package = demo.package

    assert (package.widths, package.context, package.cache, package.weights) == ((1, 8), 64, "io", "fp16")
    assert package.source == str(DEMO)
    assert package.tokenizer == tokenizer_fingerprint(DEMO)
    assert package.model == Checkpoint.load(DEMO).fingerprint()
    assert (len(package.shape.layers), package.shape.heads, package.shape.key_heads, package.shape.head) == (
        3,
        4,
        2,
        64,
    )
    assert Package.decode({METADATA_KEY: package.encode()}, Path("elsewhere")) == package


@pytest.mark.thorough
def test_a_head_of_some_tokens_is_converted_alone(demo: Converted, tmp_path: Path):
    tokens = np.arange(7, 4096, 8, dtype=np.int32)
    shutil.copytree(DEMO, tmp_path / "draft")
    np.save(tmp_path / "draft" / HEAD_TOKENS, tokens)
    convert_folder(tmp_path / "draft", tmp_path / "model", Choices(widths=(1, 8), context=64))

    short = Converted.open(tmp_path / "model")

    assert short.package.outputs == (len(tokens),)
    assert short.tables.head_tokens is not None
    assert np.array_equal(short.tables.head_tokens, tokens)
    assert np.array_equal(short.tables.embedding, demo.tables.embedding)
    saved = 2 * (demo.package.shape.vocabulary - len(tokens)) * demo.package.shape.hidden
    sizes = [weight_file(each.folder).stat().st_size for each in (demo, short)]
    assert sizes[0] - sizes[1] == pytest.approx(saved, abs=4096)


def test_another_head_is_another_model():
    heads = [None, np.array([1, 2], np.int32), np.array([1, 3], np.int32)]

    assert len({Checkpoint(tiny(), head_tokens=head).fingerprint() for head in heads}) == 3


@pytest.mark.parametrize("wrong", [[1, 2, 3], [3, 2], [1, 4096]], ids=["too many", "not ascending", "unknown"])
def test_head_tokens_that_do_not_fit_the_package_are_refused(tmp_path: Path, wrong: list[int]):
    folder = convert(tiny(), tmp_path / "model", head_tokens=np.array([1, 2], np.int32), widths=(1,)).folder
    loaded: Any = mx.load(str(folder / HOST), return_metadata=True)
    arrays, metadata = loaded
    tables = {name: mx.array(np.array(table)) for name, table in arrays.items()}
    mx.save_safetensors(str(folder / HOST), tables | {"head_tokens": mx.array(wrong)}, metadata=metadata)

    with pytest.raises(InputError, match="another model"):
        Converted.open(folder)


def test_models_have_different_fingerprints():
    assert Checkpoint(tiny(seed=0)).fingerprint() == Checkpoint(tiny(seed=0)).fingerprint()
    assert Checkpoint(tiny(seed=0)).fingerprint() != Checkpoint(tiny(seed=1)).fingerprint()
    assert (
        Checkpoint(tiny()).fingerprint()
        != Checkpoint(tiny(rope_scaling={"rope_type": "linear", "factor": 2.0})).fingerprint()
    )


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"widths": ()}, "--widths"),
        ({"widths": (0, 8)}, "--widths"),
        ({"widths": (64,), "context": 32}, "--widths"),
        ({"context": 100}, "multiple of 32"),
        ({"context": 1024}, "knows 512 positions"),
    ],
)
def test_choices_that_do_not_fit_are_refused(choices: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        describe(Checkpoint(tiny()), Choices(**choices))


def test_the_default_context_is_that_of_the_model():
    assert describe(Checkpoint(tiny()), Choices(widths=(1,))).context == 512


def test_models_of_another_architecture_are_refused():
    other = gemma.Model(gemma.ModelArgs("gemma", 32, 1, 64, 2, 16, 1e-5, 67, 2))

    with pytest.raises(InputError, match=r"its architecture is gemma\)"):
        Checkpoint(other)


def test_weights_beyond_fp16_are_refused(tmp_path: Path):
    model = tiny()
    model.layers[0].mlp.up_proj.weight[0, 0] = 1e6

    with pytest.raises(InputError, match="up_proj"):
        write(Checkpoint(model), tmp_path / "model", SOME)


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(InputError, match="other files"):
        write(Checkpoint(tiny()), tmp_path, SOME)

    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_conversion_keeps_the_earlier_one(tmp_path: Path):
    def fail(progress: Progress) -> None:
        if progress.stage == "package":
            raise InputError("enough")

    before = convert(tiny(), tmp_path / "model", widths=(1,))
    with pytest.raises(InputError, match="enough"):
        write(Checkpoint(tiny(seed=1)), tmp_path / "model", SOME, report=fail)

    assert Converted.open(tmp_path / "model").package == before.package
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_progress_ends_at_its_total(tmp_path: Path):
    seen: list[Progress] = []
    write(Checkpoint(tiny()), tmp_path / "model", Choices(widths=(1, 4), context=32), report=seen.append)

    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert {progress.total for progress in seen} == {2 * 2 + 2}
    assert seen[-1].done == seen[-1].total - 1


class TestDamage:
    """A damaged folder is refused at load with a sentence that names the damage."""

    @pytest.fixture
    def folder(self, demo: Converted, tmp_path: Path) -> Path:
        return Path(shutil.copytree(demo.folder, tmp_path / "copy"))

    def refusal(self, folder: Path) -> str:
        with pytest.raises(InputError) as refused:
            Converted.open(folder)
        assert str(folder) in str(refused.value)
        return str(refused.value)

    def refusal_if_any(self, folder: Path) -> str:
        try:
            converted = Converted.open(folder)
            for width in converted.package.widths:
                Executor(converted.file).function(converted.package.function(width))
        except InputError as refused:
            return str(refused)
        return f"{folder} is fine"

    def test_no_package(self, folder: Path):
        shutil.rmtree(folder / MODEL)
        assert "launch-pipeline convert" in self.refusal(folder)

    def test_truncated_weights(self, folder: Path):
        with weight_file(folder).open("r+b") as file:
            file.truncate(weight_file(folder).stat().st_size // 2)
        assert "truncated" in self.refusal(folder)

    def test_weights_of_another_length(self, folder: Path):
        with weight_file(folder).open("r+b") as file:
            file.seek(64 + 8)
            file.write(bytes(8))
        assert "0 bytes" in self.refusal(folder)

    def test_missing_weights(self, folder: Path):
        weight_file(folder).unlink()
        assert "truncated" in self.refusal(folder)

    def test_garbage_for_a_program(self, folder: Path):
        next((folder / MODEL).rglob("model.mlmodel")).write_bytes(b"\xff" * 100)
        assert "damaged" in self.refusal(folder)

    def test_an_empty_program(self, folder: Path):
        next((folder / MODEL).rglob("model.mlmodel")).write_bytes(b"")
        assert "no ML program" in self.refusal(folder)

    def test_metadata_of_another_shape(self, demo: Converted):
        claimed = msgspec.structs.replace(demo.package, context=32)
        with pytest.raises(InputError, match="other inputs"):
            require_functions(demo.file, claimed)

    def test_a_missing_function(self, demo: Converted):
        with pytest.raises(InputError, match="width_32"):
            require_functions(demo.file, msgspec.structs.replace(demo.package, widths=(1, 8, 32)))

    @pytest.mark.parametrize("seed", range(24))
    def test_flipped_bytes_of_the_program_give_no_other_error(self, folder: Path, seed: int):
        program, generator = next(folder.rglob("model.mlmodel")), random.Random(seed)
        data = bytearray(program.read_bytes())
        for _ in range(1 + seed % 3):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        program.write_bytes(data)

        assert str(folder) in self.refusal_if_any(folder)

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"rootModelIdentifier": "a", "itemInfoEntries": {"a": {}}}'])
    def test_broken_manifest(self, folder: Path, text: str):
        (folder / MODEL / "Manifest.json").write_text(text)
        assert "Manifest.json" in self.refusal(folder)

    def test_a_manifest_that_points_outside(self, folder: Path):
        manifest = folder / MODEL / "Manifest.json"
        outside = {"rootModelIdentifier": "a", "itemInfoEntries": {"a": {"path": "../../config.json"}}}
        manifest.write_text(json.dumps(outside))
        assert "its manifest names" in self.refusal(folder)

    def test_another_tokenizer(self, folder: Path):
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
        tokenizer["model"]["vocab"]["something new"] = 5000
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert "tokenizer" in self.refusal(folder)

    def test_missing_tables(self, folder: Path):
        (folder / HOST).unlink()
        assert HOST in self.refusal(folder)

    def test_truncated_tables(self, folder: Path):
        (folder / HOST).write_bytes((folder / HOST).read_bytes()[:1000])
        assert HOST in self.refusal(folder)

    def test_tables_of_another_model(self, folder: Path, tmp_path: Path):
        other = convert(tiny(), tmp_path / "other", widths=(1,))
        shutil.copyfile(other.folder / HOST, folder / HOST)
        assert "another model" in self.refusal(folder)

    @pytest.mark.parametrize("metadata", [{}, {METADATA_KEY: "{}"}, {METADATA_KEY: "x"}])
    def test_foreign_metadata(self, metadata: dict[str, str]):
        with pytest.raises(InputError, match="convert its model"):
            Package.decode(metadata, Path("some.mlpackage"))


@pytest.mark.thorough
def test_a_separate_process_converts_and_reports(tmp_path: Path):
    reports = list(conversion(DEMO, tmp_path / "model", SOME))

    finished = reports[-1]
    assert isinstance(finished, Finished)
    assert all(isinstance(report, Progress) for report in reports[:-1])
    assert finished.operations["width_1"]["conv"] == 3 * 7 + 1
    assert finished.host_bytes == (tmp_path / "model" / HOST).stat().st_size
    assert not [finding for finding in finished.findings if finding.severity == "error"]
    assert Converted.open(tmp_path / "model").package.context == 32


@pytest.mark.thorough
def test_an_interrupted_conversion_leaves_no_files(tmp_path: Path):
    running = conversion(DEMO, tmp_path / "model", Choices())
    next(running)
    running.close()

    assert not list(tmp_path.iterdir())


def test_a_conversion_writes_nowhere_but_beside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that is killed leaves only what the next conversion sweeps away."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    convert_folder(DEMO, tmp_path / "there" / "model", Choices(context=32, widths=(1,)))

    assert not list(elsewhere.iterdir())
    assert [entry.name for entry in (tmp_path / "there").iterdir()] == ["model"]
    assert tempfile.gettempdir() == str(elsewhere)


@pytest.mark.thorough
def test_the_command_sums_up(tmp_path: Path):
    folder = tmp_path / "model"
    result = CliRunner().invoke(cli, ["convert", "--out", str(folder), "--widths", "1,4", "--context", "32"])

    assert result.exit_code == 0
    for words in ("width_1", "width_4", "32 tokens", "Neural Engine"):
        assert words in result.output
