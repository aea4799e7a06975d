"""Laws of join lines over HTTP: for the server's owner, and with the command that helps the pipeline as it is now."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from orchestrator.http.errors import ApiError
from orchestrator.http.server import Invitations
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation
from tests.support.fake_pipeline import READY, FakePipeline

KEY = "a-key-of-tests"
ALONE = msgspec.structs.replace(READY, context=0)


def invite() -> Invitation:
    return Invitation("lp1:LINE", 600.0)


def create(invitations: Invitations) -> Any:
    return json.loads(bytes(asyncio.run(invitations.create(Request({"type": "http"}))).body))


@pytest.mark.parametrize(("state", "role"), [(READY, "draft"), (ALONE, "target")])
def test_a_machine_is_asked_for_what_is_missing(state: PipelineState, role: str):
    told = create(Invitations(invite, FakePipeline(condition=state), KEY))

    assert told["command"] == f"launch-pipeline attach {role} lp1:LINE"


def refuse() -> Invitation:
    raise PipelineError("The pipeline does not answer.")


@pytest.mark.parametrize(
    ("invitations", "status", "word"),
    [
        (Invitations(None, FakePipeline(), KEY), 404, "--listen"),
        (Invitations(invite, FakePipeline(), None), 403, "workers invite"),
        (Invitations(invite, FakePipeline(condition=None), KEY), 503, "still being loaded"),
        (Invitations(refuse, FakePipeline(), KEY), 503, "does not answer"),
    ],
)
def test_who_gets_no_line_is_told_why(invitations: Invitations, status: int, word: str):
    with pytest.raises(ApiError, match=word) as refused:
        create(invitations)

    assert refused.value.status == status
