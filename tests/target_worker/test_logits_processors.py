"""Laws of penalties, grammars and log-probabilities in the target: for every proposal and restart, the tokens are those
of a plain loop over stock mlx-lm; a text that ends by itself fits the schema. Tiny models."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from llguidance import LLParserLimits

from protocol.inference.language_model import LanguageModel
from protocol.messages.base import RequestId
from protocol.messages.grammar import Calls, Grammar, Json, Thought
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.messages.worker import Fault, Forest, Start, Verdict, Verify
from protocol.sampling.grammar import Grammars
from protocol.sampling.gumbel_noise import Noise, scores
from tests.support.models.tiny_models import VOCABULARY, network, stock_logits
from tests.support.models.tokenizer_files import END, ids, text, write_tokenizer
from tests.support.processing import processed
from tests.support.target_requests import ROOT, Request, answers, start, target

PROMPT = ids('say {"a": 1}')
GENERATED = 28
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yy"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(json.dumps(SCHEMA))
FORM = (Json(GRAMMAR.schema), "\n</call>")
CALL = Grammar("", Calls((FORM,), start=("<call>\n",), separator=("\n",), repeats=True))
PERHAPS = Grammar("", Calls((FORM,), start=(7, "\n"), optional=True, letters="<call>"))
THOUGHT = Thought((ids("<"),), ids("]"), opened=True, budget=7)
CLOSED = Thought((ids("<"),), ids("]"), opened=True, again=True)
SAMPLINGS = {
    "penalties": Sampling(frequency_penalty=0.7, presence_penalty=-0.4),
    "penalties, hot": Sampling(temperature=1.0, seed=4, frequency_penalty=-1.5, presence_penalty=2.0, top_p=0.9),
    "grammar": Sampling(grammar=GRAMMAR),
    "grammar, hot": Sampling(temperature=1.0, seed=5, grammar=GRAMMAR, top_k=7),
    "grammar, hotter": Sampling(temperature=1.5, seed=6, grammar=GRAMMAR, min_p=0.05),
    "calls": Sampling(temperature=1.0, seed=7, grammar=CALL),
    "optional calls": Sampling(temperature=1.0, seed=11, grammar=PERHAPS, logit_bias=((7, 6.0),)),
    "thought": Sampling(temperature=1.0, seed=9, grammar=Grammar(GRAMMAR.schema, thought=THOUGHT)),
    "thought, then anything": Sampling(temperature=1.5, seed=10, grammar=Grammar("", thought=THOUGHT)),
    "closed thought": Sampling(closed_thought=CLOSED, logit_bias=((END, 1.5),)),
    "closed thought, hot": Sampling(temperature=1.5, seed=12, closed_thought=CLOSED, logit_bias=((END, 4.0),)),
    "closed thought, then a form": Sampling(
        temperature=1.0,
        seed=13,
        grammar=Grammar(GRAMMAR.schema, thought=msgspec.structs.replace(THOUGHT, budget=None)),
        closed_thought=msgspec.structs.replace(CLOSED, again=False),
        logit_bias=((END, 8.0),),
    ),
    "everything": Sampling(
        temperature=0.9,
        seed=8,
        grammar=GRAMMAR,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias=((3, 5.0), (40, -2.0)),
        top_p=0.95,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return LanguageModel(network(), write_tokenizer(tmp_path_factory.mktemp("model")))


@cache
def expected(folder: Path, sampling: Sampling) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and their log-probabilities, one by one through stock mlx-lm."""
    stock, noise, tokens, logs = network(), Noise(VOCABULARY), list(PROMPT), []
    grammars = Grammars(folder, VOCABULARY)
    while len(tokens) < len(PROMPT) + GENERATED and tokens[-1] != END:
        bare = np.array(stock_logits(stock, tokens).astype(mx.float32))
        logits = bare.copy()
        for token, count in Counter(tokens[len(PROMPT) :]).items():
            logits[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
        if sampling.closed_thought is not None:
            logits[END] += dict(sampling.logit_bias)[END]
            if close_at_an_end(tokens[len(PROMPT) :], sampling.closed_thought.again):
                (close,), heat = CLOSED.end, sampling.temperature or 0.01
                logits[close], logits[END] = heat * np.logaddexp(*(logits[[close, END]] / heat)), -np.inf
        if sampling.grammar is not None:
            (mask,) = grammars.open(sampling.grammar, (END,), tokens[len(PROMPT) :]).allowed([()])
            assert mask is not None
            logits[~mask] = -np.inf
        done = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "grammar": None}
        if sampling.closed_thought is not None:
            done |= {"closed_thought": None, "logit_bias": ()}
        rest = msgspec.structs.replace(sampling, **done)
        row = scores(processed(mx.array(logits)[None], rest, tokens), [len(tokens)], sampling, noise)
        tokens.append(int(mx.argmax(row)))
        logs.append(float(bare[tokens[-1]] - np.logaddexp.reduce(bare)))
    return tuple(tokens), tuple(logs)


