"""Laws of the draft engines: candidates depend only on the path, and a draft equal to the target always hits."""

import json
import random
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.ngram import NgramEngine
from draft_worker.worker import DraftWorker
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import NodeId, RequestId
from protocol.messages.plans import BestFirst, Chain, FanOut, GrowthPlan
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Reroot, Start
from protocol.sampling.gumbel_noise import Noise, scores
from protocol.speculation.token_tree import Node, TokenTree, node_id
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.models.tiny_models import VOCABULARY, network, stock_logits, tree_model
from tests.support.paths import DEMO_DRAFT
from tests.support.processing import processed

DEMO = DEMO_DRAFT
ONE, ROOT = RequestId(1), NodeId(7)
PROMPT = tuple(random.Random(3).randrange(VOCABULARY) for _ in range(24))
COUPLED, REJECTION = Sampling(temperature=1.0, seed=11), Sampling(temperature=1.0, seed=11, verification="rejection")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tree_model("llama", seed=5)


@pytest.fixture(scope="module")
def engine(model: LanguageModel) -> MlxEngine:
    return MlxEngine(model, "tiny")


def drafting(
    engine: MlxEngine | NgramEngine, sampling: Sampling, plan: GrowthPlan, prompt: tuple[int, ...]
) -> DraftWorker:
    worker = DraftWorker(engine, lambda: 0.0)
    list(worker.handle(Start(ONE, 0, prompt, ROOT, sampling, plan)))
    return worker


def grow(worker: DraftWorker, tree: TokenTree, steps: int) -> list[Grow]:
    """Prefill, then at most `steps` growth steps. Adds the published nodes to `tree`."""
    replies: list[Grow] = []
    while worker.has_work and len(replies) < steps:
        replies += [reply for reply in worker.work() if isinstance(reply, Grow)]
    for reply in replies:
        for parent, token, probability in zip(reply.parents, reply.tokens, reply.probabilities, strict=True):
            node = tree.get(parent)
            assert node is not None
            tree.add(node, token, probability)
    return replies


def grown(engine: MlxEngine | NgramEngine, sampling: Sampling, plan: GrowthPlan, steps: int) -> TokenTree:
    tree = TokenTree(ROOT, PROMPT[-1], len(PROMPT) - 1)
    grow(drafting(engine, sampling, plan, PROMPT), tree, steps)
    return tree


def path_of(node: Node) -> list[int]:
    return [] if node.parent is None else [*path_of(node.parent), node.token]


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
    tree = grown(engine, sampling, plan, steps=6)
    parents = [node for node in tree if node.children]

    assert len(parents) >= 3
    for node in parents:
        main = node.main_child
        assert main is not None
        assert main.token == target_choice(model, [*PROMPT, *path_of(node)], sampling)


@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(), COUPLED])
def test_in_half_precision_it_hits_and_grows_alike_in_any_order_too(sampling: Sampling, kind: mx.Dtype):
    stock = network("llama", seed=5)
    stock.set_dtype(kind)
    made = LanguageModel(stock)
    engine = MlxEngine(made, "tiny")

    test_a_draft_equal_to_the_target_always_hits(made, engine, sampling, BestFirst(3, 3))
    test_trees_grown_together_are_those_that_grow_alone(engine)
    assert_growth_after_a_walk_equals_that_of_a_new_start(engine, sampling)


def test_trees_grown_together_are_those_that_grow_alone(engine: MlxEngine):
    plan, prompts = BestFirst(3, 3), [PROMPT, PROMPT[:9], PROMPT[4:]]
    starts = [
        Start(RequestId(id), 0, prompt, ROOT, sampling, plan)
        for id, (prompt, sampling) in enumerate(zip(prompts, [Sampling(), COUPLED, REJECTION], strict=True))
    ]
    together = DraftWorker(engine, lambda: 0.0)
    for start in starts:
        list(together.handle(start))
    replies: list[Grow] = []
    while len(replies) < 12:
        replies += [reply for reply in together.work() if isinstance(reply, Grow)]

    for start in starts:
        worker = DraftWorker(engine, lambda: 0.0)
        list(worker.handle(start))
        alone: list[Grow] = []
        mine = [reply for reply in replies if reply.request == start.request]
        while len(alone) < len(mine):
            alone += [reply for reply in worker.work() if isinstance(reply, Grow)]
        assert [(reply.parents, reply.tokens) for reply in mine] == [(reply.parents, reply.tokens) for reply in alone]
        np.testing.assert_allclose(mine[-1].probabilities, alone[-1].probabilities, rtol=1e-3)
    assert sum(reply.forward_nodes > reply.evaluated for reply in replies) >= 9, "most steps grew three trees"


