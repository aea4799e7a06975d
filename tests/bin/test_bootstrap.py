"""Laws of the set-up: done once, never trusted half-done, one at a time; the lock file pins everything.

A stand-in for Python on PATH plays venv and pip, so that nothing is installed. The tools beside it understand only what
macOS's do. macOS's bash is 3.2: BASH_3_2 names such a one, where one was built, and the laws then hold with it.
"""

import os
import posix
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT
from tests.support.processes import until

BASH = os.environ.get("BASH_3_2", "/bin/bash")
SCRIPTS = ["bin/.bootstrap", "bin/launch-pipeline", "bin/test", ".ci/run", ".ci/lock"]
LOCKS = ("requirements.lock", "requirements-dev.lock")
LOCKED = ("pyproject.toml", *LOCKS)
TOOLS = ["cat", "cksum", "cp", "dirname", "grep", "head", "mkdir", "readlink", "rm", "sleep", "tail", "tee", "uname"]

STAND_IN = f"""#!{BASH}
if [ "$1" = -c ]; then exec "{sys.executable}" "$@"; fi
case "$1 $2" in
"-m venv") echo venv >>log; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
"-m pip")
    echo "$*" >>asked
    case "$*" in
    *--editable*) exit ;;
    *config*) exec "{sys.executable}" "$@" ;;
    esac
    echo pip >>log
    echo "$SYSTEM_VERSION_COMPAT" >compat
    if [ -e gate ]; then read -r _ <gate; fi
    if [ -e broken ]; then echo "ERROR: no network"; exit 1; fi ;;
"-P -S") shift 3; echo "ran $*" ;;
esac
"""


BSD_OPTIONS = {
    "cat": "belnstuv",
    "chmod": "fhvHLPR",
    "cksum": "o:",
    "cp": "HLPRacfilnprsvx",
    "dirname": "",
    "grep": "A:B:C:abcEFGHIiLlm:nOopqRrSsUVvwxyzZe:f:",
    "head": "c:n:",
    "id": "AFGMPgnpru",
    "ls": "@ABCFGHILOPRSTUWabcdefghiklmnopqrstuvwxy1",
    "mkdir": "m:pv",
    "mv": "fhinv",
    "readlink": "n",
    "rm": "dfiIPRrvWx",
    "sleep": "",
    "tail": "Fb:c:fn:qrv",
    "tee": "ai",
    "uname": "amnoprsv",
}
"""Of the tools in FreeBSD's manual pages, from which macOS has its own, less `readlink -f`, which macOS has had since
12.3 only: letters as getopts takes them."""

BSD_TOOL = """#!/bin/sh
refuse() {{ echo "{name}: $1, which macOS does not understand" >&2; exit 64; }}
# getopts stops at the first operand, as BSD's getopt does.
OPTIND=1
while getopts ":{options}" letter; do
    case $letter in [?:]) refuse "option $OPTARG" ;; esac
done
position=0
for argument; do
    position=$((position + 1))
    if [ "$position" -ge "$OPTIND" ]; then
        case $argument in -?*) refuse "option $argument after an operand" ;; esac
    fi
done
exec "{program}" "$@"
"""
INTERRUPTED = "launch-pipeline: the set-up was interrupted: the next start does it again.\n"


def install_bsd_tools(folder: Path, names: list[str]) -> None:
    """A stand-in for each tool in `folder`, which is to be all of PATH."""
    for name in names:
        file = folder / name
        file.write_text(BSD_TOOL.format(name=name, options=BSD_OPTIONS[name], program=shutil.which(name)))
        file.chmod(0o755)