def close_at_an_end(said: Sequence[int], again: bool) -> bool:
    """Whether a thought of CLOSED is open behind the generated tokens."""
    ((start,),), (close,) = CLOSED.starts, CLOSED.end
    inside = True
    for token in said:
        inside = token != close if inside else again and token == start
    return inside


def begin(sampling: Sampling, tokens: Sequence[int] = PROMPT, request: int = 1) -> Start:
    return start(tokens, sampling, request, prompt_tokens=len(PROMPT), eos_tokens=(END,))


class Asking(Request):
    """One request in a worker. Its trees have right and wrong tokens."""

    def __init__(self, model: LanguageModel, sampling: Sampling, seed: int, tokens: Sequence[int] = PROMPT) -> None:
        self.source = random.Random(seed)
        self.coming = expected(model.folder, sampling)[0]
        self.told: list[TokenLogprob] = []
        super().__init__(target(model), begin(sampling, tokens))

    def tree(self) -> tuple[list[int], list[int]]:
        """The right path of a random length with random children, or no tree."""
        path = self.coming[len(self.tokens) :][: self.source.randrange(6)]
        tokens, parents = list(path), list(range(len(path)))
        for _ in range(self.source.randrange(7)):
            parent = self.source.randrange(len(tokens) + 1)
            token = self.source.randrange(VOCABULARY)
            if (token, parent) not in zip(tokens, parents, strict=True):
                tokens.append(token)
                parents.append(parent)
        return tokens, parents

    def decoded(self, length: int) -> tuple[int, ...]:
        """Decode up to `length` tokens or an end token."""
        while len(self.tokens) < length and END not in self.tokens[len(PROMPT) :]:
            self.told += self.step(*self.tree()).token_logprobs
        ended = self.tokens.index(END) + 1 if END in self.tokens else length
        return tuple(self.tokens[: min(ended, length)])


def properly(tokens: Sequence[int]) -> None:
    """The text parses and fits the schema."""
    value = json.loads(text(tokens))
    assert value.keys() == SCHEMA["properties"].keys()
    assert value["a"] in range(100)
    assert value["b"] in ("x", "yy")
    assert len(value["c"]) <= 2
    assert {True, False} >= set(value["c"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_tokens_do_not_depend_on_what_is_proposed(model: LanguageModel, name: str):
    tokens, _ = expected(model.folder, SAMPLINGS[name])

    for seed in range(2):
        assert Asking(model, SAMPLINGS[name], seed).decoded(len(tokens)) == tokens


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_tokens_do_not_depend_on_a_restart_in_the_middle(model: LanguageModel, name: str):
    tokens, _ = expected(model.folder, SAMPLINGS[name])
    for border in (len(PROMPT) + 9, len(tokens) - 3):
        assert Asking(model, SAMPLINGS[name], border, tokens[:border]).decoded(len(tokens)) == tokens


@pytest.mark.parametrize(("name", "count"), [("penalties, hot", 0), ("grammar, hot", 20)])
def test_log_probabilities_are_the_model_s_own_of_every_token_that_leaves(model: LanguageModel, name: str, count: int):
    sampling = msgspec.structs.replace(SAMPLINGS[name], logprobs=count)
    tokens, logs = expected(model.folder, sampling)
    asking = Asking(model, sampling, 1)
    asking.decoded(len(tokens))

    assert len(asking.told) == len(asking.tokens) - len(PROMPT)
    assert [one.chosen for one in asking.told[: len(logs)]] == pytest.approx(logs, abs=1e-4)
    for one, token in zip(asking.told, asking.tokens[len(PROMPT) :], strict=True):
        best = dict(one.best)
        assert len(best) == count
        assert list(best.values()) == sorted(best.values(), reverse=True)
        assert best.get(token, one.chosen) == one.chosen
        assert one.chosen <= max(best.values(), default=0.0)


@pytest.mark.parametrize("grammar", [Grammar('{"type": "nonsense"}'), Grammar("{")])
def test_an_unenforceable_grammar_is_refused_at_the_start(model: LanguageModel, grammar: Grammar):
    (fault,) = answers(target(model), begin(Sampling(grammar=grammar)))

    assert isinstance(fault, Fault)
    assert (fault.kind, fault.request) == ("refused", 1)
    assert "JSON schema" in fault.text


def test_a_grammar_beyond_the_library_s_limits_ends_only_its_own_request(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
):
    def strict() -> LLParserLimits:
        return LLParserLimits(step_lexer_fuel=1, verbose_errors=False)

    worker = target(model)
    said = (*PROMPT, *ids("{"))
    answers(worker, begin(SAMPLINGS["grammar"], said))
    monkeypatch.setattr("protocol.sampling.grammar._limits", strict)
    answers(worker, begin(SAMPLINGS["grammar"], said, 2))
    trees = [Verify(RequestId(id), 0, ROOT, len(said) - 1, said[-1:], (-1,)) for id in (1, 2)]

    verdict, fault = answers(worker, Forest(tuple(trees)))
    (again,) = answers(worker, trees[1])

    assert isinstance(verdict, Verdict)
    assert text([verdict.bonus]) in '"\n '
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.request, again) == ("refused", 2, fault)
    assert "too many expressions" in fault.text
