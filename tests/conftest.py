"""What several test modules share: what the target alone says, and shared memory that a test leaves to nobody."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import mlx.core as mx
import pytest
from hypothesis import settings

from orchestrator import Pipeline, Result, SamplingParams
from orchestrator.machine import checkpoints
from orchestrator.machine.drafts import draft_choice
from protocol.kv.segments import sweep, unlink_segment
from protocol.paths import SEGMENTS_VARIABLE, SERVERS_VARIABLE, SESSIONS_VARIABLE, segments_folder
from tests.support.kernel_header import shared_header
from tests.support.paths import DEMO_TARGET, ROOT

HALF = (mx.float16, mx.bfloat16)

# The settings of whoever runs the tests are none of theirs.
os.environ["LAUNCH_PIPELINE_CONFIG"] = os.devnull
# No test fetches the default target, nor do the processes that it starts.
os.environ["LAUNCH_PIPELINE_DEFAULT_TARGET"] = "demo"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores Ctrl-C for commands behind `&`, and processes of tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "TEST_ELEMENT" in os.environ:
    from tests.support.element_types import let_experts_run_in_half

    let_experts_run_in_half(pytest.MonkeyPatch())
if sys.platform == "darwin":
    # A background conversion in every pipeline of a test would slow all of them down; its own tests ask for it.
    os.environ["LAUNCH_PIPELINE_DRAFT_ENGINE"] = "mlx"
    draft_choice.neural_engine = lambda: None
# A slow machine fails no test: pytest-timeout ends one that hangs. Examples are the same in every run.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate")
Reference = Callable[[str | Sequence[int], SamplingParams], Result]

_QUICK = (
    "docs/",
    "draft_worker/candidates/",
    "orchestrator/core/",
    "orchestrator/text/test_text.py",
    "protocol/contracts/",
    "protocol/sampling/",
    "protocol/security/",
    "protocol/speculation/",
    "protocol/test_transport.py",
    "test_environments.py",
)
"""Tests of pure parts and documents."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests of pure parts and documents")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (config.getoption("quick") and collection_path.suffix == ".py" and not _is_quick(collection_path)) or None


def _is_quick(file: Path) -> bool:
    return file.relative_to(Path(__file__).parent).as_posix().startswith(_QUICK)


def pytest_configure(config: pytest.Config) -> None:
    """Of a run with several processes, in the one that starts them."""
    if sys.platform == "linux" and getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        header = ExitStack()
        header.enter_context(shared_header())
        config.add_cleanup(header.close)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """A test that leaves another answer to Ctrl-C fails: a later one, which interrupts itself, would end all tests."""
    yield
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.default_int_handler


@pytest.fixture(autouse=True)
def no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick test that starts a process fails, also where all tests run: so it starts no pipeline."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a quick test starts no process: move it to a folder that tests/conftest.py does not name")

    if _is_quick(request.path):
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        # Otherwise the object that was not made reports that too.
        monkeypatch.setattr(subprocess.Popen, "__del__", lambda _: None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `sampled(number)`, all but that number become `thorough`. They are drawn by
    the file's name: the same in every run, and the same for all tests of a file that have the same cases, since these
    share what was made for a case. A test that takes one of the half types is marked `half`."""
    for item in items:
        if any(each in HALF for each in _types_in(getattr(item, "callspec", None))):
            item.add_marker(pytest.mark.half)
    tests: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("slow"):
            tests.setdefault((item.nodeid.partition("[")[0], *sampled.args), []).append(item)
    for (name, number), cases in tests.items():
        chosen = Random(name.partition("::")[0]).sample(range(len(cases)), min(number, len(cases)))
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker(pytest.mark.thorough)


def _types_in(parameters: Any) -> Iterator[mx.Dtype]:
    for value in parameters.params.values() if parameters else ():
        yield from (each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, mx.Dtype))


@pytest.fixture(scope="session", autouse=True)
def exact_demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On Metal the default target is the demo target in 32 bits: in its own 16 bits the logits of near-ties depend on
    how many tokens are evaluated together (mlx-lm issues 1423 and 1470)."""
    if not mx.metal.is_available():
        yield
        return
    roots = tmp_path_factory.mktemp("demo")
    folder = shutil.copytree(DEMO_TARGET, roots / "demo_model", ignore=shutil.ignore_patterns("*.safetensors"))
    weights: Any = mx.load(str(DEMO_TARGET / "model.safetensors"))
    wide = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), wide, {"format": "mlx"})
    with pytest.MonkeyPatch.context() as patch:
        of_role = checkpoints.worker_folder
        patch.setattr(checkpoints, "worker_folder", lambda role: roots if role == "target" else of_role(role))
        yield


@pytest.fixture(scope="session", autouse=True)
def programs_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands of whoever runs the tests find no server and no pipeline of theirs, nor do those of another test that
    runs at the same time. What a killed run leaves in shared memory, the next one of this checkout removes."""
    registry = Path(f"{segments_folder()}-{crc32(bytes(ROOT)):x}-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}")
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="lp-", dir="/tmp") as sessions:
        patch.setenv(SESSIONS_VARIABLE, sessions)
        patch.setenv(SERVERS_VARIABLE, str(tmp_path_factory.mktemp("servers") / "running"))
        patch.setenv(SEGMENTS_VARIABLE, str(registry))
        sweep()
        yield
        sweep()
    with suppress(OSError):
        registry.rmdir()


@pytest.fixture(scope="session")
def reference(exact_demo: None) -> Iterator[Reference]:
    """Target-only decoding with the demo target; every question is answered once."""
    known: dict[str, Result] = {}
    with Pipeline(strategy="ar") as pipeline:

        def ask(prompt: str | Sequence[int], params: SamplingParams) -> Result:
            key = repr((prompt, params))
            if key not in known:
                known[key] = pipeline.generate(prompt, params)
            return known[key]

        yield ask


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user with an empty cache, its folder `cache`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a registry of shared memory of the test's own; whatever the test leaves is unlinked."""
    monkeypatch.setenv(SEGMENTS_VARIABLE, str(tmp_path / "segments"))
    yield tmp_path / "segments"
    for entry in (tmp_path / "segments").glob("lp-*"):
        unlink_segment(entry.name)
