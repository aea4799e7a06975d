"""Laws of penalties and grammars in the draft: it hits as often as without them. Tiny models."""

import pytest

from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.ngram import NgramEngine
from draft_worker.worker import DraftWorker
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.grammar import Grammar
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Reroot, Start
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.speculation.token_tree import Node, TokenTree, node_id
from tests.draft_worker.test_engines import grow, path_of
from tests.support.models.tiny_models import VOCABULARY, network
from tests.support.models.tokenizer_files import END, ids, write_tokenizer
from tests.target_worker.test_logits_processors import PROMPT, ROOT, SAMPLINGS, expected

ONE = RequestId(1)
PLAN = BestFirst(width=4, fan=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return LanguageModel(network(), write_tokenizer(tmp_path_factory.mktemp("model")))


def start(sampling: Sampling, tokens: tuple[int, ...] = PROMPT, round: int = 0) -> Start:
    return Start(ONE, round, tokens, ROOT, sampling, PLAN, prompt_tokens=len(PROMPT), eos_tokens=(END,))


def main_path(tree: TokenTree) -> list[Node]:
    path = [tree.root]
    while path[-1].children:
        path.append(max(path[-1].children.values(), key=lambda child: child.probability))
    return path[1:]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_equal_to_the_target_hits_before_and_after_a_verdict(model: LanguageModel, name: str):
    coming = expected(model.folder, SAMPLINGS[name])[0]
    worker = DraftWorker(MlxEngine(model, "tiny"), lambda: 0.0)
    list(worker.handle(start(SAMPLINGS[name])))
    tree = TokenTree(ROOT, PROMPT[-1], len(PROMPT) - 1)
    grow(worker, tree, 6)

    for border in (len(PROMPT), len(PROMPT) + 3):
        path = [node.token for node in main_path(tree)][:4]
        assert len(path) > 2
        assert path == list(coming[border:][: len(path)])
        if border == len(PROMPT):
            tree = rerooted(worker, coming[border : border + 3])


def rerooted(worker: DraftWorker, tokens: tuple[int, ...], steps: int = 6) -> TokenTree:
    """The draft's tree behind `tokens`, from its messages after the re-root alone."""
    root = ROOT
    for token in tokens:
        root = node_id(root, token)
    position = len(PROMPT) - 1
    tree = TokenTree(root, tokens[-1], position + len(tokens))
    replies = list(worker.handle(Reroot(ONE, 1, position, tokens, root, missed=True)))
    for reply in replies:
        assert isinstance(reply, Grow)
        for parent, token, probability in zip(reply.parents, reply.tokens, reply.probabilities, strict=True):
            node = tree.get(parent)
            assert node is not None
            tree.add(node, token, probability)
    grow(worker, tree, steps)
    return tree


@pytest.mark.parametrize("name", ["grammar", "grammar, hotter", "calls"])
def test_nothing_is_guessed_that_the_grammar_forbids(model: LanguageModel, name: str):
    grammar = SAMPLINGS[name].grammar
    assert grammar is not None
    worker = DraftWorker(MlxEngine(model, "tiny"), lambda: 0.0)
    list(worker.handle(start(SAMPLINGS[name])))
    tree = TokenTree(ROOT, PROMPT[-1], len(PROMPT) - 1)
    nodes = [each for reply in grow(worker, tree, 8) for each in zip(reply.parents, reply.tokens, strict=True)]

    assert len(nodes) >= 8
    for parent, token in nodes:
        node = tree.get(parent)
        assert node is not None
        path = path_of(node)
        if END in path:
            continue
        (mask,) = Grammars(model.folder, VOCABULARY).open(grammar, (END,), path).allowed([()])
        assert mask is not None
        assert mask[token]


def test_forced_tokens_are_published_without_a_forward(model: LanguageModel):
    """After a miss, the root is in the middle of the opening tag of a call."""
    coming = expected(model.folder, SAMPLINGS["calls"])[0]
    worker = DraftWorker(MlxEngine(model, "tiny"), lambda: 0.0)
    list(worker.handle(start(SAMPLINGS["calls"])))

    tree = rerooted(worker, coming[len(PROMPT) : len(PROMPT) + 2], steps=0)

    told = [node.token for node in main_path(tree)]
    assert told == list(ids("all>\n{"))
    assert [node.probability for node in main_path(tree)] == [1.0] * len(told)
    grow(worker, tree, 3)
    assert [node.token for node in main_path(tree)][: len(told)] == told
    assert len(main_path(tree)) > len(told)


def test_a_restarted_draft_goes_on_in_the_middle_of_the_grammar(model: LanguageModel):
    coming = expected(model.folder, SAMPLINGS["grammar"])[0]
    worker = DraftWorker(MlxEngine(model, "tiny"), lambda: 0.0)
    for length in (len(PROMPT) + 9, len(PROMPT) + 4):
        list(worker.handle(start(SAMPLINGS["grammar"], coming[:length], length)))
        tree = TokenTree(ROOT, coming[length - 1], length - 1)
        grow(worker, tree, 6)

        path = [node.token for node in main_path(tree)][:4]
        assert path == list(coming[length:][: len(path)])


def test_a_draft_skips_a_grammar_that_it_can_not_enforce(model: LanguageModel):
    bad = start(Sampling(grammar=Grammar("{")))

    assert MlxEngine(model, "tiny").processors(bad) is None
    assert NgramEngine().processors(start(SAMPLINGS["grammar"])) is None
    assert MlxEngine(model, "tiny").processors(start(Sampling())) is None
    with pytest.raises(GrammarError):
        Grammars(model.folder, VOCABULARY).open(Grammar("{"), (END,), ())
    worker = DraftWorker(MlxEngine(model, "tiny"), lambda: 0.0)
    list(worker.handle(bad))
    tree = TokenTree(ROOT, PROMPT[-1], len(PROMPT) - 1)
    assert grow(worker, tree, 3)