@pytest.mark.parametrize("sampling", [Sampling(), COUPLED, REJECTION])
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
    plan, tokens, root = BestFirst(4, 3), list(PROMPT), ROOT
    tree = TokenTree(ROOT, tokens[-1], len(tokens) - 1)
    walker = drafting(engine, sampling, plan, PROMPT)
    for round in range(1, 25):
        grow(walker, tree, source.randrange(4))
        step = [
            source.choice([*tree.root.children]) if tree.root.children else source.randrange(VOCABULARY),
            *(source.randrange(VOCABULARY) for _ in range(source.choice([0, 0, 1, 3]))),
        ]
        position = tree.root.depth
        for token in step:
            root = node_id(root, token)
        tree.advance(step)
        tokens += step
        assert list(walker.handle(Reroot(ONE, round, position, tuple(step), root, False))) == []
    grow(walker, tree, 12)
    fresh_tree = TokenTree(root, tokens[-1], len(tokens) - 1)
    fresh = DraftWorker(engine, lambda: 0.0)
    list(fresh.handle(Start(ONE, 24, tuple(tokens), root, sampling, plan)))
    grow(fresh, fresh_tree, 12)

    both = [(node, fresh_tree.get(node.id)) for node in tree]
    compared = [(one, other) for one, other in both if other is not None and one.children and other.children]
    assert len(compared) >= 4
    for one, other in compared:
        assert one.main_child is not None
        assert other.main_child is not None
        assert one.main_child.token == other.main_child.token
        for token in one.children.keys() & other.children.keys():
            assert one.children[token].probability == pytest.approx(other.children[token].probability, abs=1e-4)


def test_rejection_growth_states_what_its_main_children_were_drawn_from(engine: MlxEngine):
    tree = TokenTree(ROOT, PROMPT[-1], len(PROMPT) - 1)
    replies = grow(drafting(engine, REJECTION, Chain(3), PROMPT), tree, 3)
    stated = {each.node: each for reply in replies for each in reply.distributions}

    assert len(stated) == 3
    for node, child in pairwise([tree.root, *tree.main_chain()]):
        assert child.token in stated[node.id].tokens


# N-grams -------------------------------------------------------------------------------------------


def test_prompt_lookup_continues_a_repeated_text():
    prompt = (5, 6, 7, 8, 9, 5, 6, 7)
    tree = TokenTree(ROOT, prompt[-1], len(prompt) - 1)
    grow(drafting(NgramEngine(), Sampling(), BestFirst(1, 2), prompt), tree, 4)

    assert [node.token for node in tree.main_chain()][:4] == [8, 9, 5, 6]


def test_prompt_lookup_learns_what_was_accepted():
    prompt = (1, 2, 3)
    worker = drafting(NgramEngine(), Sampling(), BestFirst(1, 2), prompt)
    tree = TokenTree(ROOT, 3, 2)
    grow(worker, tree, 1)
    tokens = (9, 1, 2, 3)
    root = ROOT
    for token in tokens:
        root = node_id(root, token)
    tree.advance(tokens)
    list(worker.handle(Reroot(ONE, 1, 2, tokens, root, False)))
    grow(worker, tree, 2)

    assert [node.token for node in tree.main_chain()][:2] == [9, 1]


def test_prompt_lookup_takes_its_vocabulary_from_a_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 321}))
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    engine = NgramEngine(tmp_path)

    assert engine.vocabulary == 321
    assert engine.tokenizer == NgramEngine(DEMO).tokenizer != ""


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"vocab_size": -4}', '{"vocab_size": "many"}'])
def test_prompt_lookup_refuses_a_folder_without_a_vocabulary(tmp_path: Path, config: str):
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(InputError, match=r"complete model|download the model again"):
        NgramEngine(tmp_path)
