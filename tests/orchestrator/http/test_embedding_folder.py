"""Laws of an embedding model's folder: what decides over its vectors is there, or it is refused."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from orchestrator.http.embedding_process import embedding_folder
from orchestrator.machine import checkpoints
from protocol.contracts.coreml import silent
from protocol.errors import InputError

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    return tmp_path


class Hub:
    """Stands for the hub, with a snapshot that lacks the files in its subfolders, as `resolve` leaves them out."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.asked: list[tuple[str, str, str | None]] = []

    def snapshot_download(self, name: str, **options: object) -> str:
        return str(self.snapshot)

    def try_to_load_from_cache(self, id: str, name: str, revision: str | None = None) -> None:
        return None

    def hf_hub_download(self, id: str, name: str, revision: str | None = None) -> str:
        self.asked.append((id, name, revision))
        return str(self.snapshot / name)


@pytest.fixture
def hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(model)
    monkeypatch.setattr(checkpoints, "reachable", lambda _: True)
    for name in ("snapshot_download", "try_to_load_from_cache", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    return hub


def test_the_pooling_of_a_hugging_face_model_is_fetched_at_the_snapshots_revision(hub: Hub):
    assert embedding_folder("owner/name", silent) == hub.snapshot
    assert hub.asked == [("owner/name", "1_Pooling/config.json", hub.snapshot.name)]


def test_a_local_folder_without_its_pooling_is_refused(model: Path):
    with pytest.raises(InputError, match=r"lacks 1_Pooling/config\.json"):
        embedding_folder(str(model), silent)


def test_a_folder_with_all_parts_is_used_as_it_is(model: Path, hub: Hub):
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling/config.json").write_text("{}")

    assert embedding_folder(str(model), silent) == embedding_folder("owner/name", silent) == model
    assert hub.asked == []


def test_no_file_outside_of_the_folder_is_asked_for(model: Path, hub: Hub):
    (model / "modules.json").write_text(json.dumps([{"path": "../other", "type": "x.Pooling"}]))

    assert embedding_folder("owner/name", silent) == model
    assert hub.asked == []
