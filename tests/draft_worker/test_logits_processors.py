"""Laws of penalties and grammars in the draft: it hits as often as without them. Tiny models."""

import pytest

from draft_worker.engine_interface import Engine
from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.ngram import NgramEngine
from protocol.inference.language_model import LanguageModel
from protocol.messages.grammar import Grammar
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.sampling.grammar import GrammarError, Grammars
from protocol.speculation.token_tree import TokenTree
from tests.support.draft_conversation import ROOT, Conversation
from tests.support.models.tiny_models import VOCABULARY, network
from tests.support.models.tokenizer_files import END, ids, write_tokenizer
from tests.target_worker.test_logits_processors import PROMPT, SAMPLINGS, expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return LanguageModel(network(), write_tokenizer(tmp_path_factory.mktemp("model")))


def started(engine: Engine, sampling: Sampling) -> Conversation:
    plan = BestFirst(width=4, fan=3)
    talk = Conversation(engine, PROMPT, plan, sampling, prompt_tokens=len(PROMPT), eos_tokens=(END,))
    talk.start()
    return talk


def guessed(talk: Conversation) -> list[int]:
    return [node.token for node in talk.best()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_equal_to_the_target_hits_before_and_after_a_verdict(model: LanguageModel, name: str):
    coming = expected(model.folder, SAMPLINGS[name])[0]
    talk = started(MlxEngine(model, "tiny"), SAMPLINGS[name])

    for border in (len(PROMPT), len(PROMPT) + 3):
        talk.grow(6)
        path = guessed(talk)[:4]
        assert len(path) > 2
        assert path == list(coming[border:][: len(path)])
        talk.commit(*coming[border : border + 3], missed=True)


@pytest.mark.parametrize("name", ["grammar", "grammar, hotter", "calls"])
def test_nothing_is_guessed_that_the_grammar_forbids(model: LanguageModel, name: str):
    grammar = SAMPLINGS[name].grammar
    assert grammar is not None
    talk = started(MlxEngine(model, "tiny"), SAMPLINGS[name])
    nodes = [each for reply in talk.grow(8) for each in zip(reply.parents, reply.tokens, strict=True)]

    assert len(nodes) >= 8
    for parent, token in nodes:
        node = talk.tree.get(parent)
        assert node is not None
        path = talk.behind(node)
        if END in path:
            continue
        (mask,) = Grammars(model.folder, VOCABULARY).open(grammar, (END,), path).allowed([()])
        assert mask is not None
        assert mask[token]


def test_forced_tokens_are_published_without_a_forward(model: LanguageModel):
    """After a miss, the root is in the middle of the opening tag of a call."""
    coming = expected(model.folder, SAMPLINGS["calls"])[0]
    talk = started(MlxEngine(model, "tiny"), SAMPLINGS["calls"])

    talk.commit(*coming[len(PROMPT) : len(PROMPT) + 2], missed=True)

    told = guessed(talk)
    assert told == list(ids("all>\n{"))
    assert [node.probability for node in talk.best()] == [1.0] * len(told)
    talk.grow(3)
    assert guessed(talk)[: len(told)] == told
    assert len(guessed(talk)) > len(told)


def test_a_restarted_draft_goes_on_in_the_middle_of_the_grammar(model: LanguageModel):
    coming = expected(model.folder, SAMPLINGS["grammar"])[0]
    talk = started(MlxEngine(model, "tiny"), SAMPLINGS["grammar"])
    for length in (len(PROMPT) + 9, len(PROMPT) + 4):
        talk.tokens, talk.round = [*coming[:length]], length
        talk.tree = TokenTree(ROOT, coming[length - 1], length - 1)
        talk.start()
        talk.grow(6)

        path = guessed(talk)[:4]
        assert path == list(coming[length:][: len(path)])


def test_a_draft_skips_a_grammar_that_it_can_not_enforce(model: LanguageModel):
    bad = Sampling(grammar=Grammar("{"))
    for engine, sampling in (
        (MlxEngine(model, "tiny"), bad),
        (NgramEngine(), SAMPLINGS["grammar"]),
        (MlxEngine(model, "tiny"), Sampling()),
    ):
        assert engine.processors(started(engine, sampling).started()) is None
    with pytest.raises(GrammarError):
        Grammars(model.folder, VOCABULARY).open(Grammar("{"), (END,), ())
    assert started(MlxEngine(model, "tiny"), bad).grow(3)
