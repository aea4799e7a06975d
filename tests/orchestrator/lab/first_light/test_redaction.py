"""Laws of what may leave a machine: no name, no path, no address, no key, no prompt, in no file."""

import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from orchestrator.lab.calibration import to_toml
from orchestrator.lab.findings import Answer, Findings, Value
from orchestrator.lab.first_light.folder import LightFolder
from orchestrator.lab.first_light.redaction import Redactor
from orchestrator.lab.first_light.report import Run, StageReport
from orchestrator.lab.first_light.run import Choice, run
from orchestrator.lab.first_light.stage_process import run_stage
from orchestrator.lab.first_light.stages import LightSettings, Question, Stage, StageScreen
from orchestrator.machine.profiles.device_profiles import load_profile, parse_profile

FAKE = (sys.executable, "-m", "tests.support.fake_stage")
USER, FULL_NAME, HOST, HOME = "zquux", "Zebulon Quux", "Zebs-MacBook-Air.local", "/Users/zquux"
PROMPT = 'Write to my sister:\n"Dear Ottilie'
REDACTOR = Redactor((USER, FULL_NAME, "Zebulon", "Quux", HOST, "Zebs-MacBook-Air"), (HOME,), (PROMPT,))
PLANTED = (
    f"{HOME}/My Models/diary/qwen-4bit",
    f"~{USER}/models/x",
    "PATH=/srv/private/bin:/srv/private/lib",
    "file:///srv/private/notes.txt",
    "/Volumes/Backup Disk/private/weights.safetensors",
    "/private/var/folders/ab/c0ffee/T/lp-1-abcd/worker.log",
    f"{USER}@{HOST}",
    f"{FULL_NAME}'s Mac",
    "ottilie@example.org",
    "192.168.178.23:5571",
    "fe80::1c2d:3eff:fe4f:5a6b",
    "a4:83:e7:12:34:56",
    "lp1:10.0.0.7:5571:Abc{def}ghi",
    "sk-proj-0123456789abcdef",
    "Zx9Qw8Er7Ty6Ui5Op4As3Df2Gh1Jk0Lz_Xc9-Vb8Nm7",
    "hf_abcdefghijklmnopqrstuv",
    "Authorization: Bearer abc.def.ghi",
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    PROMPT,
    repr(PROMPT),
)
FORBIDDEN = (
    *("My Models", "Backup Disk"),
    *f"{USER} Zebulon Quux MacBook-Air /Users diary private c0ffee ottilie sister Ottilie 192.168 10.0.0.7".split(),
    *["fe80", "a4:83", "lp1:", "sk-proj", "hf_abc", "abc.def.ghi", "9f86d081", "Zx9Qw8"],
)


def test_nothing_that_was_planted_is_in_any_byte_of_the_folder_or_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secrets = tmp_path / "secrets"
    secrets.write_text("\n".join(PLANTED))
    monkeypatch.setenv("FAKE_SECRETS", str(secrets))
    stages = [
        Stage("tells", "", f"Models in {HOME}/x", 1, 1),
        Stage("fails telling", "", "b", 1, 1),
        Stage("other", "", "c", 1, 1),
    ]
    machine, options = (f"chip of {HOST}",), (f"draft: {HOME}/y",)
    made = Run(program="p 1", machine=machine, options=options, began="2026-01-02 03:04 UTC")
    folder = LightFolder.of(tmp_path / "light", made, REDACTOR, [])

    run(
        folder,
        LightSettings(),
        Choice(60),
        StageScreen(),
        stages=stages,
        run_one=partial(run_stage, program=FAKE),
        lacks=lambda stage, _: f"no {PLANTED[0]}" if stage.name == "other" else "",
        questions=[Question("told", stage.name, "What?") for stage in stages],
    )
    with zipfile.ZipFile(folder.archive()) as archive:
        texts = {name: archive.read(name) for name in archive.namelist()}

    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"report.json", "index.html", "run.json", "tells.txt", "extra.toml"}
    texts |= {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    planted = REDACTOR.text("\n".join(PLANTED))
    assert REDACTOR.text(planted) == planted, "redacting twice changes nothing more"
    leaks = {name: [word for word in FORBIDDEN if word.encode() in content] for name, content in texts.items()}
    assert not {name: words for name, words in leaks.items() if words}
    assert any(b"qwen-4bit" in content for content in texts.values())


@pytest.mark.parametrize(
    ("redactor", "text", "shown"),
    [
        (REDACTOR, "12.5 tokens/s, 3 of 4 rows, mlx 0.32.4 at 12:30:44 on 2026-11-22", None),
        (REDACTOR, "127.0.0.1 and https://example.org/docs stay", None),
        (REDACTOR, "width 8: logits deviate by 0.013 standard deviations (GPU/ANE)", None),
        (REDACTOR, "commit a5e49a80e931-dirty of launch-pipeline 0.1.0", None),
        (Redactor(("root", "a", "localhost", "runner")), "a new root on localhost", None),
        (Redactor(("Max", "Ultra", "Mini", "Air", "Pro")), "Apple M4 Max, M3 Ultra, Mac mini, MacBook Air, Pro", None),
        (REDACTOR, f"AMD: {HOME}/a b/target_x and /srv/models/draft_y (mlx)", "AMD: target_x and draft_y (mlx)"),
        (Redactor(("Al",)), "AL's total: al_draft, calm", "[name]'s total: [name]_draft, calm"),
    ],
)
def test_what_names_nobody_stays_and_a_name_is_found_whole_in_any_case(
    redactor: Redactor, text: str, shown: str | None
):
    """A word of our reports or a letter is no name; a model is told by the last part of its path."""
    assert redactor.text(text) == (shown or text)


def test_a_profile_can_be_read_whatever_its_user_is_called():
    profile = load_profile("m3-pro-qwen3-4b")
    text = to_toml(profile)
    words = {word for word in re.findall(r"[a-z]+", re.sub(r'"[^"]*"', "", text)) if len(word) > 1}

    assert words >= {"target", "draft", "steps", "width", "prefill", "context", "source", "name"}
    for word in (*words, profile.target.shape, profile.draft.shape):
        shown = parse_profile(Redactor((word,)).text(text), word)
        assert shown.target.pace() == profile.target.pace()


def test_a_user_may_be_called_like_a_word_of_ours(tmp_path: Path):
    folder = LightFolder.of(
        tmp_path / "light",
        Run(program="p", machine=(), options=(), began="now"),
        Redactor(("done", "tells", "measured")),
        [],
    )
    found = Findings(values=(Value("done", 1.0),), answers=(Answer("measured", "measured"),))
    shown = folder.save(StageReport(stage="tells", title="", status="done", findings=found), "")

    assert (shown.stage, shown.status) == ("tells", "done")
    assert shown.findings.values == (Value("[name]", 1.0),)
    assert shown.findings.answers == (Answer("measured", "[name]"),)


def test_it_knows_this_machine():
    program = (
        "from orchestrator.lab.first_light.redaction import Redactor\n"
        "print(Redactor.of_this_machine().text('/home/zquux/models/a, zquux, ~/b/c'))"
    )
    environment = {**os.environ, "HOME": "/home/zquux", "LOGNAME": "zquux", "USER": "zquux"}

    assert subprocess.check_output([sys.executable, "-c", program], env=environment) == b"a, [name], c\n"
