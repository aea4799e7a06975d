"""The programs of `launch-pipeline launch` themselves, non-interactively:
`bin/test -m slow tests/end_to_end/test_agents.py`.

A program that is not installed is fetched from its registry into a folder of the test, and so is a Node for it. The
default target's context has room for 8,192 tokens, and its chat template knows no tools. So the programs run with a
template that does, and with short rules and few tools where they have an option for that. With all their rules and
tools they run with a random model that has a longer context.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.test_http_serve import KEY, Serving, started
from tests.support.default_pair import default_pair, serving_default_pair, serving_tools_pair
from tests.support.fetched_programs import path_with
from tests.support.models.long_context import write_long_context
from tests.support.models.tool_template import write_tool_template

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
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
FULL = (
    ("codex", (*CODEX, QUESTION), 4_000),
    ("claude", ("-p", QUESTION), 4_000),
    ("opencode", ("run", QUESTION), 4_000),
    ("qwen", ("-p", QUESTION), 4_000),
    ("continue", ("-p", QUESTION), 1_200),
)
"""The programs that can also do with less, and tokens that only all their rules and tools fill."""
SAMPLING = ("--preset", "greedy", "--repetition-penalty", "1.3")
"""Without a penalty the default pair repeats a sentence until its limit, and Claude Code then asks it to go on."""
OPENCODE = '{"agent": {"plain": {"mode": "primary", "prompt": "Be brief.", "tools": {"*": false}}}}'
QUIET = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    # Of answers. Claude Code ends with an error where an answer reaches the limit.
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024",
    "QWEN_CODE_MAX_OUTPUT_TOKENS": "64",
    "OPENCODE_EXPERIMENTAL_OUTPUT_TOKEN_MAX": "64",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Serving]:
    """The default pair as it is."""
    with serving_default_pair(*SAMPLING) as server:
        yield server


@pytest.fixture(scope="module")
def tools_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_tools_pair(tmp_path_factory.mktemp("tools") / "smollm2", *SAMPLING) as server:
        yield server


@pytest.fixture(scope="module")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A random model that has room for all rules and tools. It is its own draft."""
    folder = tmp_path_factory.mktemp("long")
    with default_pair() as (original, _):
        target = str(write_long_context(write_tool_template(original, folder / "tools"), folder / "random"))
        with started("--target", target, "--draft", target) as server:
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


def _run(name: str, words: tuple[str, ...], server: Serving, folder: Path, fetched: Path) -> tuple[int, str, str]:
    """Exit code, and what the program wrote. Prints its version."""
    command = "cn" if name == "continue" else name
    environment = {**os.environ, "PATH": path_with(command, fetched)}
    version = subprocess.run([command, "--version"], env=environment, cwd=folder, capture_output=True, text=True)
    launch = [sys.executable, "-m", "orchestrator.cli.app", "launch", name, "--server", server.url, "--", *words]
    done = subprocess.run(
        launch, env=environment, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )
    print(f"{name}, {version.stdout.strip()}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.returncode, done.stdout, done.stderr


def _answers(server: Serving) -> int:
    """How many generations came to their end or to their limit."""
    return _counted(server, 'launch_pipeline_generations_total{reason="(?:stop|length)"}')


def _prompts(server: Serving) -> int:
    """Tokens of all prompts."""
    return _counted(server, 'launch_pipeline_tokens_total{kind="prompt"}')


def _counted(server: Serving, metric: str) -> int:
    return sum(map(int, re.findall(rf"^{metric} (\d+)", server.client.get("/metrics").text, re.MULTILINE)))


@pytest.mark.parametrize("name", SHORT)
def test_every_program_answers(name: str, tools_pair: Serving, folder: Path, fetched: Path):
    before = _answers(tools_pair)

    code, said, errors = _run(name, SHORT[name], tools_pair, folder, fetched)

    assert (code, bool(said.strip())) == (0, True), errors
    assert _answers(tools_pair) > before
    assert "knows none" not in errors


@pytest.mark.parametrize(("name", "words", "tokens"), FULL)
def test_every_program_answers_with_all_its_rules_and_tools(
    name: str, words: tuple[str, ...], tokens: int, random_target: Serving, folder: Path, fetched: Path
):
    answers, prompts = _answers(random_target), _prompts(random_target)

    code, _, errors = _run(name, words, random_target, folder, fetched)

    print(f"{_prompts(random_target) - prompts} tokens of prompts, {_answers(random_target) - answers} answers")
    assert code == 0, errors
    assert _answers(random_target) > answers
    assert _prompts(random_target) - prompts > tokens


@pytest.mark.parametrize("name", SHORT)
def test_a_template_without_tools_serves_aider_alone(name: str, pair: Serving, folder: Path, fetched: Path):
    code, said, errors = _run(name, SHORT[name], pair, folder, fetched)

    assert ("knows none" in errors) == (name != "aider")
    assert (code, bool(said.strip())) == ((0, True) if name == "aider" else (2, False)), errors


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
