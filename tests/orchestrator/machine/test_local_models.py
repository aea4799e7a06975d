"""Laws of models that are already on the disk: they are found where other programs keep them, and never copied."""

import json
import os
import shutil
import sys
from pathlib import Path

import click
import huggingface_hub
import pytest
from click.testing import CliRunner

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.app import cli
from orchestrator.cli.pipelines import first_models
from orchestrator.machine.checkpoints import LocalModel, local_models, resolve
from orchestrator.machine.default_target import VARIABLE
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


def test_a_disk_without_models_has_none():
    assert local_models() == []


def test_downloads_of_hugging_face_have_their_ids_and_gguf_files_their_names(home: Path):
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
def test_ollamas_models_are_blobs(home: Path, parts: tuple[str, ...], name: str):
    blob = ollama(home, *parts)

    assert local_models() == [LocalModel("Ollama", name, str(blob), blob.stat().st_size)]


def test_what_is_found_can_be_used_and_is_not_copied(home: Path):
    ollama(home, "library", "tiny", "latest")
    before = sorted(home.rglob("*"))
    (found,) = local_models()

    assert sorted(home.rglob("*")) == before
    assert (resolve(found.target, "target") / "config.json").is_file()


# The first command on a Mac ------------------------------------------------------------------------


NOTHING = "On a Mac's GPU speculation gains nothing with the default pair, whose forward takes 3 ms."
OFFER = f"{NOTHING} Better: --pair qwen2.5-3b (2.0 GB to download)."
TAKEN = "The models are {}, which {} has put on this disk: --pair and --target choose others."
HUB_PAIR, STUDIO_PAIR = "{}-Instruct-4bit 0.5B-Instruct-4bit", "3B-Instruct-Q4_K_M.gguf 0.5B-Instruct-Q4_K_M.gguf"
BLOBS = " ".join([DIGEST.replace(":", "-")] * 2)
MACS: dict[str, tuple[str, int, str, str, str]] = {
    "a script": ("", 8, "", "", OFFER),
    "a person who agrees": ("", 8, "y", HUB_PAIR.format("3B"), ""),
    "a person who declines": ("", 8, "\n", "", OFFER),
    "a person without a network": ("", 8, "offline", "", OFFER),
    "a person with the default pair": ("default:pair", 8, "y", "", OFFER),
    "too little memory": ("hub:3B hub:0.5B", 1, "y", "", NOTHING),
    "two pairs": ("hub:3B hub:7B hub:0.5B", 16, "y", HUB_PAIR.format("7B"), TAKEN.format("qwen2.5-7b", "Hugging Face")),
    "LM Studio's": ("studio:3B studio:0.5B", 8, "", STUDIO_PAIR, TAKEN.format("qwen2.5-3b", "LM Studio")),
    "Ollama's": ("ollama:gemma3:12b ollama:gemma3:1b", 16, "", BLOBS, TAKEN.format("gemma3-12b", "Ollama")),
    "models of different programs": ("studio:3B hub:0.5B", 8, "", "", OFFER),
}
"""Who: models on the disk, GiB of memory, what is answered at the terminal, the ends of the models' names, the note."""


def _put(home: Path, place: str, name: str) -> None:
    if place == "hub":
        model_folder(home / f"hub/models--mlx-community--Qwen2.5-{name}-Instruct-4bit/snapshots/1")
    elif place == "studio":
        gguf(home / f".lmstudio/models/maker/Qwen2.5-{name}-GGUF/Qwen2.5-{name}-Instruct-Q4_K_M.gguf")
    elif place == "ollama":
        ollama(home, "library", *name.split(":"))
    else:
        (home / "Library/Caches/launch-pipeline/models/SmolLM2-135M-Instruct-b179c9523d0e").mkdir(parents=True)


