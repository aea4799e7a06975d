"""Laws of the acceptance process, of recorded runs, and of replaying them."""

from itertools import pairwise
from statistics import mean

import hypothesis.strategies as st
import pytest
from hypothesis import given

from orchestrator.core.options import Options, StrategyName
from orchestrator.lab.simulate.acceptance import AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.devices import Devices
from orchestrator.lab.simulate.trace import RecordedRequest, ReplayedLanguage, TracedPosition, fit, read_trace
from orchestrator.lab.simulate.workers import modelled_pipeline
from orchestrator.runtime.recording import Journal
from protocol.errors import InputError
from protocol.messages.base import NodeId
from protocol.worker.pacing import DevicePace

TARGET = DevicePace(steps=((1, 0.050), (16, 0.060)), prefill_rate=1000.0)
DRAFT = DevicePace(steps=((1, 0.004), (8, 0.005)), prefill_rate=2000.0)
DEVICES = Devices(target=TARGET, draft=DRAFT, baseline_draft=DRAFT)


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


@pytest.mark.parametrize(
    "law",
    [
        AcceptanceModel(accept=0.8, exponent=1.2, spread=2.0, claim_slope=1.5, claim_shift=-0.3),
        AcceptanceModel(accept=0.5, exponent=0.6, spread=1.0, passage=3),
    ],
)
def test_a_fit_finds_the_law_that_made_the_run(law):
    language = ModelledLanguage(law, seed=8)
    positions = (
        TracedPosition(language.token(1, at), language.candidates(1, NodeId(at), at, True, 8)) for at in range(3000)
    )
    found = fit([RecordedRequest((1,), 0.0, tuple(positions))])

    assert found.accept == pytest.approx(law.accept, abs=0.03)
    assert found.exponent == pytest.approx(law.exponent, rel=0.2)
    assert found.spread == pytest.approx(law.spread, rel=0.2)
    assert found.claim_slope == pytest.approx(law.claim_slope, rel=0.2)
    assert found.claim_shift == pytest.approx(law.claim_shift, abs=0.25)
    assert found.passage == law.passage


def recorded_run(path, strategy: StrategyName = "adaptive", temperature=0.0):
    """Two requests of an invented language, recorded like real runs."""
    language = ModelledLanguage(AcceptanceModel(accept=0.75, spread=1.5), seed=6, prompt_tokens=20)
    simulation = modelled_pipeline(Options(strategy=strategy), language, DEVICES, kept=None)
    for request in (1, 2):
        simulation.submit(request, 200, temperature)
        simulation.run()
    write(path, simulation)
    return language, simulation


def write(path, simulation):
    journal = Journal(str(path))
    for now, event, _ in simulation.history:
        journal.write(event, now)
    journal.close()


@pytest.mark.thorough
def test_a_recorded_run_returns_the_guesses_and_the_tokens(tmp_path):
    language, simulation = recorded_run(tmp_path / "run.jsonl", temperature=1.0)
    recorded = read_trace(tmp_path / "run.jsonl")

    assert [one.prompt for one in recorded] == [language.prompt(1), language.prompt(2)]
    assert [one.temperature for one in recorded] == [1.0, 1.0]
    assert [[position.token for position in one.positions] for one in recorded] == [
        client.tokens for client in simulation.clients.values()
    ]
    for request, one in zip((1, 2), recorded, strict=True):
        for at, position in enumerate(one.positions, start=20):
            if position.candidates is not None:
                guessed = language.candidates(request, NodeId(0), at, True, Options().draft_fan)
                assert claims_and_truth(position.candidates, position.token) == claims_and_truth(
                    guessed, position.token
                )


def claims_and_truth(candidates, truth):
    """Without the names of the wrong tokens, which depend on the node."""
    return [*candidates.probabilities], [token == truth for token in candidates.tokens]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["sd", "ssd", "adaptive"])
def test_a_replay_is_as_fast_as_the_run_it_replays(tmp_path, strategy):
    recorded_run(tmp_path / "run.jsonl")
    _, original = recorded_run(tmp_path / "other.jsonl", strategy)
    recorded = read_trace(tmp_path / "run.jsonl")
    replayed = modelled_pipeline(Options(strategy=strategy), ReplayedLanguage(recorded), DEVICES)
    for request in range(len(recorded)):
        replayed.submit(request, 200)
        replayed.run()

    assert [one.tokens for one in replayed.clients.values()] == [one.tokens for one in original.clients.values()]
    assert replayed.now == pytest.approx(original.now, rel=0.05)


def test_guesses_by_prompt_lookup_are_read_too(tmp_path):
    """Repeated text is guessed without the draft, and those tokens are in no Grow message."""

    class Repeating(ModelledLanguage):
        def token(self, request, position):
            return position % 7

    path = tmp_path / "run.jsonl"
    language = Repeating(AcceptanceModel(accept=0.05), prompt_tokens=20)
    simulation = modelled_pipeline(Options(), language, DEVICES, kept=None)
    client = simulation.clients[simulation.submit(1, 120)]
    simulation.run()
    write(path, simulation)

    assert client.statistics is not None
    assert client.statistics.tokens_per_round > 1.5
    assert [position.token for position in read_trace(path)[0].positions] == client.reference


@pytest.mark.parametrize("content", [b"", b"nonsense\n", b'[1, "Tick", {}]\n', b'[1, "Unheard", {}]\n', b"\xff\xfe\n"])
def test_a_file_that_is_no_recorded_run_is_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "run.jsonl").write_bytes(content)

    with pytest.raises(InputError, match="record"):
        read_trace(tmp_path / "run.jsonl")


def test_a_run_without_a_draft_is_refused_in_a_sentence(tmp_path):
    recorded_run(tmp_path / "run.jsonl", strategy="ar")

    with pytest.raises(InputError, match="guesses of a draft"):
        read_trace(tmp_path / "run.jsonl")
