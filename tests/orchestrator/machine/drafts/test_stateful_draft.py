"""A draft whose name ends in .mlpackage is a package of another's making, with an engine of its own."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.lab.bench.models import bench_models
from orchestrator.machine.drafts.draft_choice import DraftChoice, draft_choice, draft_for
from orchestrator.machine.models import checkpoints
from orchestrator.machine.progress import silent
from protocol.errors import InputError
from tests.support.paths import DEMO_TARGET

ID = "someone/coreml-model:Model-4bit.mlpackage"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "Model.mlpackage"
    path.mkdir()
    return path


@pytest.mark.parametrize("engine", ["mlx", "coreml", "coreai"])
@pytest.mark.parametrize("ending", ["", "/"])
def test_the_engine_follows_from_the_name(package: Path, engine: str, ending: str):
    assert draft_choice(engine, f"{package}{ending}") == DraftChoice("stateful", package)


def test_an_engine_without_a_model_looks_at_no_package(package: Path):
    assert draft_for(str(DEMO_TARGET), "ngram", str(package), silent) == DraftChoice("ngram", None)


def test_a_package_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"no package .*gone\.mlpackage.*owner/name:FILE\.mlpackage"):
        draft_choice("mlx", str(tmp_path / "gone.mlpackage"))


def test_a_compiled_model_is_refused_with_the_way_out(tmp_path: Path):
    with pytest.raises(InputError, match=r"compiled model.*pass the \.mlpackage that it was compiled from"):
        draft_choice("mlx", str(tmp_path / "Model.mlmodelc"))


class Hub:
    """The hub's download, which writes these files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, *files: str) -> None:
        self.files = files
        self.fetched: list[dict[str, Any]] = []
        monkeypatch.setenv("HOME", str(root))
        monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._fetch)
        monkeypatch.setattr(checkpoints, "reachable", lambda _: True)

    def _fetch(self, id: str, *, local_dir: Path, **options: Any) -> str:
        self.fetched.append({"id": id} | options)
        for name in self.files:
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / name).touch()
        return str(local_dir)


def test_a_package_of_a_hugging_face_id_is_fetched_once_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = Hub(monkeypatch, tmp_path, "Model-4bit.mlpackage/Manifest.json", "tokenizer.json")
    first, again = (draft_choice("mlx", ID) for _ in range(2))

    assert first == again
    assert first.folder is not None
    assert (first.engine, first.folder.name) == ("stateful", "Model-4bit.mlpackage")
    assert (first.folder / "Manifest.json").is_file()
    assert (first.folder.parent / "tokenizer.json").is_file()
    (fetched,) = hub.fetched
    assert fetched["id"] == "someone/coreml-model"
    assert fetched["allow_patterns"] == ["Model-4bit.mlpackage/*", "tokenizer.json"]
    assert "*.py" in fetched["ignore_patterns"]


def test_an_id_without_that_package_is_answered_with_where_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Hub(monkeypatch, tmp_path)
    with pytest.raises(InputError, match=r"holds no Model-4bit\.mlpackage: look up its files"):
        draft_choice("mlx", ID)
    assert not list((tmp_path / "cache").rglob("Model-4bit*"))


def test_the_bench_compares_no_package_with_mlx_lm(package: Path):
    with pytest.raises(InputError, match="can't be measured beside mlx-lm"):
        bench_models(str(DEMO_TARGET), str(package), same_model=False)
