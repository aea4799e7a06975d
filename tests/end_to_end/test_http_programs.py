"""Programs of others against a running server, each in an environment of its own:
`bin/test -m slow tests/end_to_end/test_http_programs.py`.

They are fetched from PyPI and npm on first use and stay in pytest's cache (1.2 GB; `pytest --cache-clear` removes
them). Texts come from the default pair as it is. Calls come from its weights with a template that knows tools.
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_http_serve import KEY, Serving
from tests.support.default_pair import default_pair, serving_default_pair, serving_tools_pair
from tests.support.fetched_programs import path_with, python_with
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPTS = ROOT / "tests" / "support" / "programs"
TOOLS_MODEL = "smollm2"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Serving]:
    """The default pair as it is."""
    with serving_default_pair("--preset", "greedy") as server:
        yield server


@pytest.fixture(scope="module")
def tools_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tools") / TOOLS_MODEL
    with serving_tools_pair(folder, "--preset", "greedy") as server:
        yield server


@pytest.fixture(scope="module")
def fetched(pytestconfig: pytest.Config) -> Path:
    """A folder for programs from registries, which later runs use too."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("programs")


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without settings."""
    for name, value in {**QUIET, "HOME": str(tmp_path), "PROMPTFOO_CONFIG_DIR": str(tmp_path / "promptfoo")}.items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


def _model(server: Serving) -> str:
    return server.client.get("/v1/models").json()["data"][0]["id"]


def _run(words: Sequence[str], folder: Path, **environment: str) -> str:
    """What a program wrote to stdout. Prints its seconds."""
    begun = time.monotonic()
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(f"{time.monotonic() - begun:.0f} s, exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pointed_at(server: Serving) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": KEY}


def _asked(script: str, packages: Sequence[str], server: Serving, fetched: Path, folder: Path) -> dict[str, Any]:
    """The object that a script printed. Its environment is named like its first package, whose version is printed."""
    name = packages[0].partition("[")[0]
    python = str(python_with(packages, fetched / name))
    _run([python, "-c", f"from importlib.metadata import version; print('{name}', version('{name}'))"], folder)
    return json.loads(_run([python, str(SCRIPTS / script), TOOLS_MODEL], folder, **_pointed_at(server)))


def _is_city(form: dict[str, Any]) -> bool:
    return isinstance(form["name"], str) and isinstance(form["country"], str)


def test_pydantic_ai_fills_a_form_and_calls_a_tool(tools_pair: Serving, fetched: Path, tmp_path: Path):
    told = _asked("ask_pydantic_ai.py", ["pydantic-ai-slim[openai]"], tools_pair, fetched, tmp_path)

    for api, answer in told.items():
        assert _is_city(answer["form"]), api
        assert _is_city(answer["called"]), api
        assert len(answer["asked"]) == 1, api
        assert answer["parts"] == ["user-prompt", "tool-call", "tool-return", "tool-call", "tool-return"], api


def test_instructor_fills_a_form_in_its_modes(tools_pair: Serving, fetched: Path, tmp_path: Path):
    told = _asked("ask_instructor.py", ["instructor"], tools_pair, fetched, tmp_path)

    assert set(told) == {"TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "streamed"}
    for mode, form in told.items():
        assert _is_city(form), mode
        assert isinstance(form["capital"], bool), mode
    assert told["streamed"] == told["JSON_SCHEMA"]


def test_openai_agents_calls_a_tool_and_fills_a_form(tools_pair: Serving, fetched: Path, tmp_path: Path):
    told = _asked("ask_openai_agents.py", ["openai-agents"], tools_pair, fetched, tmp_path)

    for api, answer in told.items():
        assert len(answer["asked"]) == 1, api
        assert answer["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"], api
        assert answer["said"].strip(), api
        assert _is_city(answer["form"]), api


def _inspected(task: str, server: Serving, fetched: Path, folder: Path) -> dict[str, Any]:
    """inspect-ai's log of a task."""
    words = ["inspect", "eval", f"{SCRIPTS / 'inspect_tasks.py'}@{task}", "--model"]
    words += [f"openai-api/local/{_model(server)}", "--max-tokens", "40", "--display", "plain"]
    words += ["--log-format", "json", "--log-dir", str(folder / "logs")]
    pointed = {"LOCAL_BASE_URL": f"{server.url}/v1", "LOCAL_API_KEY": KEY}
    _run(words, folder, PATH=path_with("inspect", fetched), **pointed)
    (log,) = (folder / "logs").glob("*.json")
    told = json.loads(log.read_text())
    print(f"inspect-ai {told['eval']['packages']['inspect_ai']}")
    assert told["status"] == "success"
    return told


