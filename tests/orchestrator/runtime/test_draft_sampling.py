"""Laws of what the draft draws with: a distribution of its own only where rejection sampling makes up for it."""

import pytest

from orchestrator.api.sampling import SamplingParams
from orchestrator.runtime.request_state import draft_sampling
from protocol.errors import InputError
from protocol.messages.sampling import ModelSampling, RequestedSampling

REJECTION = {"temperature": 1.0, "top_p": 0.9, "verification": "rejection", "seed": 1}


def drawn(**params):
    submit = SamplingParams(**params).submit("r", "x")
    sampling = draft_sampling(submit, submit.sampling.resolved(ModelSampling()))
    return sampling and (sampling.temperature, sampling.top_p)


def test_each_value_that_is_not_given_is_the_target_s():
    assert drawn(**REJECTION, draft_temperature=0.5) == (0.5, 0.9)
    assert drawn(**REJECTION, draft_top_p=0.5) == (1.0, 0.5)
    assert drawn(**REJECTION, draft_temperature=0.0, draft_top_p=1.0) == (0.0, 1.0)
    assert drawn(**REJECTION) is None


@pytest.mark.parametrize("other", [{"temperature": 0.0}, {"verification": "coupled"}], ids=str)
def test_a_draft_that_guesses_the_target_s_own_choice_has_the_target_s_values(other):
    assert drawn(**{**REJECTION, **other}, draft_temperature=0.5, draft_top_p=0.5) is None


@pytest.mark.parametrize("wrong", [{"draft_temperature": -1.0}, {"draft_top_p": 0.0}], ids=str)
def test_a_value_out_of_range_is_refused_by_its_name(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} must be a number"):
        drawn(**wrong)


@pytest.mark.parametrize(("given", "meant"), [(1e-38, 0.0), (1e-300, 0.0), (9e-7, 0.0), (1e-6, 1e-6), (0.7, 0.7)])
def test_a_temperature_that_would_make_logits_infinite_means_the_most_probable_token(given: float, meant: float):
    sampling = RequestedSampling(temperature=given).resolved(ModelSampling(temperature=1.0))

    assert (sampling.temperature, sampling.greedy) == (meant, meant == 0)
