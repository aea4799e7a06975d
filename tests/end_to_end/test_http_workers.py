"""`launch-pipeline serve` with workers of other machines, and before a pipeline that runs already: real processes."""

import json
from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from tests.conftest import Reference
from tests.end_to_end.test_attach import machine
from tests.end_to_end.test_http_serve import COMPLETIONS, PROMPT, SECONDS, Serving
from tests.orchestrator.cli.test_cli import run
from tests.support.processes import until

INVITATION = "/v1/pipeline/invitation"
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
ASKED = {"prompt": PROMPT, "temperature": 1.0, "seed": 5, "max_tokens": 24}


def said(server: Serving) -> str:
    (choice,) = server.post(COMPLETIONS, **ASKED)["choices"]
    return choice["text"]


LACKING = {"draft": ("--draft-engine", "none"), "target": ("--target-engine", "none", "--draft-engine", "ngram")}


@pytest.mark.parametrize("role", ["draft", pytest.param("target", marks=pytest.mark.thorough)])
def test_a_worker_of_another_machine_joins_a_server(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "server"))
    engine = ("--draft-engine", "ngram") if role == "draft" else ()
    with Serving("--listen", "127.0.0.1:0", *LACKING[role]) as server:
        if role == "target":
            until(lambda: "No target has joined yet" in server.client.get("/health").json()["reason"], SECONDS)
            assert server.client.post(COMPLETIONS, json=ASKED).status_code == 503
        else:
            until(lambda: server.health() == "ok", SECONDS)
        told = server.client.post(INVITATION, json={}).json()
        assert server.client.post(INVITATION, json={}, headers={"authorization": "Bearer no"}).status_code == 401
        with machine(tmp_path / "guest", role, told["line"], *engine, "--name", "mac") as guest:
            guest.worker()
            until(lambda: server.health() == "ok", SECONDS)
            until(lambda: "mac" in [each["name"] for each in json.loads(run("workers", "list", "--json")[1])], SECONDS)
            assert said(server) == reference(PROMPT, PARAMS).text
            assert "launch_pipeline" in server.client.get("/metrics").text
    assert told["command"] == f"launch-pipeline attach {role} {told['line']}"
    assert (server.code, server.errors.strip().splitlines()[-1]) == (130, "Interrupted.")
    assert server.errors.count(f"launch-pipeline attach {role} lp1:127.0.0.1:") == 1


@pytest.mark.thorough
def test_a_server_before_a_running_pipeline_leaves_it_running(reference: Reference):
    with Pipeline() as pipeline:
        with Serving("--address", pipeline.address) as server:
            until(lambda: server.health() == "ok", SECONDS)
            assert said(server) == reference(PROMPT, PARAMS).text
            assert server.client.post(INVITATION, json={}).status_code == 404
        assert (server.code, server.errors.strip()) == (130, "Interrupted.")
        assert pipeline.generate(PROMPT, PARAMS).text == reference(PROMPT, PARAMS).text


@pytest.mark.thorough
def test_the_end_of_the_pipeline_ends_the_server_before_it():
    with Pipeline(draft_engine="none") as pipeline:
        server = Serving("--address", pipeline.address)
        until(lambda: server.health() == "ok", SECONDS)
    server.client.close()
    code, _, errors = server.command.end()

    assert code == 1
    assert f"No pipeline answers at {pipeline.address}" in errors