def test_inspect_ai_scores_texts(pair: Serving, fetched: Path, tmp_path: Path):
    told = _inspected("capitals", pair, fetched, tmp_path)

    answers = [(sample["messages"][-1]["content"], sample["target"]) for sample in told["samples"]]
    right = [target in answer for answer, target in answers]
    assert any(right), answers
    assert told["results"]["scores"][0]["metrics"]["accuracy"]["value"] == sum(right) / len(right)
    (usage,) = told["stats"]["model_usage"].values()
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


def test_inspect_ai_runs_a_tool(tools_pair: Serving, fetched: Path, tmp_path: Path):
    (sample,) = _inspected("calls", tools_pair, fetched, tmp_path)["samples"]

    question, call, result = sample["messages"]
    assert [message["role"] for message in (question, call, result)] == ["user", "assistant", "tool"]
    assert [each["function"] for each in call["tool_calls"]] == ["capital"]
    assert result["content"] == "Paris"


def _promptfoo(pair: Serving, tools_pair: Serving) -> dict[str, Any]:
    """An evaluation of a text, of a form and of a call."""
    schema = {
        "type": "object",
        "properties": {"country": {"type": "string"}},
        "required": ["country"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    tools = [{"type": "function", "function": {"name": "capital", "parameters": schema}}]
    settings: dict[str, tuple[Serving, dict[str, Any], dict[str, Any]]] = {
        "text": (pair, {}, {"type": "contains", "value": "Paris"}),
        "form": (pair, {"response_format": form}, {"type": "is-json", "value": schema}),
        "call": (tools_pair, {"tools": tools, "tool_choice": "required"}, {"type": "is-valid-openai-tools-call"}),
    }
    providers, tests = [], []
    for label, (server, options, claim) in settings.items():
        config = {"apiBaseUrl": f"{server.url}/v1", "max_tokens": 60, **options}
        providers.append({"id": f"openai:chat:{_model(server)}", "label": label, "config": config})
        tests.append({"vars": {"country": "France"}, "providers": [label], "assert": [claim]})
    return {"prompts": ["What is the capital of {{country}}?"], "providers": providers, "tests": tests}


def test_promptfoo_claims_hold(pair: Serving, tools_pair: Serving, fetched: Path, tmp_path: Path):
    path = path_with("promptfoo", fetched)
    (tmp_path / "claims.json").write_text(json.dumps(_promptfoo(pair, tools_pair)))
    words = ["promptfoo", "eval", "-c", "claims.json", "-o", "told.json"]
    words += ["--no-cache", "--no-table", "--no-progress-bar"]

    _run(["promptfoo", "--version"], tmp_path, PATH=path)
    _run(words, tmp_path, PATH=path, OPENAI_API_KEY=KEY)

    told = json.loads((tmp_path / "told.json").read_text())["results"]
    figures = told["stats"]
    assert [figures[name] for name in ("successes", "failures", "errors")] == [3, 0, 0]
    assert [result["score"] for result in told["results"]] == [1, 1, 1]
    assert figures["tokenUsage"]["total"] == figures["tokenUsage"]["prompt"] + figures["tokenUsage"]["completion"] > 0


def test_guidellm_measures_without_errors(pair: Serving, fetched: Path, tmp_path: Path):
    path = path_with("guidellm", fetched)
    with default_pair() as (target, _):
        tokenizer = f"kind=hf_auto,model={target}"
    backend = f"kind=openai_http,target={pair.url},model={_model(pair)},api_key={KEY}"
    words = ["guidellm", "run", "--backend", backend, "--tokenizer", tokenizer, "--disable-progress"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=12"]
    words += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]

    _run(["guidellm", "--version"], tmp_path, PATH=path)
    _run([*words, "--output", "kind=json,path=told.json"], tmp_path, PATH=path)

    (told,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    assert told["metrics"]["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert told["metrics"]["output_tokens_per_second"]["successful"]["mean"] > 0
