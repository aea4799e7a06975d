"""A trained drafter as a Core ML package in real processes: it gets live features, and changes no token."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_model

from draft_worker.drafters.eagle3 import Eagle3, write_eagle3
from orchestrator import Pipeline, SamplingParams
from orchestrator.core.events import Arrived
from orchestrator.runtime.recording import replay
from protocol.contracts.coreml.conversion import Choices
from protocol.contracts.drafters.description import Eagle3Form
from protocol.messages.worker import Grow, Verdict
from tests.conftest import Reference
from tests.support.models.drafter_packages import converted
from tests.support.paths import DEMO_TARGET
from tests.support.processes import generate_while, mark, remains, shoot, until

TEXT = "def quicksort(items):\n    return "
GREEDY, HOT = SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=2)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that guesses the root's own token: its layer adds nothing, and its state is the target's last one of
    the token before the root."""
    root = tmp_path_factory.mktemp("drafter")
    target: Any = load_model(DEMO_TARGET)[0]
    arguments = target.args
    width, last = arguments.hidden_size, arguments.num_hidden_layers - 1
    form = Eagle3Form(
        outputs=(0, last),
        width=width,
        inner=width,
        heads=arguments.num_attention_heads,
        kv_heads=arguments.num_attention_heads,
        head_width=width // arguments.num_attention_heads,
        vocabulary=arguments.vocab_size,
        head_size=arguments.vocab_size,
        output_width=width,
        own_head=False,
    )
    network = Eagle3(form)
    network.update(tree_map(mx.zeros_like, network.parameters()))
    network.fc.weight = mx.concatenate([mx.zeros((width, width)), mx.eye(width)], axis=1)
    network.norm.weight = target.model.norm.weight.astype(mx.float32)
    write_eagle3(root / "drafter", network, mx.float32)
    converted(root / "drafter", DEMO_TARGET, root / "package", Choices(widths=(1, 4), context=128))
    return root / "package"


def roots_and_guesses(journal: Path) -> list[tuple[int, int]]:
    """Of the last request: the token of each root whose features had all come, and the first guess behind it."""
    messages = [event.message for event, _ in replay(journal) if isinstance(event, Arrived)]
    verdicts = [each for each in messages if isinstance(each, Verdict)]
    last = verdicts[-1].sequence
    bonus = {each.round + 1: each.bonus for each in verdicts if each.sequence == last}
    grown = [each for each in messages if isinstance(each, Grow) and each.sequence == last and each.tokens]
    found: dict[int, tuple[int, int]] = {}
    for each in grown:
        if each.staleness == 0 and each.round in bonus:
            found.setdefault(each.round, (bonus[each.round], each.tokens[0]))
    return list(found.values())


def drafted(pipeline: Pipeline, journal: Path, params: SamplingParams) -> tuple[list[int], float]:
    """The text of the first request for which the draft, busy or just started, was in time in ten rounds; and the
    share of its guesses that were the root."""

    def asked() -> tuple[list[int], list[tuple[int, int]]] | None:
        result = pipeline.generate(TEXT, params)
        pairs = roots_and_guesses(journal)
        return (list(result.tokens), pairs) if len(pairs) >= 10 else None

    tokens, pairs = until(asked)
    return tokens, sum(root == guess for root, guess in pairs) / len(pairs)


@pytest.mark.thorough
def test_the_package_reads_the_live_features_of_its_own_tokens_and_tokens_are_the_target_s(
    package: Path, reference: Reference, tmp_path: Path
):
    journal = tmp_path / "journal"
    with Pipeline(str(DEMO_TARGET), str(package), strategy="sd", draft_tokens=1, record=str(journal)) as pipeline:
        name = mark(pipeline)
        (greedy, right), (hot, often) = (drafted(pipeline, journal, params) for params in (GREEDY, HOT))

    assert [greedy, hot] == [list(reference(TEXT, params).tokens) for params in (GREEDY, HOT)]
    # Without noise the target's own state tells the root; fp16 may exchange near tokens.
    assert right >= 0.9
    assert often >= 0.3
    assert remains(name) == []


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["draft_worker", "target_worker"])
def test_after_a_death_features_go_on_and_the_text_is_the_target_s(
    package: Path, reference: Reference, tmp_path: Path, program: str
):
    journal, params = tmp_path / "journal", SamplingParams(max_tokens=120)
    with Pipeline(str(DEMO_TARGET), str(package), strategy="sd", draft_tokens=1, record=str(journal)) as pipeline:
        name = mark(pipeline)
        result = generate_while(pipeline, TEXT, params, 5, lambda: shoot(pipeline, program))
        again, right = drafted(pipeline, journal, params)

    assert list(result.tokens) == again == list(reference(TEXT, params).tokens)
    assert right >= 0.9
    assert remains(name) == []
