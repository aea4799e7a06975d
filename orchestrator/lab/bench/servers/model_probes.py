"""Probes of a server with several models, by the names that the server itself gives them."""

from orchestrator.lab.bench.servers.http_requests import PROMPT, Answer, ask, complete, effect
from orchestrator.lab.bench.servers.probes import Probe
from orchestrator.lab.bench.servers.server_process import RunningServer
from orchestrator.lab.bench.servers.stream_probes import at_once


def models() -> dict[str, Probe]:
    return {
        "`/v1/models` has both": _listed,
        "a model that was not loaded yet": _second,
        "requests for both at once": lambda server: at_once(
            server, [{"model": name, "prompt": PROMPT} for name in server.server.models]
        ),
    }


def _listed(server: RunningServer) -> str:
    def both(answer: Answer) -> bool:
        return {each["id"] for each in answer.body["data"]} >= {*server.server.models}

    return effect(ask(server, "/v1/models"), both, "one of them")


def _second(server: RunningServer) -> str:
    """Done if it is loaded, and writes a text of its own."""
    first, second = (complete(server, model=name, max_tokens=64) for name in server.server.models)
    return effect(second, lambda answer: first is not None and first.texts != answer.texts)