class Checkout:
    """A copy of the commands in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "bin", folder / "bin")
        for name in LOCKED:
            shutil.copy(ROOT / name, folder / name)
        self.path = folder / "path"
        self.path.mkdir()
        self.path_variable = str(self.path)
        install_bsd_tools(self.path, TOOLS)
        self.settings = {"PIP_CONFIG_FILE": os.devnull}
        self.stand_in = self.path / "python3.13"
        self.stand_in.write_text(STAND_IN)
        self.stand_in.chmod(0o755)

    def start(self, *arguments: str, group: bool = False) -> subprocess.Popen[str]:
        """`group`: in a process group of its own."""
        return subprocess.Popen(
            [BASH, str(self.folder / "bin/launch-pipeline"), *arguments],
            env={**os.environ, "PATH": self.path_variable, **self.settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=group,
            # Tests may run in the background, where shells let a command ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, error = process.communicate(timeout=60)
        return process.returncode, out, error

    @property
    def log(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "check out")


def test_the_first_start_sets_up_and_runs_and_a_later_one_only_runs(checkout: Checkout):
    assert checkout.run("generate", "two words")[:2] == (0, "ran generate two words\n")
    assert checkout.run() == (0, "ran \n", "")
    assert checkout.log == ["venv", "pip"]
    # Otherwise pip may take MLX's kernels for those of an older macOS.
    assert (checkout.folder / "compat").read_text() == "0\n"


def test_only_wheels_of_the_locks_are_installed_and_what_builds_the_checkout_is_among_them(checkout: Checkout):
    checkout.run()
    packages, own = (checkout.folder / "asked").read_text().splitlines()

    assert {"--no-deps", "--require-hashes", "--only-binary :all:"} <= set(
        re.findall(r"--[a-z-]+(?: :all:)?", packages)
    )
    assert packages.endswith("--requirement requirements.lock")
    assert own.endswith("--no-index --no-build-isolation --editable .")


NO_COREMLTOOLS = "so nothing can run on the Neural Engine: install another one ({}), and the next start takes it.\n"
NO_PYTHON = "(the packages have no wheels for newer ones): install one ({}), then start again.\n"
WEBSITE, BY_BREW = "Python 3.13 of https://www.python.org/downloads/macos", "brew install python@3.13"
INTEL = "this Mac has an Intel processor, and MLX has no packages for those: use one with Apple silicon, or Linux.\n"
ROSETTA = "this terminal runs under Rosetta, and no Python for Apple silicon was found: run `arch -arm64 zsh`, or "
WALK = {
    "Homebrew's 3.13": ("brew/python3.13 brew", "brew/python3.13", ""),
    "python.org's 3.12": ("org/python3.12 org/python3:3.12", "org/python3.12", ""),
    "the system's 3.9 only": ("usr/python3:3.9", "", NO_PYTHON.format(WEBSITE)),
    "the same with uv": ("usr/python3:3.9 uv", "", NO_PYTHON.format("uv python install 3.13")),
    "brew's 3.14 only": ("brew/python3.14 brew/python3:3.14 brew", "brew/python3", NO_COREMLTOOLS.format(BY_BREW)),
    "uv's 3.13": ("uv/python3.13 uv usr/python3:3.9", "uv/python3.13", ""),
    "conda first": ("conda/python3.13 brew/python3.13", "brew/python3.13", ""),
    "conda before a 3.14": ("conda/python3.13 brew/python3.14", "conda/python3.13", ""),
    "an Intel Python first": ("intel/python3.13 brew/python3.13", "brew/python3.13", ""),
    "Rosetta": ("intel/python3.12 rosetta", "", ROSETTA),
    "Rosetta with brew": ("intel/python3.13 brew/python3.13 rosetta", "brew/python3.13", ""),
    "an Intel Mac": ("intel/python3.13", "", INTEL),
}
"""Who: Pythons (KIND/NAME[:VERSION]) and programs on PATH, in order; the Python that is taken; what is said last."""


class Mac(Checkout):
    """A Mac, whose Python 3.14 has no coremltools, and whose own, in `usr`, opens a window."""

    def has(self, things: str) -> None:
        pythons = {thing.partition(":")[0]: thing for thing in things.split() if "/" in thing}
        answers = f"*translated) echo {int('rosetta' in things)} ;; *) echo {int('intel' not in things)}"
        self._program(self.path / "uname", "#!/bin/sh\necho Darwin\n")
        self._program(self.path / "sysctl", f"#!/bin/sh\ncase $2 in {answers} ;; esac\n")
        for program in set(things.split()) & {"brew", "uv"}:
            self._program(self.path / program, "#!/bin/sh\n")
        for name, thing in pythons.items():
            self._program(self.folder / name, self._python(thing))
        bootstrap = self.folder / "bin/.bootstrap"
        bootstrap.write_text(bootstrap.read_text().replace("/usr/bin/python3", f"'{self.folder}/usr/python3'"))
        folders = [self.path, *((self.folder / name).parent for name in pythons)]
        self.path_variable = ":".join(map(str, dict.fromkeys(folders)))

    def _program(self, file: Path, text: str) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def _python(self, thing: str) -> str:
        name, _, version = thing.partition(":")
        if name == "usr/python3":
            return f"#!/bin/sh\necho window >>'{self.folder}/log'\n"
        version = version or name.rpartition("python")[2]
        told = (
            f"import ensurepip, os, platform, sys; sys.platform, kind = 'darwin', '{name.partition('/')[0]}'; "
            f"sys.version_info = (*map(int, '{version}'.split('.')), 0); os.path.isdir = lambda _: kind == 'conda'; "
            "platform.machine = lambda: 'x86_64' if kind == 'intel' else 'arm64'; "
            f"sys.modules.update(dict.fromkeys({['coremltools'] * (version == '3.14')})); exec(sys.argv.pop(1))"
        )
        return STAND_IN.replace('"$@"; fi', f'-c "{told}" "$2"; fi').replace("echo venv", f"echo {name}")


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    mac = Mac(tmp_path / "check out")
    mac.stand_in.unlink()
    return mac


@pytest.mark.parametrize(("things", "taken", "said"), WALK.values(), ids=WALK)
def test_a_start_takes_the_first_fitting_python_or_says_how_to_get_one(mac: Mac, things: str, taken: str, said: str):
    mac.has(things)
    code, _, error = mac.run("generate")

    assert (code, mac.log) == ((0, [taken, "pip"]) if taken else (1, []))
    assert (said or "set-up complete.\n") in error.splitlines(keepends=True)[-1]
    # What was taken stays, and nothing stays of what was not.
    assert mac.run() == (0, "ran \n", "") if taken else not list(mac.folder.glob(".venv*"))


def test_a_python_that_has_all_packages_is_taken_once_it_is_there(mac: Mac):
    for things in ("brew/python3:3.14", "brew/python3:3.14 brew/python3.13"):
        mac.has(things)
        assert ("coremltools" in mac.run()[2]) == (things == "brew/python3:3.14")
        assert mac.run() == (0, "ran \n", "")
    assert mac.log == ["brew/python3", "pip", "brew/python3.13", "pip"]


@pytest.mark.parametrize("name", LOCKED)
def test_a_changed_dependency_is_installed_into_the_same_environment(checkout: Checkout, name: str):
    checkout.run()
    with (checkout.folder / name).open("a") as file:
        file.write("# changed\n")

    assert checkout.run()[0] == 0
    assert checkout.log == ["venv", "pip", "pip"]


def test_a_set_up_that_failed_says_why_and_is_not_trusted(checkout: Checkout):
    (checkout.folder / "broken").touch()
    code, out, error = checkout.run()
    (checkout.folder / "broken").unlink()

    assert (code, out) == (1, "")
    assert re.search(
        r"ERROR: no network.*could not be installed: check what pip says, and the network .*again", error, re.S
    )
    assert checkout.run()[0] == 0
    assert checkout.log == ["venv", "pip", "venv", "pip"]


@pytest.mark.parametrize(
    ("variables", "file", "cause"),
    [
        ({"PIP_NO_INDEX": "1"}, "", "pip's settings forbid every index: unset PIP_NO_INDEX (log:"),
        ({}, "[install]\nno-index = true", "forbid every index: unset install.no-index in {file} (log:"),
        ({"PIP_NO_INDEX": "0"}, "", "check what pip says, and the network (log:"),
        (
            {"PIP_INDEX_URL": "https://me:secret@none"},
            "",
            "the index or the proxy of pip's settings: PIP_INDEX_URL (log:",
        ),
        ({}, "[global]\nindex-url = https://me:secret@none", "settings: global.index-url in {file} (log:"),
    ],
)
def test_settings_of_pip_by_which_a_set_up_fails_are_named_and_their_values_are_not(
    checkout: Checkout, variables: dict[str, str], file: str, cause: str
):
    settings = checkout.folder / "pip's settings"
    settings.write_text(file)
    (checkout.folder / "broken").touch()
    checkout.settings = {"PIP_CONFIG_FILE": str(settings), **variables}
    error = checkout.run()[2]

    assert cause.format(file=settings) in error
    assert "secret" not in error


def test_a_moved_checkout_is_set_up_anew(checkout: Checkout, tmp_path: Path):
    checkout.run()
    moved = tmp_path / "elsewhere"
    checkout.folder.rename(moved)
    checkout.folder, checkout.path_variable = moved, f"{moved}/path"

    assert checkout.run()[0] == 0
    assert checkout.log == ["venv", "pip", "venv", "pip"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_of_two_starts_at_once_one_sets_up_and_the_other_waits_or_is_interrupted(checkout: Checkout, interrupted: bool):
    gate = checkout.folder / "gate"
    os.mkfifo(gate)
    first = checkout.start()
    assert first.stderr is not None
    first.stderr.readline()
    second = checkout.start(group=True)
    assert second.stderr is not None
    words = second.stderr.readline()

    assert "waiting for another start" in words
    assert f"(process {first.pid} holds {checkout.folder}/.venv.flock)" in words
    if interrupted:
        os.killpg(second.pid, signal.SIGINT)
        assert second.communicate(timeout=60) == ("", INTERRUPTED)
        assert second.returncode == 130
    gate.write_text("go\n")
    assert first.communicate(timeout=60)[0] == "ran \n"
    assert interrupted or second.communicate(timeout=60)[0] == "ran \n"
    assert checkout.log == ["venv", "pip"]


def test_the_lock_of_a_killed_start_is_free_once_its_installer_has_ended(checkout: Checkout):
    gate = checkout.folder / "gate"
    os.mkfifo(gate)
    killed = checkout.start(group=True)
    until(lambda: "pip" in checkout.log)
    os.killpg(killed.pid, signal.SIGKILL)
    next_one = checkout.start()
    assert next_one.stderr is not None
    assert "waiting for another start" in next_one.stderr.readline()
    with gate.open("w"):
        gate.unlink()

    assert next_one.communicate(timeout=60)[0] == "ran \n"
    assert checkout.log == ["venv", "pip", "venv", "pip"]


SLOW_STAND_IN = f"""#!{BASH}
if [ "$1" = -c ]; then exec "{sys.executable}" "$@"; fi
case "$1 $2" in
"-m venv")
    # As Python's: the interpreter comes first, and a process of its own installs pip.
    mkdir -p .venv/bin; cp "$0" .venv/bin/python; sleep 0.02; : >.venv/pyvenv.cfg
    ( for part in 1 2 3; do sleep 0.02; : >.venv/$part; done ) ;;
