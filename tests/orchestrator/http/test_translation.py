"""Laws of numbers and switches: what clients write reaches the pipeline as they mean it, or the answer says that it has
no effect."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.sampling import SamplingParams
from orchestrator.http.openai.structured_output import response_grammar
from orchestrator.text.chat_template import ChatTemplate
from tests.orchestrator.http.test_logprobs import generated
from tests.support.asked_server import (
    BODIES,
    CHAT,
    CODEC,
    COMPLETIONS,
    GENERATE,
    HELLO,
    MESSAGES,
    OLLAMA,
    RESPONSES,
    TEMPLATE,
    asked,
    get,
    post,
)
from tests.support.fake_models import FakeModels
from tests.support.fake_pipeline import FakePipeline
from tests.support.models.chat_models import model

ROOM = 200
"""Fewer tokens than the context has left."""


def ask(path: str, template: ChatTemplate = TEMPLATE, **fields: Any) -> tuple[SamplingParams, str, list[str]]:
    """What the pipeline was asked for, the prompt, and the warnings."""
    found = asked(path, {**BODIES[path], **fields}, template)
    return found.params, found.prompt, found.warnings


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [-1, 0, -2, -1.0])
@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
        (OLLAMA, "num_predict"),
    ],
)
def test_a_limit_of_zero_or_less_is_none(path: str, name: str, limit: float):
    fields: dict[str, Any] = {"options": {name: limit}} if path == OLLAMA else {name: limit}
    params, _, warnings = ask(path, **fields)

    assert params.max_tokens is not None
    assert (params.max_tokens > ROOM, warnings) == (True, [])


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "max_tokens": 9}, {}),
        (COMPLETIONS, {"stop": "x", "logit_bias": {"50": -100}}, {"stop": ("x",), "logit_bias": {50: -100.0}}),
        (CHAT, {"frequency_penalty": 0.5, "presence_penalty": -0.5}, {}),
        *((CHAT, fields, {"logprobs": count}) for fields, count in (
            ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": True}, 0),
            ({"logprobs": False, "top_logprobs": 0}, None))),
        *((COMPLETIONS, {"logprobs": count}, {}) for count in (0, 5, None)),
        *((RESPONSES, fields, {"logprobs": count}) for fields, count in (
            ({"top_logprobs": 3}, 3), ({"include": ["message.output_text.logprobs"]}, 0))),
        (CHAT, {"max_tokens": 100.0}, {"max_tokens": 100}),
        (CHAT, {"top_k": 40.0, "n": 1.0, "seed": 7.0}, {"top_k": 40, "seed": 7}),
        (RESPONSES, {"max_output_tokens": 100.0}, {"max_tokens": 100}),
        (MESSAGES, {"max_tokens": 100.0, "top_k": 40.0}, {"max_tokens": 100, "top_k": 40}),
        (CHAT, {"n": 0, "seed": -1}, {"seed": None}),
        (COMPLETIONS, {"n": 0, "seed": -1}, {"seed": None}),
        (RESPONSES, {"seed": -1}, {"seed": None}),
        (MESSAGES, {"seed": -1}, {"seed": None}),
        (OLLAMA, {"options": {"seed": -1, "num_predict": 5, "repeat_penalty": 0}},
         {"seed": None, "max_tokens": 5, "repetition_penalty": 1.0}),
        (OLLAMA, {"options": {"top_k": 40.0, "num_predict": 5.0}}, {"top_k": 40, "max_tokens": 5}),
        (CHAT, {"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        (CHAT, {"repetition_penalty": 0}, {"repetition_penalty": 1.0}),
        (CHAT, {"top_k": -1}, {"top_k": 0}),
        (CHAT, {"top_p": 0}, {"top_p": 1e-6}),
        (COMPLETIONS, {"top_p": 0.0}, {"top_p": 1e-6}),
        (MESSAGES, {"top_p": 0}, {"top_p": 1e-6}),
        (OLLAMA, {"options": {"top_p": 0}}, {"top_p": 1e-6}),
        (COMPLETIONS, {"stop": [str(number) for number in range(70)]}, {"stop": tuple(map(str, range(70)))}),
    ],
)  # fmt: skip
def test_a_number_means_what_clients_mean_by_it(path: str, fields: dict[str, Any], expected: dict[str, Any]):
    """An empty dict: the same."""
    params, _, warnings = ask(path, **fields)

    expected = expected or fields
    assert {name: getattr(params, name) for name in expected} == expected
    assert warnings == []


# Thinking -----------------------------------------------------------------------------------------

OFF = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("path", "fields", "off"),
    [
        (CHAT, {}, False),
        (CHAT, {"enable_thinking": False}, True),
        (CHAT, {"enable_thinking": True}, False),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, True),
        (CHAT, {"reasoning_effort": "none"}, True),
        (CHAT, {"reasoning_effort": "low"}, False),
        (CHAT, {"thinking": {"type": "disabled"}}, True),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, False),
        (CHAT, {"reasoning": {"effort": "none"}}, True),
        (CHAT, {"reasoning": {"enabled": False}}, True),
        (CHAT, {"reasoning": {"effort": "high"}}, False),
        (CHAT, {"think": False}, True),
        (RESPONSES, {"reasoning": {"effort": "none", "summary": "auto"}}, True),
        (MESSAGES, {"thinking": {"type": "disabled"}}, True),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, False),
        (OLLAMA, {"think": False}, True),
        (OLLAMA, {"think": "none"}, True),
        (OLLAMA, {"think": "max"}, False),
        (OLLAMA, {"think": "xhigh"}, False),
    ],
)
def test_thinking_is_switched_by_every_dialect_s_field(
    models: dict[str, ChatTemplate], path: str, fields: dict[str, Any], off: bool
):
    _, prompt, warnings = ask(path, models["qwen"], **fields)

    assert (prompt.endswith(OFF), warnings) == (off, [])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "high"}),
        (RESPONSES, {"reasoning": {"effort": "high"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        (OLLAMA, {"think": True}),
    ],
)
def test_a_model_that_does_not_think_says_so(path: str, fields: dict[str, Any]):
    _, _, (warning,) = ask(path, **fields)

    assert "writes no thinking" in warning


def test_a_template_without_a_switch_for_thinking_says_so(tmp_path_factory: pytest.TempPathFactory):
    always = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"

    _, _, (warning,) = ask(CHAT, model(tmp_path_factory.mktemp("always"), always), enable_thinking=False)

    assert "no switch" in warning


# Tools and forms ----------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FLAT = {"type": "function", "name": "add", "parameters": SCHEMA}
WHOLE = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("choice", "as_openai"),
    [
        ("any", "required"),
        ({"type": "any"}, "required"),
        ({"type": "required"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_a_choice_of_tools_in_another_dialect_s_words_is_the_same(hermes: ChatTemplate, choice: Any, as_openai: Any):
    found = ask(CHAT, hermes, tools=[FLAT], tool_choice=choice, seed=1)

    assert found == ask(CHAT, hermes, tools=[WHOLE], tool_choice=as_openai, seed=1)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_tools_that_another_server_would_run_are_left_out(hermes: ChatTemplate, path: str):
    searching = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    add = {"name": "add", "input_schema": SCHEMA} if path == MESSAGES else FLAT

    _, prompt, (warning,) = ask(path, hermes, tools=[searching, add])

    assert ("web_search" in prompt, '"name": "add"' in prompt) == (False, True)
    assert "'web_search_20250305'" in warning


STRICT = response_grammar({"type": "json_schema", "json_schema": {"schema": SCHEMA}})


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_schema_is_enforced_in_each_form_that_clients_write(path: str, form: Any):
    params, _, warnings = ask(path, response_format=form)

    assert (params.grammar, warnings) == (STRICT, [])


# Without effect -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"verbosity": "low", "prediction": {"type": "content"}}, ["verbosity", "prediction"]),
        *(
            (path, {"xtc_probability": 0.5, "dry_multiplier": 0.8, "typical_p": 0.9}, ["xtc_", "dry_", "typical_p"])
            for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA)
        ),
        (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
        (MESSAGES, {"output_config": {"effort": "low"}}, ["output_config.effort"]),
        (COMPLETIONS, {f"f{place}": 1 for place in range(40)}, ["f31, and 8 more."]),
        (RESPONSES, {"max_tool_calls": 3}, ["max_tool_calls"]),
        (RESPONSES, {"truncation": "auto"}, ["truncation"]),
        (MESSAGES, {"context_management": {"edits": [1]}}, ["context_management"]),
        (OLLAMA, {"options": {"num_ctx": 4096, "mirostat": 1}}, ["options.num_ctx", "options.mirostat"]),
        (CHAT, {"x" * 1000: 1}, ["x" * 64]),
    ],
)
def test_a_field_without_effect_is_told(path: str, fields: dict[str, Any], words: list[str]):
    _, _, (warning,) = ask(path, **fields)
    streamed = post(path, {**BODIES[path], **fields, "stream": True}).text

    assert all(word in warning for word in words)
    assert len(warning) < 250
    assert warning in streamed


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA])
def test_fields_that_ask_for_nothing_are_not_told(path: str):
    idle = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "some_vendor": None}

    assert ask(path, **idle)[2] == []


def test_fields_with_neutral_values_are_accepted():
    none = {"top_logprobs": None, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "stop": None}

    _, _, (warning,) = ask(CHAT, **none, frequency_penalty=0, logprobs=False, n=None, some_vendor={"of": "theirs"})

    assert "some_vendor" in warning


def test_no_body_can_write_the_warnings():
    assert ask(CHAT, notes=[["kind", "text"]])[2] == []


# Sampling values for requests that name none ------------------------------------------------------

OWN = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0}


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    """Of a model that states how to sample."""
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    return ChatTemplate(tmp_path, CODEC)


def sampled(path: str, template: ChatTemplate, sampling: dict[str, Any], **settings: Any) -> dict[str, Any]:
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


# Ollama's log-probabilities -----------------------------------------------------------------------


@pytest.mark.parametrize(("path", "raw"), [(GENERATE, {}), (GENERATE, {"raw": True})])
@pytest.mark.parametrize("stream", [False, True])
def test_ollama_tells_log_probabilities(path: str, raw: dict[str, Any], stream: bool):
    texts, result = generated((), 1)
    pipeline = FakePipeline(lambda _: [piece.text for piece in texts], result=result)
    question = {**BODIES[path], **raw, "stream": stream, "logprobs": True, "top_logprobs": 3}

    answer = post(path, question, pipeline)

    assert pipeline.asked[0][1].logprobs == 3
    if not stream:
        expected = post(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 3}, pipeline).json()
        assert answer.json()["logprobs"] == expected["choices"][0]["logprobs"]["content"]
    assert all(json.loads(line)["model"] == "demo" for line in answer.text.splitlines())
