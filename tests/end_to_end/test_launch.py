"""`launch-pipeline launch` with a program that records how it was started: it reaches a server of the demo pair, its
exit code is its own, and nothing is left behind."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from orchestrator import SamplingParams
from orchestrator.runtime.session import sweep
from protocol.paths import SERVERS_VARIABLE, sessions_folder
from tests.conftest import Reference
from tests.end_to_end.test_http_serve import KEY, PROMPT, Serving, serving, started
from tests.orchestrator.cli.test_cli import Command, run, sentence
from tests.support.models.tool_template import write_tool_template
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import until

__all__ = ["serving"]
CODEX = """#!{python}
import json, os, sys, time, tomllib, urllib.request
words = sys.argv[1:]
settings = tomllib.loads("\\n".join(value for option, value in zip(words, words[1:]) if option == "-c"))
provider = settings["model_providers"][settings["model_provider"]]
body = {{"model": settings["model"], "prompt": "def quicksort(items):", "temperature": 0, "max_tokens": 8}}
request = urllib.request.Request(
    provider["base_url"] + "/completions",
    json.dumps(body).encode(),
    {{"authorization": "Bearer " + os.environ[provider["env_key"]], "content-type": "application/json"}},
)
with urllib.request.urlopen(request, timeout=60) as answer:
    text = json.load(answer)["choices"][0]["text"]
request.full_url, request.data = provider["base_url"] + "/models", None
with urllib.request.urlopen(request, timeout=60) as answer:
    eos = json.load(answer)["data"][0]["sampling_defaults"].get("reasoning_eos")
base, arguments = provider["base_url"], words[words.index("exec"):]
told = {{"text": text, "base": base, "model": settings["model"], "arguments": arguments, "eos": eos}}
print(json.dumps(told), flush=True)
if "wait" in words:
    time.sleep(60)
sys.exit(3)
"""
"""It asks the server that its options name, and writes what it was told and answered. Its exit code is 3; with the
argument `wait` it waits for long."""


@pytest.fixture(autouse=True)
def codex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "programs" / "codex"
    program.parent.mkdir()
    program.write_text(CODEX.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def _answer(reference: Reference) -> str:
    return reference(PROMPT, SamplingParams(max_tokens=8)).text


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo target with a template that knows tools."""
    return str(write_tool_template(DEMO_TARGET, tmp_path_factory.mktemp("tools") / "demo"))


@pytest.fixture(scope="module")
def tools_server(target: str) -> Iterator[Serving]:
    with started("--target", target, "--draft-engine", "none") as server:
        yield server


def _launch(*words: str) -> tuple[int, dict[str, object], str]:
    code, output, errors = run("launch", "codex", *words, "--", "exec", "--json")
    return code, json.loads(output), errors


def test_a_server_is_started_for_the_program_and_ends_with_it(reference: Reference, target: str):
    code, told, errors = _launch("--model-name", "mine", "--target", target, "--draft", str(DEMO_DRAFT))

    assert (code, told["text"], told["model"]) == (3, _answer(reference), "mine")
    assert (told["arguments"], told["eos"]) == (["exec", "--json"], "close")
    loading, kept, asks = errors.splitlines()
    assert (loading, asks) == ("Loading models ...", f"codex asks mine at {str(told['base'])[:-3]}.")
    assert kept.startswith("Keeps about ")


@pytest.mark.thorough
@pytest.mark.parametrize("words", [[], ["--server", "URL/v1", "--api-key", KEY]])
def test_a_server_that_runs_is_used_and_goes_on(tools_server: Serving, reference: Reference, words: Sequence[str]):
    code, told, errors = _launch(*(word.replace("URL", tools_server.url) for word in words))

    assert (code, told["text"]) == (3, _answer(reference))
    assert told["base"] == f"{tools_server.url}/v1"
    assert KEY not in errors
    assert tools_server.health() == "ok"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", [[], ["--pair", "demo"], ["--server", "URL", "--api-key", KEY]])
def test_a_model_that_knows_no_tools_is_refused_before_the_program_starts(
    words: Sequence[str], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    url = request.getfixturevalue("serving").url if "URL" in words else ""
    monkeypatch.setenv(SERVERS_VARIABLE, str(tmp_path / "none"))
    code, out, errors = run("launch", "codex", *(word.replace("URL", url) for word in words))

    assert (code, out) == (2, "")
    assert re.search(r"codex works by tools.* `launch-pipeline launch codex --pair qwen[\w.-]+`, ", errors)
    assert re.search(r", whose [\d.]+ GiB (fits into|is too much for) this machine's [\d.]+ GiB", errors)


@pytest.mark.thorough
def test_the_server_ends_even_if_launch_is_killed(target: str):
    command = Command("launch", "codex", "--target", target, "--draft-engine", "none", "--", "exec", "wait")
    base = json.loads(command.stdout.readline())["base"]

    os.killpg(command.process.pid, signal.SIGKILL)

    until(lambda: not _answers(base), 30)
    command.process.wait()
    # As the next start of a pipeline does.
    sweep()
    command.end()
    assert not list(sessions_folder().glob(f"lp-{command.process.pid}-*"))


def _answers(url: str) -> bool:
    try:
        return bool(httpx.get(url))
    except httpx.ConnectError:
        return False
    # It ends while it is asked.
    except httpx.TransportError:
        return True


@pytest.mark.thorough
def test_what_launch_cannot_do_is_told(serving: Serving, monkeypatch: pytest.MonkeyPatch):
    code, _, errors = run("launch", "codex", "--target", "/nowhere")
    assert (code, "/nowhere" in errors) == (2, True)
    code, _, errors = run("launch", "codex", "--server", serving.url, "--target", "x")
    assert (code, "--target has no effect" in sentence(errors)) == (2, True)
    code, _, errors = run("launch", "codex", "--server", serving.url, "--api-key", KEY, "--model", "gpt-5")
    assert (code, "it has demo" in sentence(errors)) == (2, True)

    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, _, errors = run("launch", "qwen")
    assert (code, sentence(errors)) == (
        1,
        "Error: qwen is not installed: run `npm install -g @qwen-code/qwen-code`, then try again.",
    )
