"""Laws of the training programs, each run for two steps on a tiny model. Without torch only `prepare` runs."""

import itertools
import json
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from orchestrator.lab.training import prepare

SIZES = ["--hidden", "16", "--heads", "2", "--kv-heads", "1", "--feed-forward", "24"]
STEPS = ["--length", "12", "--batch", "2", "--minutes", "0.05", "--lr", "0.1", "--threads", "1"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Token files as `prepare` makes them, of random tokens."""
    folder = tmp_path / "data"
    folder.mkdir()
    source = np.random.default_rng(0)
    for name, count in (("train", 4000), ("held_out", 1200)):
        np.save(folder / f"{name}.npy", source.integers(1, 4096, count).astype(np.uint16))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def run(program: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run a program that needs torch in this process. Its clock advances one second a call: `STEPS` are two steps."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from orchestrator.lab.training import distil, train, training_loop

    monkeypatch.setattr(sys, "argv", [program, *STEPS, *arguments])
    monkeypatch.setattr(training_loop.time, "monotonic", map(float, itertools.count()).__next__)
    {"train": train, "distil": distil}[program].main()


def parameters(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def layers(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]


def test_the_text_is_split_and_every_file_starts_with_the_end_of_text_token(tmp_path: Path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    text = "def add(one, other):\n    return one + other\n" * 8
    for number in range(80):
        (library / f"module_{number}.py").write_text(f"# {number}\n{text}")
    (library / "stub.py").write_text("pass\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr(sys, "argv", ["prepare", "--out", str(tmp_path / "out")])

    prepare.main()

    held_out = (tmp_path / "out" / "held_out.txt").read_text().split("\n")
    assert len(held_out) == 2
    assert (np.load(tmp_path / "out" / "train.npy") == 0).sum() == 80 - 2
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_target_is_trained_and_saved_with_its_tokenizer(data: Path, tmp_path: Path, monkeypatch):
    run("train", monkeypatch, "--data", str(data), "--out", str(tmp_path / "target"), "--layers", "2", *SIZES)

    assert layers(tmp_path / "target") == 2
    assert all(np.isfinite(weights).all() for weights in parameters(tmp_path / "target").values())
    assert (tmp_path / "target" / "tokenizer.json").is_file()


def test_a_draft_starts_from_the_teachers_layers_and_grows_by_an_inserted_one(data: Path, tmp_path: Path, monkeypatch):
    target, draft, grown = (tmp_path / name for name in ("target", "draft", "grown"))
    common = ("--data", str(data))
    run("train", monkeypatch, *common, "--out", str(target), "--layers", "3", *SIZES)
    run(
        "train",
        monkeypatch,
        *common,
        "--out",
        str(draft),
        "--layers",
        "2",
        *SIZES,
        "--teacher",
        str(target),
        "--keep",
        "0,2",
    )
    monkeypatch.setattr("orchestrator.lab.training.distil.PROMPT", 4)
    run("distil", monkeypatch, *common, "--target", str(target), "--draft", str(draft), "--insert", "1",
        "--written", "4", "--out", str(grown))  # fmt: skip

    assert layers(grown) == 3
    assert np.load(data / "written.npy").shape == (4, 12)
    before, after = (parameters(folder)["model.embed_tokens.weight"] for folder in (draft, grown))
    assert (before != after).any()