"-m pip")
    if [ ! -e "${{0%/bin/python}}/pyvenv.cfg" ]; then
        echo "ERROR: externally-managed-environment" | tee -a wrong
        exit 1
    fi
    for part in 4 5 6; do sleep 0.02; : >.venv/$part || exit 1; done
    echo "Installing collected" ;;
"-P -S")
    for part in 1 2 3 4 5 6; do [ -e "${{0%/bin/python}}/$part" ] || echo "no $part" >>wrong; done
    echo ran ;;
esac
"""
SLOW_REMOVAL = """#!/bin/sh
# The interpreter goes last, as it may with the true command.
shift
for name; do
    case $name in .venv) set -- .venv/[!0-9b]* .venv/[0-9]* .venv; for part; do {sleep} 0.01; {rm} -rf "$part"; done ;;
    *) {sleep} 0.01; {rm} -f "$name" ;;
    esac
done
"""


@pytest.mark.parametrize("trials", [4, pytest.param(10, marks=pytest.mark.thorough)])
def test_a_set_up_interrupted_twice_at_any_moment_starts_again_cleanly(checkout: Checkout, trials: int):
    """The pip of the system is never run, and a command never runs with half an environment."""
    source = random.Random(trials)
    checkout.stand_in.write_text(SLOW_STAND_IN)
    (checkout.path / "rm").write_text(SLOW_REMOVAL.format(sleep=shutil.which("sleep"), rm=shutil.which("rm")))
    began = time.monotonic()
    checkout.run()
    duration = time.monotonic() - began
    for _ in range(trials):
        with (checkout.folder / "requirements.lock").open("a") as file:
            file.write("# changed\n")
        for _ in range(2):
            start = checkout.start(group=True)
            time.sleep(source.uniform(0.0, duration))
            os.killpg(start.pid, signal.SIGINT)
            out, error = start.communicate(timeout=60)
            # -SIGINT: before bash has read the script. 0: after the end.
            if start.returncode not in (0, -signal.SIGINT):
                assert (start.returncode, out) == (130, "")
                assert error.endswith((INTERRUPTED, "launch-pipeline: interrupted.\n"))

        assert checkout.run()[:2] == (0, "ran\n")
        assert not (checkout.folder / "wrong").exists()


@pytest.mark.parametrize(("minor", "fits"), [(10, False), (11, True), (14, True), (15, False)])
def test_a_python_that_the_locked_packages_have_no_wheels_for_is_passed_over(
    checkout: Checkout, minor: int, fits: bool
):
    kinds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    says = f"import sys; sys.version_info = (3, {minor}, 0, 'alpha', 1); exec(sys.argv.pop(1))"
    checkout.stand_in.write_text(STAND_IN.replace('"$@"; fi', f'-c "{says}" "$2"; fi'))
    other = checkout.path / "python3"
    other.write_text(STAND_IN.replace("echo venv", "echo python3"))
    other.chmod(0o755)
    checkout.run()

    assert checkout.log == ["venv" if fits else "python3", "pip"]
    assert (f"Programming Language :: Python :: 3.{minor}" in kinds) == fits


def test_the_command_works_through_a_symbolic_link(checkout: Checkout, tmp_path: Path):
    (tmp_path / "link").symlink_to(checkout.folder / "bin/launch-pipeline")
    out = subprocess.run(
        [BASH, str(tmp_path / "link")], env={**os.environ, "PATH": str(checkout.path)}, capture_output=True, text=True
    )

    assert out.stdout == "ran \n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_and_run_as_they_are(script: str):
    subprocess.run([BASH, "-n", str(ROOT / script)], check=True)

    assert script == "bin/.bootstrap" or os.access(ROOT / script, os.X_OK)


def locked() -> dict[str, list[Requirement]]:
    pins: dict[str, list[Requirement]] = {}
    for line in re.split(r"(?<!\\)\n", "".join((ROOT / name).read_text() for name in LOCKS)):
        pinned, *hashes = line.partition("#")[0].replace("\\\n", "").split("--hash=sha256:")
        if pinned.strip():
            assert hashes
            assert all(len(each.strip()) == 64 for each in hashes)
            pin = Requirement(pinned)
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    return pins


def declared() -> list[Requirement]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    # The user installs a GPU's build, what trains drafts, and the server's clients that one test uses.
    locked = [line for name in extras if name not in ("cuda", "training", "clients") for line in extras[name]]
    lines = [*pyproject["project"]["dependencies"], *pyproject["dependency-groups"]["build"], *locked]
    return [Requirement(line) for line in lines]


def test_the_lock_pins_exact_versions_and_nothing_of_this_machine():
    pins = [pin for versions in locked().values() for pin in versions]

    assert all(pin.url is None and re.fullmatch(r"==[\w.!+]+", str(pin.specifier)) for pin in pins)
    for name in LOCKS:
        assert not re.search(r"--(?!hash=sha256)|://|/home/|/opt/|/Users/", (ROOT / name).read_text())


def test_the_lock_satisfies_every_declared_dependency():
    pins = locked()

    for wanted in declared():
        versions = pins.get(canonicalize_name(wanted.name), [])
        assert versions, f"{wanted.name} is not in the locks: renew them with .ci/lock"
        assert all(next(iter(pin.specifier)).version in wanted.specifier for pin in versions)


def test_the_lock_holds_what_the_dependencies_need():
    pins = locked()
    seen: set[str] = set()
    todo = [(canonicalize_name(wanted.name), extra) for wanted in declared() for extra in (wanted.extras or {""})]
    while todo:
        name, extra = todo.pop()
        assert name in pins, f"{name} is not in the locks: renew them with .ci/lock"
        if name in seen:
            continue
        seen.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        for needed in map(Requirement, lines):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo.append((canonicalize_name(needed.name), ""))


def test_a_process_that_a_command_spawns_does_not_run_the_command_again():
    found = runpy.run_path(str(ROOT / "bin" / ".start.py"), run_name="__mp_main__")

    assert callable(found["start"])


def test_a_python_for_both_processors_leaves_rosetta(monkeypatch: pytest.MonkeyPatch):
    started: list[str] = []
    start = runpy.run_path(str(ROOT / "bin" / ".start.py"), run_name="__mp_main__")["start"]
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(posix, "uname", lambda: SimpleNamespace(machine="x86_64"))
    monkeypatch.setattr(posix, "execv", lambda *command: started.extend(command[1]))
    monkeypatch.setattr("_signal.signal", lambda *_: None)
    monkeypatch.setattr("orchestrator.cli.entry.main", lambda: None)
    start()

    assert started == ["arch", "-arm64", sys.executable, *sys.orig_argv[1:]]


@pytest.mark.parametrize(
    ("imported", "start"),
    [
        ("site", f"import runpy; runpy.run_path({str(ROOT / 'bin/.start.py')!r})['start']()"),
        ("orchestrator.cli.app", "from orchestrator.cli.entry import main; main()"),
    ],
)
def test_ctrl_c_while_a_start_imports_ends_it_with_a_sentence(imported: str, start: str):
    script = (
        "import posix, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {imported!r}: posix.kill(posix.getpid(), signal.SIGINT)\n"
        f"sys.meta_path.insert(0, Interrupt())\n{start}"
    )
    ended = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True)

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.thorough
def test_the_command_runs_where_site_skips_the_file_that_names_the_checkout(tmp_path: Path):
    """iCloud hides what is in .venv, and site skips hidden files: here every .pth file is gone.

    The pipeline's processes are started by the command, and must find the packages as well.
    """
    checkout = tmp_path / "check out"
    _with_environment_without_pth(checkout)
    settings = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""}
    out = subprocess.run(
        [BASH, str(checkout / "bin/launch-pipeline"), "generate", "import os", "--max-tokens", "2"],
        env=settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert out.returncode == 0, out.stderr
    assert out.stdout.strip()


def _with_environment_without_pth(checkout: Path) -> None:
    """A checkout whose .venv is in step and holds what is installed here, except .pth files."""
    environment = checkout / ".venv"
    packages = Path(sysconfig.get_path("purelib"))
    ours = environment / packages.relative_to(sys.prefix)
    ours.mkdir(parents=True)
    for entry in packages.iterdir():
        if entry.suffix != ".pth":
            (ours / entry.name).symlink_to(entry)
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", environment)
    shutil.copytree(ROOT / "bin", checkout / "bin")
    for name in ("protocol", "draft_worker", "target_worker", "orchestrator"):
        (checkout / name).symlink_to(ROOT / name)
    for name in LOCKED:
        shutil.copy(ROOT / name, checkout)
    # As `fingerprint` in bin/.bootstrap writes it.
    sums = [subprocess.check_output(["cksum"], input=(checkout / name).read_bytes()).decode() for name in LOCKED]
    (environment / "stamp").write_text(f"{checkout}\n{''.join(sums)}")
