"""Laws of finding a model: what is complete is used, and everything else is one sentence with a next step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from orchestrator.machine import checkpoints
from orchestrator.machine.checkpoints import demo_model, resolve
from protocol.errors import InputError
from protocol.messages.base import Role
from tests.support.paths import ROOT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that is complete by its names; weights are never opened."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


class Hub:
    """Stands for the hub: a cache, a network, and what was asked of them."""

    def __init__(self, cached: Path | None = None, online: Path | Exception | None = None) -> None:
        self.cached, self.online, self.downloads = cached, online, []

    def snapshot_download(self, name: str, *, local_files_only: bool = False, **options: object) -> str:
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.cached)
        self.downloads.append((name, options))
        if isinstance(self.online, Exception):
            raise self.online
        return str(self.online)


def install(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr(checkpoints, "reachable", lambda _: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.mark.parametrize("role", ["target", "draft"])
def test_no_name_means_the_demo_pair_which_has_real_weights(role: Role):
    assert resolve(None, role) == demo_model(role) == ROOT / f"{role}_worker/demo_model"
    assert (demo_model(role) / "model.safetensors").stat().st_size > 1 << 20


def test_finding_the_demo_pair_imports_no_worker():
    script = (
        "import sys; from orchestrator.machine.checkpoints import demo_model; demo_model('draft'); "
        "print([name for name in sys.modules if name.startswith(('draft_worker', 'mlx'))])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)

    assert out.stdout.strip() == "[]"


SHARDS = {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, r"has no config\.json: a complete model has"),
        ("tokenizer.json", None, r"has no tokenizer\.json: a complete model has"),
        ("model.safetensors", None, r"has no model\*\.safetensors: a complete model has"),
        (INDEX, json.dumps({"weight_map": SHARDS}), r"lacks 2 of its weight files, first model-2\.safetensors"),
        *((INDEX, broken, "is broken: download the model again") for broken in ("{", "{}", "[]")),
    ],
)
def test_an_incomplete_folder_is_refused_by_what_it_lacks(model: Path, file: str, content: str | None, words: str):
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content)

    with pytest.raises(InputError, match=words):
        resolve(str(model), "target")


def test_a_file_is_not_a_model(model: Path):
    with pytest.raises(InputError, match="is a file: pass the folder"):
        resolve(str(model / "model.safetensors"), "target")


PATHS = ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere/", "x.gguf"]
NO_IDS = ["", "gpt2", "owner/na me", "owner/", "-owner/name", "owner/name;rm", "owner/.name"]


@pytest.mark.parametrize("name", [*PATHS, *NO_IDS])
def test_a_path_that_does_not_exist_and_what_is_no_hub_id_never_ask_the_hub(monkeypatch: pytest.MonkeyPatch, name: str):
    hub = install(monkeypatch, Hub())

    with pytest.raises(
        InputError, match=r"There is no folder .*check the path of the draft" if name in PATHS else None
    ):
        resolve(name, "draft")
    assert hub.downloads == []


@pytest.mark.parametrize("complete", [True, False])
def test_a_downloaded_model_needs_no_network_and_an_incomplete_one_is_completed(
    monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path, complete: bool
):
    hub = install(monkeypatch, Hub(cached=model if complete else tmp_path, online=OSError() if complete else model))

    assert resolve("owner/name", "target") == model
    assert len(hub.downloads) == (not complete)


def test_code_is_never_downloaded(monkeypatch: pytest.MonkeyPatch, model: Path):
    hub = install(monkeypatch, Hub(online=model))

    resolve("owner/name", "target")

    ((name, options),) = hub.downloads
    offered = ["config.json", "model-1.safetensors", "tokenizer.json", "modeling.py", "tokenizer.py", "onnx/model.json"]
    taken = huggingface_hub.utils.filter_repo_objects(
        offered, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert name == "owner/name"
    assert list(taken) == ["config.json", "model-1.safetensors", "tokenizer.json"]


def test_a_failed_download_and_one_that_is_no_mlx_model_say_what_to_do(monkeypatch: pytest.MonkeyPatch, model: Path):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    failed = OSError(28, "No space left on device")
    for found, words in ((failed, r"broke off .*No space left on device.*: try again"), (model, "has no model")):
        install(monkeypatch, Hub(online=found))

        with pytest.raises(InputError, match=words):
            resolve("owner/name", "target")


def test_without_a_network_the_hubs_client_is_not_left_to_try_for_long(monkeypatch: pytest.MonkeyPatch, model: Path):
    hub = install(monkeypatch, Hub(online=model))
    asked: list[str] = []
    monkeypatch.setattr(checkpoints, "reachable", asked.append)

    with pytest.raises(InputError, match="Hugging Face can't be reached: download it on a connected machine"):
        resolve("owner/name", "target")
    assert (hub.downloads, asked) == ([], [huggingface_hub.constants.ENDPOINT])


def test_offline_the_real_library_leads_to_the_same_sentence(tmp_path: Path):
    script = (
        "from orchestrator.machine.checkpoints import resolve\nfrom protocol.errors import InputError\n"
        "try: resolve('owner/name', 'target')\nexcept InputError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )

    assert out.stdout == (
        "owner/name is not on this machine and Hugging Face can't be reached: "
        "download it on a connected machine and pass the folder.\n"
    )
