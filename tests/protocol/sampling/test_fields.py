"""Laws of the sampling fields: a processor handles each one, or a reason says why none does."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import Meta

from protocol.messages.grammar import Grammar, Thought
from protocol.messages.sampling import ModelSampling, RequestedSampling, Sampling, SamplingFields
from protocol.sampling.logits_processors import PROCESSORS

UNPROCESSED = {
    "temperature": "divides the processed logits",
    "seed": "chooses the noise",
    "logprobs": "reports the model's own logits",
    "prompt_logprobs": "reports logits of the prompt",
}
HANDLED: dict[str, dict[str, Any]] = {
    "frequency_penalty": {},
    "presence_penalty": {},
    "grammar": {"grammar": Grammar("{}")},
    "closed_thought": {"closed_thought": Thought(((1,),), (2,))},
    "logit_bias": {"logit_bias": ((1, 1.0),)},
    "repetition_penalty": {},
    "repetition_context": {"repetition_penalty": 0.5},
    "top_k": {"top_k": 3},
    "top_p": {},
    "min_p": {},
}
"""What a request asks for with which one processor handles the field; else half of everything."""


def test_a_processor_handles_each_field_or_a_reason_says_why_none_does():
    assert {*HANDLED, *UNPROCESSED} == set(Sampling.__struct_fields__)
    assert not HANDLED.keys() & UNPROCESSED.keys()


@pytest.mark.parametrize("field", HANDLED)
def test_one_processor_handles_a_field(field: str):
    sampling = Sampling(temperature=1.0, **(HANDLED[field] or {field: 0.5}))

    assert sum(processor.wanted(sampling) for processor in PROCESSORS) == 1


@pytest.mark.parametrize("processor", PROCESSORS)
def test_default_sampling_wants_no_processor(processor):
    assert not processor.wanted(Sampling(temperature=1.0))


def ranges(hint: Any) -> Iterator[Meta]:
    for each in get_args(hint):
        if isinstance(each, Meta):
            yield each
        else:
            yield from ranges(each)


def test_each_number_states_its_range():
    hints = get_type_hints(Sampling, include_extras=True)
    limits = {name: meta for name in SamplingFields.__struct_fields__ for meta in ranges(hints[name])}

    assert len(limits) >= 8
    for name, meta in limits.items():
        assert (meta.ge, meta.gt) != (None, None), name
        assert (meta.le, meta.lt) != (None, None), name


@pytest.mark.parametrize(("given", "meant"), [(1e-38, 0.0), (1e-300, 0.0), (9e-7, 0.0), (1e-6, 1e-6), (0.7, 0.7)])
def test_a_temperature_that_would_make_logits_infinite_means_the_most_probable_token(given: float, meant: float):
    sampling = RequestedSampling(temperature=given).resolved(ModelSampling(temperature=1.0))

    assert (sampling.temperature, sampling.greedy) == (meant, meant == 0)
