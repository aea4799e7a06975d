"""The programs of `launch-pipeline launch` themselves, non-interactively, with the default pair:
`bin/test -m slow tests/end_to_end/test_agents.py`.

A program that is not installed is fetched from its registry into a folder of the test. The default target's context has
room for 8,192 tokens, and its chat template knows no tools. So the programs run with a template that does, and with
short rules and few tools where they have an option for that.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_http_serve import KEY, Serving, started
from tests.support.default_pair import default_pair, serving_default_pair
from tests.support.models.tool_template import write_tool_template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = {
    "codex": "@openai/codex",
    "claude": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
    "qwen": "@qwen-code/qwen-code",
    "cn": "@continuedev/cli",
    "aider": "aider-chat",
}
RULES = "Be brief."
QUESTION = "Say hello"
CODEX_TOOLS = (
    "apps",
    "goals",
    "hooks",
    "image_generation",
    "multi_agent",
    "shell_tool",
    "tool_suggest",
    "unified_exec",
)
CODEX = ("-c", "check_for_update_on_startup=false", "-c", "analytics.enabled=false", "exec", "--skip-git-repo-check")
AIDER = ("--yes", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-release-notes")
SHORT = {
    "codex": (
        *CODEX,
        *(word for name in CODEX_TOOLS for word in ("-c", f"features.{name}=false")),
        *("-c", 'web_search="disabled"', "-c", 'model_instructions_file="rules.md"', QUESTION),
    ),
    "claude": ("-p", QUESTION, "--system-prompt", RULES, "--tools", ""),
    "opencode": ("run", "--agent", "plain", QUESTION),
    "qwen": ("--bare", "--system-prompt", RULES, "-p", QUESTION),
    "aider": ("--message", QUESTION, *AIDER),
    "continue": ("-p", QUESTION, "--exclude", "*"),
}
WITHOUT_TOOLS = ("claude", "opencode", "aider", "continue")
"""Programs that send no tools with the options above."""
OPENCODE = '{"agent": {"plain": {"mode": "primary", "prompt": "Be brief.", "tools": {"*": false}}}}'
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # Of answers.
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    "QWEN_CODE_MAX_OUTPUT_TOKENS": "64",
    "OPENCODE_EXPERIMENTAL_OUTPUT_TOKEN_MAX": "64",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Serving]:
    """The default pair as it is."""
    with serving_default_pair("--preset", "greedy") as server:
        yield server


@pytest.fixture(scope="module")
def tools_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with default_pair() as (original, draft):
        target = write_tool_template(original, tmp_path_factory.mktemp("tools") / "smollm2")
        with started("--preset", "greedy", "--target", str(target), "--draft", str(draft)) as server:
            yield server


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for programs from registries."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, and a user without settings."""
    for name, value in {**QUIET, "HOME": str(tmp_path / "home"), "LAUNCH_PIPELINE_API_KEY": KEY}.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    work = tmp_path / "work"
    # opencode asks the environment where it is.
    monkeypatch.setenv("PWD", str(work))
    for path in (tmp_path / "home", work):
        path.mkdir()
    (work / "rules.md").write_text(RULES)
    (work / "opencode.json").write_text(OPENCODE)
    subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)
    return work


def _on_path(command: str, fetched: Path) -> str:
    """PATH with the program. Skips the test if no registry has it."""
    if shutil.which(command) is not None:
        return os.environ["PATH"]
    package = PACKAGES[command]
    if command == "aider":
        subprocess.run([sys.executable, "-m", "venv", str(fetched / command)], check=True)
        install, binaries = [str(fetched / command / "bin" / "pip"), "install", "-q", package], "bin"
    else:
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(fetched / command), package]
        binaries = "node_modules/.bin"
    programs = fetched / command / binaries
    if not (programs / command).exists():
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{package} can't be fetched: {done.stderr.strip()[-300:]}")
    return f"{programs}:{os.environ['PATH']}"


def _run(name: str, words: tuple[str, ...], server: Serving, folder: Path, fetched: Path) -> tuple[int, str, str]:
    """Exit code, and what the program wrote. Prints its version."""
    command = "cn" if name == "continue" else name
    environment = {**os.environ, "PATH": _on_path(command, fetched)}
    version = subprocess.run([command, "--version"], env=environment, cwd=folder, capture_output=True, text=True)
    launch = [sys.executable, "-m", "orchestrator.cli.app", "launch", name, "--server", server.url, "--", *words]
    done = subprocess.run(
        launch, env=environment, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )
    print(f"{name}, {version.stdout.strip()}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.returncode, done.stdout, done.stderr


def _answers(server: Serving) -> int:
    """How many generations came to their end or to their limit."""
    counted = re.findall(
        r'launch_pipeline_generations_total{reason="(?:stop|length)"} (\d+)', server.client.get("/metrics").text
    )
    return sum(map(int, counted))


@pytest.mark.parametrize("name", SHORT)
def test_every_program_answers(name: str, tools_pair: Serving, folder: Path, fetched: Path):
    before = _answers(tools_pair)

    code, said, errors = _run(name, SHORT[name], tools_pair, folder, fetched)

    assert (code, bool(said.strip())) == (0, True), errors
    assert _answers(tools_pair) > before
    assert "knows no tools" not in errors


@pytest.mark.parametrize("name", SHORT)
def test_a_template_without_tools_serves_programs_that_send_none_and_tells_the_others(
    name: str, pair: Serving, folder: Path, fetched: Path
):
    code, said, errors = _run(name, SHORT[name], pair, folder, fetched)

    assert ("knows no tools" in errors) == (name != "aider")
    if name in WITHOUT_TOOLS:
        assert (code, bool(said.strip())) == (0, True), errors
    else:
        assert "no tool calls in a format that this server reads" in said + errors


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("codex", (*CODEX, QUESTION), "ran out of room in the model's context window"),
        ("claude", ("-p", QUESTION), "Prompt is too long"),
    ],
)
def test_rules_that_fill_the_context_are_told(
    name: str, words: tuple[str, ...], sentence: str, tools_pair: Serving, folder: Path, fetched: Path
):
    code, said, errors = _run(name, words, tools_pair, folder, fetched)

    assert code != 0
    assert sentence in said + errors