@pytest.fixture
def mac(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv(VARIABLE)
    return home


@pytest.mark.parametrize(("has", "gib", "answer", "models", "note"), MACS.values(), ids=MACS)
def test_the_first_command_on_a_mac_takes_what_is_there_and_asks_only_a_person(
    has: str, gib: int, answer: str, models: str, note: str, mac: Path, monkeypatch: pytest.MonkeyPatch
):
    for word in has.split():
        _put(mac, *word.split(":", 1))
    monkeypatch.setattr("orchestrator.machine.pairs.recommended_pairs.memory_bytes", lambda: gib << 30)
    monkeypatch.setattr("orchestrator.cli.pipelines.hub_reachable", lambda: answer != "offline")
    chosen: list[tuple[PipelineSettings, str]] = []

    @click.command()
    def command() -> None:
        for stream in (sys.stdin, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda: bool(answer))
        chosen.append(first_models(PipelineSettings(), asks=True))

    ran = CliRunner().invoke(command, input=answer)
    ((settings, told),) = chosen
    ends = [(settings.target or "").endswith, (settings.draft or "").endswith]

    assert ("[y/N]" in ran.output) == (answer in ("y", "\n") and has == "")
    assert (settings != PipelineSettings(), told) == (bool(models), note)
    assert all(end(name) for end, name in zip(ends, models.split(), strict=bool(models)))


@pytest.mark.parametrize(("tools", "taken"), [(False, "gemma3-12b"), (True, "qwen2.5-3b")])
def test_for_an_agent_it_is_a_pair_that_knows_tools(mac: Path, monkeypatch: pytest.MonkeyPatch, tools, taken: str):
    for name in ("12b", "1b"):
        _put(mac, "ollama", f"gemma3:{name}")
    for name in ("3B", "0.5B"):
        _put(mac, "hub", name)
    monkeypatch.setattr("orchestrator.machine.pairs.recommended_pairs.memory_bytes", lambda: 24 << 30)

    assert taken in first_models(PipelineSettings(), asks=False, tools=tools)[1]


@pytest.mark.usefixtures("mac")
def test_a_user_who_names_models_or_is_elsewhere_has_them_as_they_are(monkeypatch: pytest.MonkeyPatch):
    named = [{"target": "a/b"}, {"draft": "a/b"}, {"pace": "m4"}, {"target_engine": "none"}]
    named += [{"listen": "127.0.0.1:5580"}, {"target_hosts": "hosts.json"}, {"draft_command": ("true",)}]
    settings = [PipelineSettings().changed(**each) for each in named]
    assert [first_models(each, asks=True) for each in settings] == [(each, "") for each in settings]
    for variable, system in (("auto", "darwin"), ("", "linux")):
        monkeypatch.setenv(VARIABLE, variable)
        monkeypatch.setattr(sys, "platform", system)
        assert first_models(PipelineSettings(), asks=True) == (PipelineSettings(), "")


@pytest.mark.parametrize("command", ["generate hi", "chat", "start --address ipc:///tmp/lp-none", "serve --port 0"])
def test_every_command_that_answers_chooses_alike(command: str, monkeypatch: pytest.MonkeyPatch):
    def chosen(*_: object, **__: object) -> None:
        raise InputError("chosen")

    monkeypatch.setattr(f"orchestrator.cli.commands.{command.split()[0]}.first_models", chosen)
    assert str(CliRunner().invoke(cli, command.split()).exception) == "chosen"


@pytest.mark.parametrize("content", ["{", "[]", '{"layers": 3}', '{"layers": [{}]}'])
def test_a_broken_manifest_is_passed_over(home: Path, content: str):
    ollama(home, "library", "tiny", "latest")
    (home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest").write_text(content)

    assert local_models() == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["", "model.safetensors", "head_tokens.npy", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_model_or_among_its_files_is_refused_at_once(tmp_path: Path, name: str):
    folder = model_folder(tmp_path / "model")
    file = folder / name if name else tmp_path / "pipe"
    file.unlink(missing_ok=True)
    os.mkfifo(file)

    with pytest.raises(InputError, match=f"{name} is not a regular file" if name else "pass the folder of a model"):
        resolve(str(folder if name else file), "target", lambda _: None)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_deeply_nested_file_is_named_in_a_sentence(tmp_path: Path, name: str):
    folder = model_folder(tmp_path / "model")
    shutil.copy(DEMO_TARGET / "tokenizer.json", folder)
    (folder / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)

    with pytest.raises(InputError, match=name):
        assert ChatTemplate(folder, TextCodec(folder))
