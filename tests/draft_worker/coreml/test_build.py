"""Laws of conversion: exact tables, shared weights, metadata, and refusals."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from mlx_lm.models import gemma

from draft_worker.coreml.conversion.build import convert as convert_folder
from draft_worker.coreml.conversion.build import describe, write
from draft_worker.coreml.conversion.checkpoint import Checkpoint
from draft_worker.coreml.conversion.weights import Palettes, Scaled, compress, head_chunks, restore
from draft_worker.coreml.converted import Converted, require_functions
from draft_worker.coreml.package import HOST, METADATA_KEY, MODEL, Package
from draft_worker.coreml.runtime.runtimes import ExecutorRuntime
from orchestrator.cli.app import cli
from orchestrator.machine.drafts.converted_draft import conversion
from protocol.contracts.coreml import Choices, Finished, Progress
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from protocol.errors import InputError
from tests.support.models.coreml_runs import convert, tiny
from tests.support.paths import DEMO_DRAFT

DEMO = DEMO_DRAFT
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


def test_a_package_describes_its_model(demo: Converted):
    package = demo.package

    assert (package.widths, package.context, package.weights) == ((1, 8), 64, "fp16")
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


@pytest.mark.parametrize(
    ("head", "changes"),
    [([1, 2, 3], {}), ([3, 2], {}), ([1, 4096], {}), ([1, 2], {"model": "another"})],
    ids=["too many", "not ascending", "unknown", "of another model"],
)
def test_tables_that_do_not_fit_the_package_are_refused(tmp_path: Path, head: list[int], changes: dict[str, str]):
    folder = convert(tiny(), tmp_path / "model", head_tokens=np.array([1, 2], np.int32), widths=(1,)).folder
    loaded: Any = mx.load(str(folder / HOST), return_metadata=True)
    tables = {name: mx.array(np.array(table)) for name, table in loaded[0].items()}
    tables["head_tokens"] = mx.array(head, mx.int32)
    mx.save_safetensors(str(folder / HOST), tables, metadata=loaded[1] | changes)

    with pytest.raises(InputError, match="another model"):
        Converted.open(folder)


def test_models_have_different_fingerprints():
    scaled = tiny(rope_scaling={"rope_type": "linear", "factor": 2.0})
    heads = [None, np.array([1, 2], np.int32), np.array([1, 3], np.int32)]
    others = [Checkpoint(tiny(seed=1)), Checkpoint(scaled), *(Checkpoint(tiny(), head_tokens=head) for head in heads)]

    assert Checkpoint(tiny(seed=0)).fingerprint() == others[2].fingerprint()
    assert len({other.fingerprint() for other in others}) == 5


def beyond_fp16() -> Any:
    model = tiny()
    model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    return model


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no widths": (tiny, {"widths": ()}, "--widths"),
    "a width of 0": (tiny, {"widths": (0, 8)}, "--widths"),
    "too wide": (tiny, {"widths": (64,), "context": 32}, "--widths"),
    "an odd context": (tiny, {"context": 100}, "multiple of 32"),
    "a long context": (tiny, {"context": 1024}, "knows 512 positions"),
    "another architecture": (
        lambda: gemma.Model(gemma.ModelArgs("gemma", 32, 1, 64, 2, 16, 1e-5, 67, 2)),
        {},
        r"its architecture is gemma\)",
    ),
    "weights beyond fp16": (beyond_fp16, {"widths": (1,), "context": 32}, "up_proj"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_converted_is_refused_by_its_name(case: str, tmp_path: Path):
    make, choices, words = REFUSED[case]

    with pytest.raises(InputError, match=words):
        write(Checkpoint(make()), tmp_path / "model", Choices(**choices))


def test_the_default_context_is_that_of_the_model():
    assert describe(Checkpoint(tiny()), Choices(widths=(1,))).context == 512


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


# A damaged folder is refused at load with a sentence that names the damage --------------------------


def program(folder: Path) -> Path:
    return next(folder.rglob("model.mlmodel"))


def retokenized(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer["model"]["vocab"]["something new"] = 5000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def rewritten(file: Path, place: int, content: bytes) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:place] + content + data[place + len(content) :])


def manifest(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / MODEL / "Manifest.json").write_text(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no package": (lambda folder: shutil.rmtree(folder / MODEL), "launch-pipeline convert"),
    "truncated weights": (lambda folder: os.truncate(weight_file(folder), 1000), "truncated"),
    "weights of another length": (lambda folder: rewritten(weight_file(folder), 64 + 8, bytes(8)), "0 bytes"),
    "missing weights": (lambda folder: weight_file(folder).unlink(), "truncated"),
    "garbage for a program": (lambda folder: program(folder).write_bytes(b"\xff" * 100), "damaged"),
    "an empty program": (lambda folder: program(folder).write_bytes(b""), "no ML program"),
    "an empty manifest": (manifest(""), "Manifest.json"),
    "a manifest of nothing": (manifest("{}"), "Manifest.json"),
    "a list for a manifest": (manifest("[]"), "Manifest.json"),
    "a manifest without a path": (manifest('{"rootModelIdentifier": "a", "itemInfoEntries": {"a": {}}}'), "Manifest"),
    "a manifest that points outside": (
        manifest('{"rootModelIdentifier": "a", "itemInfoEntries": {"a": {"path": "../../config.json"}}}'),
        "its manifest names",
    ),
    "another tokenizer": (retokenized, "tokenizer"),
    "missing tables": (lambda folder: (folder / HOST).unlink(), HOST),
    "truncated tables": (lambda folder: os.truncate(folder / HOST, 1000), HOST),
}


@pytest.fixture
def folder(demo: Converted, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo.folder, tmp_path / "copy"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_by_the_name_of_the_damage(damage: str, folder: Path):
    harm, words = DAMAGES[damage]
    harm(folder)

    with pytest.raises(InputError) as refused:
        Converted.open(folder)
    assert str(folder) in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(("claims", "words"), [({"context": 32}, "other inputs"), ({"widths": (1, 8, 32)}, "width_32")])
def test_metadata_that_does_not_fit_the_program_is_refused(claims: dict[str, Any], words: str, demo: Converted):
    with pytest.raises(InputError, match=words):
        require_functions(demo.file, msgspec.structs.replace(demo.package, **claims))


@pytest.mark.parametrize("metadata", [{}, {METADATA_KEY: "{}"}, {METADATA_KEY: "x"}])
def test_foreign_metadata_is_refused(metadata: dict[str, str]):
    with pytest.raises(InputError, match="convert its model"):
        Package.decode(metadata, Path("some.mlpackage"))


@pytest.mark.parametrize("seed", range(24))
def test_flipped_bytes_of_the_program_give_no_other_error(folder: Path, seed: int):
    generator, data = random.Random(seed), bytearray(program(folder).read_bytes())
    for _ in range(1 + seed % 3):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    program(folder).write_bytes(data)

    # Any other exception fails the test.
    with suppress(InputError):
        converted = Converted.open(folder)
        for width in converted.package.widths:
            ExecutorRuntime(converted.file).load(converted.package.function(width))


@pytest.mark.thorough
def test_a_separate_process_converts_and_reports(tmp_path: Path):
    reports = list(conversion(DEMO, tmp_path / "model", SOME))

    finished = reports[-1]
    assert isinstance(finished, Finished)
    steps = [report for report in reports[:-1] if isinstance(report, Progress)]
    assert len(steps) == len(reports) - 1
    assert [step.done for step in steps] == sorted(step.done for step in steps)
    assert {step.total for step in steps} == {steps[-1].done + 1} == {3 + 2}
    assert finished.host_bytes == (tmp_path / "model" / HOST).stat().st_size
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
    convert(tiny(), tmp_path / "there" / "model", widths=(1,))

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
