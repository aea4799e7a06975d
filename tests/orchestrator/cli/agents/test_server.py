"""Laws of what a program must know of a server, asked of our own server with a scripted pipeline."""

import asyncio
from typing import Literal

import msgspec
import pytest

from orchestrator.cli.commands.launch.server import HttpServer, http_server
from protocol.errors import InputError, PipelineError
from tests.support.fake_models import FakeModels
from tests.support.fake_pipeline import READY, FakePipeline
from tests.support.http_server import KEY, ListeningServer, listening, running


def _asked(server: ListeningServer, key: str | None = KEY) -> HttpServer:
    return http_server("http://{}:{}/v1/".format(*server.address), key)


def test_a_server_tells_its_models_their_context_and_whether_they_know_tools(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with listening(names=("owner/model", "other")) as listener:
        server = _asked(listener)

        assert (server.state(), server.ready()) == ("ok", True)
        assert server.models() == ["owner/model", "other"]
        assert server.context("owner/model") == READY.context
        # The demo target's folder has no chat template.
        assert not server.knows_tools("other")


def test_a_server_that_loads_is_not_ready():
    with listening(FakePipeline(condition=None)) as listener:
        assert not _asked(listener).ready()


def test_a_failed_server_says_why():
    failed = msgspec.structs.replace(READY, failure="no memory")
    with listening(FakePipeline(condition=failed)) as listener, pytest.raises(PipelineError, match="no memory"):
        _asked(listener).ready()


class _LongLoad(asyncio.Event):
    async def wait(self) -> Literal[True]:
        await asyncio.sleep(0.3)
        return True


def test_one_of_several_models_is_loaded_before_it_is_asked_for_its_context(monkeypatch: pytest.MonkeyPatch):
    """Whether it knows tools is an answer that waits longer than others."""
    monkeypatch.setattr("orchestrator.cli.commands.launch.server._ANSWER_SECONDS", 0.2)
    models = FakeModels(held={"big": _LongLoad()}, failures={"other": "There is no such folder."})
    with running(models.listener()) as listener:
        server = _asked(listener)
        assert (server.models()[0], server.context("big")) == ("big", None)

        assert not server.knows_tools("big")

        assert server.context("big") == READY.context
        with pytest.raises(PipelineError, match=r"can't serve other\. The model other can't be loaded\. There is no"):
            server.knows_tools("other")


@pytest.mark.parametrize("key", [None, "wrong-key"])
def test_a_wrong_key_is_told(key: str | None):
    with listening() as listener, pytest.raises(InputError, match="refuses this key"):
        _asked(listener, key).models()


def test_no_server_is_told():
    with listening() as listener:
        server = _asked(listener)

    with pytest.raises(PipelineError, match="No server answers at http"):
        server.models()


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "tcp://127.0.0.1:5570", "http://", "http://a/v1/models"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(InputError, match="no address of a server"):
        http_server(url, None)
