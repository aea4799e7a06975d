"""Laws of the acceptance process."""

from itertools import pairwise
from statistics import mean

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from protocol.messages.base import NodeId


def ranks(language, count, limit=16):
    """Rank of the target's token among the guesses, by position; None if it was not among them."""
    for position in range(count):
        tokens = language.candidates(1, NodeId(position), position, True, limit).tokens
        truth = language.token(1, position)
        yield tokens.index(truth) + 1 if truth in tokens else None


@given(
    accept=st.floats(0.0, 1.0),
    exponent=st.floats(0.05, 8.0),
    slope=st.floats(0.1, 4.0),
    shift=st.floats(-30.0, 30.0),
)
def test_claims_are_probabilities_that_fall(accept, exponent, slope, shift):
    law = AcceptanceModel(accept=accept, exponent=exponent, claim_slope=slope, claim_shift=shift)
    claims = law.claims(accept, 12)

    assert all(0.0 <= claim <= 1.0 for claim in claims)
    assert all(before >= after - 1e-12 for before, after in pairwise(claims))
    assert sum(claims) <= 1.0 + 1e-9


@given(accept=st.floats(0.01, 0.99), spread=st.floats(0.0, 4.0))
def test_positions_differ_around_the_mean(accept, spread):
    kinds = AcceptanceModel(accept=accept, spread=spread).by_difficulty()

    assert mean(kinds) == pytest.approx(accept, abs=1e-6)
    assert kinds == sorted(kinds)


@pytest.mark.parametrize("exponent", [0.7, 1.5])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_guesses_are_right_as_often_as_they_claim(exponent, spread):
    language = ModelledLanguage(AcceptanceModel(accept=0.6, exponent=exponent, spread=spread), seed=4)
    claims = [language.candidates(1, NodeId(position), position, True, 4).probabilities for position in range(4000)]
    found = list(ranks(language, 4000, limit=4))

    for rank in range(1, 5):
        claimed = mean(claimed[rank - 1] for claimed in claims)
        assert mean(one == rank for one in found) == pytest.approx(claimed, abs=0.025)


@pytest.mark.parametrize(("accept", "expected"), [(0.0, {None}), (1.0, {1})])
def test_the_extremes_are_exact(accept, expected):
    assert set(ranks(ModelledLanguage(AcceptanceModel(accept=accept)), 500)) == expected


def test_the_same_path_has_the_same_guesses():
    one, other = (ModelledLanguage(AcceptanceModel(accept=0.5, spread=1.0), seed=2) for _ in range(2))
    asked = [(3, NodeId(node), 40 + node, node % 2 == 0, 5) for node in range(50)]

    backwards = [other.candidates(*question) for question in reversed(asked)]
    assert [one.candidates(*question) for question in asked] == backwards[::-1]


def test_off_the_targets_path_no_guess_is_its_token():
    language = ModelledLanguage(AcceptanceModel(accept=0.9))
    candidates = [language.candidates(1, NodeId(node), node, False, 8) for node in range(200)]

    assert not any(language.token(1, node) in found.tokens for node, found in enumerate(candidates))
