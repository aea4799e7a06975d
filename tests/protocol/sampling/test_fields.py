"""Laws of the sampling fields: a processor handles each one, or a reason says why none does."""

from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec import Meta

from protocol.messages.sampling import ModelSampling, RequestedSampling, Sampling, SamplingFields
from protocol.sampling.logits_processors import NOT_PROCESSED, PROCESSORS


def unhandled(struct: type[msgspec.Struct], handled: Iterable[str]) -> set[str]:
    """Fields of `struct` that are not handled, and handled names that are no fields."""
    return set(struct.__struct_fields__) ^ set(handled)


HANDLED = [field for processor in PROCESSORS for field in processor.fields]


def test_a_processor_handles_each_field_or_a_reason_says_why_none_does():
    assert unhandled(Sampling, [*HANDLED, *NOT_PROCESSED]) == set()
    assert all(NOT_PROCESSED.values())


def test_a_field_that_nothing_handles_is_noticed():
    class Longer(Sampling, frozen=True, kw_only=True):
        invented: float = 0.0

    assert unhandled(Longer, [*HANDLED, *NOT_PROCESSED]) == {"invented"}


def test_no_field_is_handled_twice():
    assert len({*HANDLED, *NOT_PROCESSED}) == len([*HANDLED, *NOT_PROCESSED])


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
