"""A table of successors in a pipeline: right ones save rounds, and tokens that a target lacks are never verified."""

from array import array
from itertools import pairwise

import pytest

from orchestrator.core.machine import Machine
from orchestrator.core.options import Options
from orchestrator.lab.simulate.acceptance import VOCABULARY, AcceptanceModel, ModelledLanguage
from orchestrator.lab.simulate.simulation import Simulation
from orchestrator.lab.simulate.workers import modelled_workers
from protocol.speculation.successors import ANY, CERTAIN, Successors
from tests.support.scripted_simulation import DEVICES

_TOKENS = 40


@pytest.mark.parametrize("wrong", [None, VOCABULARY, 1 << 31, CERTAIN])
def test_a_table_s_guesses_are_the_targets_tokens_or_none(wrong: int | None):
    language = ModelledLanguage(AcceptanceModel(accept=0.5), seed=3)
    text = [*language.prompt(0), *(language.token(0, len(language.prompt(0)) + place) for place in range(_TOKENS))]
    following = dict(pairwise(text))
    rows = [(ANY, last, following[last] if wrong is None else wrong, CERTAIN) for last in sorted(following)]
    simulation = Simulation(Options(), language, modelled_workers(language, DEVICES))
    simulation.machine = Machine(
        Options(), successors=Successors(array("I", [entry for row in rows for entry in row]).tobytes())
    )
    simulation.start("target")
    simulation.submit(0, _TOKENS)
    simulation.run()

    (client,) = simulation.clients.values()
    assert client.tokens == client.reference
    assert client.statistics is not None
    assert (client.statistics.lookup_tokens > _TOKENS / 2) is (wrong is None)
