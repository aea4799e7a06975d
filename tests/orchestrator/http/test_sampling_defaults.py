"""Laws of the sampling values for requests that name none: the same in every API, and shown where clients look."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.text.chat_template import ChatTemplate
from tests.support.asked_server import BODIES, CODEC, asked, get, post
from tests.support.fake_models import FakeModels

OWN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0}


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    """Of a model that states how to sample."""
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    return ChatTemplate(tmp_path, CODEC)


def sampled(path: str, template: ChatTemplate, sampling: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The sampling values that reach the pipeline."""
    body = {"options": sampling} if path.startswith("/api/") else sampling
    params = asked(path, {**BODIES[path], **body}, template, **settings).params
    return {name: getattr(params, name) for name in OWN}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_s_value_wins_over_the_server_s_and_that_over_the_model_s(path: str, template: ChatTemplate):
    chosen = {"temperature": 0.3, "top_k": 5}

    assert sampled(path, template, {}) == OWN
    assert sampled(path, template, {}, defaults=chosen) == {**OWN, **chosen}
    assert sampled(path, template, {"temperature": 0, "top_p": 1}, defaults=chosen) == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.0,
    }


def test_clients_and_the_page_are_told_what_an_omitted_field_means(template: ChatTemplate):
    told = {**OWN, "temperature": 0.3}
    settings: Any = {"template": template, "defaults": {"temperature": 0.3}}

    (listed,) = get("/v1/models", **settings).json()["data"]
    named = get("/v1/models/demo", **settings).json()
    answer = post("/v1/responses", BODIES["/v1/responses"], **settings).json()

    assert listed["sampling_defaults"] == named["sampling_defaults"] == told
    assert (answer["temperature"], answer["top_p"]) == (0.3, 0.9)


def test_each_of_several_models_has_its_own():
    async def listed(client: Any, _: Any) -> Any:
        return (await client.get("/v1/models")).json()["data"]

    cards = FakeModels().talk(listed, defaults={"top_k": 5})

    # The demo model continues texts, and states nothing.
    assert {json.dumps(card["sampling_defaults"]) for card in cards} == {
        json.dumps({"temperature": 0.0, "top_p": 1.0, "top_k": 5, "min_p": 0.0})
    }
