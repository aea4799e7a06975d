"""Laws of the draft engines: candidates depend only on the path, and a draft equal to the target always hits."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.ngram import NgramEngine
from draft_worker.worker import DraftWorker
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow
from protocol.sampling.gumbel_noise import Noise, scores
from protocol.speculation.token_tree import TokenTree
from tests.support.draft_conversation import Conversation, grows
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.models.tiny_models import VOCABULARY, stock_logits, tree_model
from tests.support.paths import DEMO_DRAFT
from tests.support.processing import processed

PROMPT = tuple(random.Random(3).randrange(VOCABULARY) for _ in range(24))
COUPLED = Sampling(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tree_model("llama", seed=5)


@pytest.fixture(scope="module")
def engine(model: LanguageModel) -> MlxEngine:
    return MlxEngine(model, "tiny")


def grown(engine: MlxEngine, sampling: Sampling, plan: GrowthPlan, steps: int) -> Conversation:
    talk = Conversation(engine, PROMPT, plan, sampling)
    talk.start()
    talk.grow(steps)
    return talk


def target_choice(model: LanguageModel, tokens: list[int], sampling: Sampling) -> int:
    """The token that the target samples behind `tokens`, by a stock forward."""
    logits = processed(stock_logits(model.network, tokens)[None], sampling, tokens)
    return int(np.argmax(scores(logits, [len(tokens)], sampling, Noise(model.vocabulary))))


# MLX -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED, Sampling(temperature=0.7, seed=2, repetition_penalty=1.3)])
@pytest.mark.parametrize("plan", [BestFirst(3, 3), Chain(6), FanOut(2, (1, 1, 2))])
def test_a_draft_equal_to_the_target_always_hits(
    model: LanguageModel, engine: MlxEngine, sampling: Sampling, plan: GrowthPlan
):
    talk = grown(engine, sampling, plan, steps=6)
    parents = [node for node in talk.tree if node.children]

    assert len(parents) >= 3
    for node in parents:
        main = node.main_child
        assert main is not None
        assert main.token == target_choice(model, [*PROMPT, *talk.behind(node)], sampling)


def test_trees_grown_together_are_those_that_grow_alone(engine: MlxEngine):
    plan, prompts = BestFirst(3, 3), [PROMPT, PROMPT[:9], PROMPT[4:]]
    together = DraftWorker(engine, lambda: 0.0)
    talks = [
        Conversation(together, prompt, plan, sampling, RequestId(id))
        for id, (prompt, sampling) in enumerate(zip(prompts, [Sampling(), COUPLED, COUPLED], strict=True))
    ]
    for talk in talks:
        talk.start()
    replies: list[Grow] = []
    while len(replies) < 12:
        replies += grows(together.work())

    for talk in talks:
        mine = [reply for reply in replies if reply.request == talk.id]
        talk.worker = DraftWorker(engine, lambda: 0.0)
        talk.start()
        alone = talk.grow(len(mine))
        assert [(reply.parents, reply.tokens) for reply in mine] == [(reply.parents, reply.tokens) for reply in alone]
        np.testing.assert_allclose(mine[-1].probabilities, alone[-1].probabilities, rtol=1e-3)
    assert sum(reply.forward_nodes > reply.evaluated for reply in replies) >= 9, "most steps grew three trees"


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED])
def test_growth_after_a_random_walk_equals_that_of_a_new_start(engine: MlxEngine, sampling: Sampling):
    assert_growth_after_a_walk_equals_that_of_a_new_start(engine, sampling)


_KINDS = ["gemma3_text", "qwen3_next", "lfm2", "rwkv7", "gpt2", "deepseek_v41"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in _KINDS else pytest.mark.slow)
        for name in sorted(set(modules()) - set(IMPOSSIBLE) - set(UNSTABLE))
    ],
)
def test_a_draft_of_any_architecture_grows_after_a_walk_as_a_new_one(architecture: str):
    engine = MlxEngine(LanguageModel(tiny(architecture)), "tiny")

    assert_growth_after_a_walk_equals_that_of_a_new_start(engine, COUPLED)


def assert_growth_after_a_walk_equals_that_of_a_new_start(engine: MlxEngine, sampling: Sampling) -> None:
    source = random.Random(9)
    walker = grown(engine, sampling, BestFirst(4, 3), 0)
    for _ in range(24):
        walker.grow(source.randrange(4))
        step = [
            source.choice([*walker.tree.root.children]) if walker.tree.root.children else source.randrange(VOCABULARY),
            *(source.randrange(VOCABULARY) for _ in range(source.choice([0, 0, 1, 3]))),
        ]
        assert walker.commit(*step) == []
    walker.grow(12)
    fresh = Conversation(engine, walker.tokens, walker.plan, sampling)
    fresh.tell(walker.started())
    fresh.round, fresh.tree = walker.round, TokenTree(walker.root, walker.tokens[-1], len(walker.tokens) - 1)
    fresh.grow(12)

    both = [(node, fresh.tree.get(node.id)) for node in walker.tree]
    compared = [(one, other) for one, other in both if other is not None and one.children and other.children]
    assert len(compared) >= 4
    for one, other in compared:
        assert one.main_child is not None
        assert other.main_child is not None
        assert one.main_child.token == other.main_child.token
        for token in one.children.keys() & other.children.keys():
            assert one.children[token].probability == pytest.approx(other.children[token].probability, abs=1e-4)


# N-grams -------------------------------------------------------------------------------------------


def test_prompt_lookup_continues_a_repeated_text_and_learns_what_was_accepted():
    repeated, talk = (
        Conversation(NgramEngine(), prompt, BestFirst(1, 2)) for prompt in ((5, 6, 7, 8, 9, 5, 6, 7), (1, 2, 3))
    )
    for each in (repeated, talk):
        each.start()
    repeated.grow(4)
    talk.grow(1)
    talk.commit(9, 1, 2, 3)
    talk.grow(2)

    assert [node.token for node in repeated.tree.main_chain()][:4] == [8, 9, 5, 6]
    assert [node.token for node in talk.tree.main_chain()][:2] == [9, 1]


def test_prompt_lookup_takes_its_vocabulary_from_a_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 321}))
    (tmp_path / "tokenizer.json").write_bytes((DEMO_DRAFT / "tokenizer.json").read_bytes())
    engine = NgramEngine(tmp_path)

    assert engine.vocabulary == 321
    assert engine.tokenizer == NgramEngine(DEMO_DRAFT).tokenizer != ""


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"vocab_size": -4}', '{"vocab_size": "many"}'])
def test_prompt_lookup_refuses_a_folder_without_a_vocabulary(tmp_path: Path, config: str):
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(InputError, match=r"complete model|download the model again"):
        NgramEngine(tmp_path)
