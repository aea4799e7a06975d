"""Laws of the surfaces that take sampling fields: each has every field, or says by name why not."""

from collections.abc import Iterable, Mapping
from typing import Any

import click
import msgspec
import pytest

from orchestrator.api.sampling import NOT_PRESET, PRESETS, UNFILTERED, SamplingParams
from orchestrator.cli.sampling_options import NOT_OPTIONS, sampling_options, server_defaults, server_options
from orchestrator.http.anthropic import MessagesRequest
from orchestrator.http.openai.request import (
    BODY_NAMES,
    NOT_IN_BODIES,
    ONLY_OF_COMPLETIONS,
    SHARED_NAMES,
    ChatRequest,
    CompletionRequest,
)
from orchestrator.http.responses.request import Response
from protocol.errors import InputError
from protocol.messages.sampling import ModelSampling, Sampling, SamplingFields

FIELDS = set(SamplingFields.__struct_fields__)
NOT_SHARED = {**NOT_IN_BODIES, **ONLY_OF_COMPLETIONS}


def options(decorate) -> dict[str, click.Option]:
    @click.command()
    @decorate
    def command(**given) -> None: ...

    return {option.name: option for option in command.params if isinstance(option, click.Option) and option.name}


SURFACES: dict[str, tuple[Iterable[str], Mapping[str, str]]] = {
    "command line": (options(sampling_options), NOT_OPTIONS),
    "server's options": (options(server_options), NOT_PRESET),
    "chat completions": (ChatRequest.__struct_fields__, NOT_IN_BODIES),
    "completions": (CompletionRequest.__struct_fields__, NOT_IN_BODIES),
    "responses": (Response.SAME, NOT_SHARED),
    "messages": (MessagesRequest.SAME, NOT_SHARED),
    **{f"preset {name}": (values, NOT_PRESET) for name, values in PRESETS.items()},
}
DECLARED = {"logprobs"}
"""Fields that a surface excludes from derivation and may declare in its own form."""


@pytest.mark.parametrize("surface", SURFACES)
def test_a_surface_has_each_field_or_a_reason_why_not(surface: str):
    names, reasons = SURFACES[surface]

    assert FIELDS - set(names) <= reasons.keys() <= FIELDS
    assert reasons.keys() & set(names) <= DECLARED
    assert all(reasons.values())


def test_programs_can_set_every_field_of_the_wire():
    assert set(Sampling.__struct_fields__) <= set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_in_python(name: str):
    params = SamplingParams.preset(name, max_tokens=7, top_k=3)

    assert params == SamplingParams(**{**PRESETS[name], "top_k": 3, "max_tokens": 7})


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="choose from default, greedy"):
        SamplingParams.preset("wild")


@pytest.mark.parametrize("field", msgspec.structs.fields(SamplingFields), ids=lambda field: field.name)
def test_every_field_reaches_the_message_with_its_value(field: msgspec.structs.FieldInfo):
    values: dict[str, Any] = {"repetition_context": 7, "logprobs": 3, "top_k": 3}
    value = values.get(field.name, 0.5)

    sent = msgspec.structs.replace(SamplingParams(), **{field.name: value}).submit("", "text").sampling

    assert getattr(sent, field.name) == value != field.default


@pytest.mark.parametrize("decorate", [sampling_options, server_options])
def test_options_start_from_the_defaults_of_the_fields_and_leave_the_model_its_own(decorate):
    known = options(decorate)

    for field in msgspec.structs.fields(SamplingFields):
        assert field.name not in known or known[field.name].default == field.default
    assert all(known[name].default is None for name in ModelSampling.__struct_fields__)


CLOSING = {"": None, "--preset greedy": "close", "--preset greedy --reasoning-eos keep": "keep"}


@pytest.mark.parametrize("words", CLOSING)
def test_a_server_with_a_preset_closes_thoughts(words: str):
    @click.command()
    @server_options
    def command(**given: Any) -> Any:
        return server_defaults(given).get("reasoning_eos")

    assert command.main(words.split(), standalone_mode=False) == CLOSING[words]


def test_what_a_request_leaves_open_is_the_model_s_and_what_it_names_is_its_own():
    own = ModelSampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    asked = SamplingParams(temperature=0.0, top_k=0, max_tokens=9).submit("", "text").sampling

    sampling = asked.resolved(own)

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.9, 0, 0.1)
    assert {name: getattr(sampling, name) for name in FIELDS} == {
        **{name: getattr(asked, name) for name in FIELDS},
        "top_p": 0.9,
        "min_p": 0.1,
    }


def test_measurements_use_nothing_of_the_model_s_own():
    asked = SamplingParams(temperature=0.7, **UNFILTERED, seed=1).submit("", "text").sampling

    assert asked.resolved(ModelSampling(top_p=0.9, top_k=20, min_p=0.1)) == Sampling(temperature=0.7, seed=1)


def test_the_server_and_its_presets_set_the_same_fields():
    assert {frozenset(values) for values in PRESETS.values()} == {
        frozenset(options(server_options)) - {"preset", "reasoning_eos"}
    }
    assert set(SHARED_NAMES) <= set(BODY_NAMES)
