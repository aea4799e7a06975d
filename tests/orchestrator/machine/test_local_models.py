"""Laws of models that are already on the disk: they are found where other programs keep them, and never copied."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from orchestrator.cli.commands.pairs import LocalModel, local_models
from orchestrator.machine.checkpoints import resolve
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from tests.support.models.gguf_files import write_gguf
from tests.support.paths import DEMO_TARGET

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    return home


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


def gguf(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(file)
    return file


def ollama(home: Path, *parts: str) -> Path:
    blob = gguf(home / ".ollama/models/blobs" / DIGEST.replace(":", "-"))
    manifest = home.joinpath(".ollama/models/manifests/registry.ollama.ai", *parts)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    return blob


def test_downloads_of_hugging_face_have_their_ids_and_gguf_files_their_names(home: Path):
    assert local_models() == []
    model_folder(home / "hub/models--owner--name/snapshots/1234")
    (home / "hub/models--owner--half/snapshots/1234").mkdir(parents=True)
    file = gguf(home / "hub/models--owner--name-GGUF/snapshots/1234/name-Q8_0.gguf")
    name = "owner/name-GGUF:name-Q8_0.gguf"

    assert sorted(local_models(), key=lambda model: model.name) == [
        LocalModel("Hugging Face", "owner/name", "owner/name", 100),
        LocalModel("Hugging Face", name, name, file.stat().st_size),
    ]


def test_lm_studios_models_are_paths(home: Path):
    folder = model_folder(home / ".lmstudio/models/maker/mlx-model")
    file = gguf(home / ".lmstudio/models/maker/gguf-model/m-Q4_0.gguf")
    gguf(file.with_name("mmproj-m.gguf"))

    assert [(model.name, model.target) for model in local_models()] == [
        ("maker/gguf-model/m-Q4_0.gguf", str(file)),
        ("maker/mlx-model", str(folder)),
    ]


@pytest.mark.parametrize(
    ("parts", "name"),
    [(("library", "llama3.2", "3b"), "llama3.2:3b"), (("someone", "tuned", "latest"), "someone/tuned:latest")],
)
def test_ollamas_models_are_blobs_that_can_be_used_and_are_not_copied(home: Path, parts: tuple[str, ...], name: str):
    blob = ollama(home, *parts)
    before = sorted(home.rglob("*"))

    assert local_models() == [LocalModel("Ollama", name, str(blob), blob.stat().st_size)]
    assert sorted(home.rglob("*")) == before
    assert (resolve(str(blob), "target") / "config.json").is_file()


@pytest.mark.parametrize("content", ["{", "[]", '{"layers": 3}', '{"layers": [{}]}'])
def test_a_broken_manifest_is_passed_over(home: Path, content: str):
    ollama(home, "library", "tiny", "latest")
    (home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest").write_text(content)

    assert local_models() == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["model.safetensors", "head_tokens.npy", "tokenizer_config.json"])
def test_a_pipe_among_a_model_s_files_is_refused_at_once(tmp_path: Path, name: str):
    file = model_folder(tmp_path / "model") / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)

    with pytest.raises(InputError, match=f"{name} is not a regular file"):
        resolve(str(file.parent), "target", lambda _: None)
    with pytest.raises(InputError, match="pass the folder of a model"):
        resolve(str(file), "target", lambda _: None)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_deeply_nested_file_is_named_in_a_sentence(tmp_path: Path, name: str):
    folder = model_folder(tmp_path / "model")
    shutil.copy(DEMO_TARGET / "tokenizer.json", folder)
    (folder / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)

    with pytest.raises(InputError, match=name):
        assert ChatTemplate(folder, TextCodec(folder))
