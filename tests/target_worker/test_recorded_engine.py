"""A target that replays recorded texts answers like the target that generated them, and serves nothing else."""

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.errors import PipelineError
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault, Hello, Prefilled, Prefilling, Start, Verdict, Verify
from protocol.speculation.token_tree import node_id
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts
from target_worker.engine import TargetEngine
from target_worker.recorded_engine import RecordedEngine, RecordedModel
from target_worker.worker import TargetWorker
from tests.support.models.tiny_models import VOCABULARY, tree_model

_HELLO = Hello("target", "mlx", "tiny", "llama", VOCABULARY, 512, "none", "cpu", 1)
_PROMPT = (5, 9, 2, 33, 41, 7)
_ROOT = NodeId(1234)
_LENGTH = 20
_SAMPLINGS = {"greedy": Sampling(), "hot": Sampling(temperature=1.0, seed=3)}


class _Target:
    """One request of a target worker: sends its Start and then one Verify after the other."""

    def __init__(self, engine: TargetEngine, sampling: Sampling, prompt: tuple[int, ...] = _PROMPT) -> None:
        self._worker = TargetWorker(engine, float, _HELLO)
        self.tokens, self._root, self._round = list(prompt), _ROOT, 0
        self.started = self._ask(Start(SequenceId(1), 0, prompt, _ROOT, sampling))

    def verify(self, tokens: tuple[int, ...] = (), parents: tuple[int, ...] = ()) -> Verdict:
        """One round: these tokens below the root, and their parents' entries (0 is the root)."""
        entries = (self.tokens[-1], *tokens)
        verify = Verify(SequenceId(1), self._round, self._root, len(self.tokens) - 1, entries, (-1, *parents))
        verdict = self._ask(verify)
        assert isinstance(verdict, Verdict)
        ids = [self._root]
        for token, parent in zip(tokens, parents, strict=True):
            ids.append(node_id(ids[parent], token))
        self.tokens += [entries[ids.index(node)] for node in verdict.path] + [verdict.bonus]
        self._root, self._round = node_id((self._root, *verdict.path)[-1], verdict.bonus), self._round + 1
        return verdict

    def _ask(self, message: Start | Verify) -> object:
        replies = list(self._worker.handle(message))
        while self._worker.has_work:
            replies += self._worker.work()
        (reply,) = (reply for reply in replies if not isinstance(reply, Prefilling))
        return reply


def _recorded(sampling: Sampling) -> tuple[int, ...]:
    """What the tiny model generates after the prompt."""
    target = _Target(TargetEngine(tree_model()), sampling)
    for _ in range(_LENGTH):
        target.verify()
    return tuple(target.tokens[len(_PROMPT) :])


def _engine(sampling: Sampling, tokens: tuple[int, ...]) -> RecordedEngine:
    text = RecordedText(prompt=_PROMPT, temperature=sampling.temperature, seed=sampling.seed, tokens=tokens)
    target = RecordedTarget(model_fingerprint="", vocabulary=VOCABULARY, context=512, texts=1)
    texts = RecordedTexts(target, [text])
    return RecordedEngine(RecordedModel(Path(), texts), texts, prefill_chunk=4)


@pytest.mark.parametrize("name", _SAMPLINGS)
def test_verdicts_on_any_trees_are_those_of_the_recorded_target(name: str):
    sampling = _SAMPLINGS[name]
    tokens, draw = _recorded(sampling), random.Random(8)
    computing = _Target(TargetEngine(tree_model()), sampling)
    replaying = _Target(_engine(sampling, tokens), sampling)

    while (left := _LENGTH - len(computing.tokens) + len(_PROMPT)) > 0:
        right = tokens[_LENGTH - left :]
        tree = _tree(draw, right[: left - 1])
        real, replayed = computing.verify(*tree), replaying.verify(*tree)
        assert (real.path, real.bonus) == (replayed.path, replayed.bonus)

    assert tuple(replaying.tokens) == (*_PROMPT, *tokens)


def _tree(draw: random.Random, right: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Up to four right tokens below the root, and wrong ones at any depth. Siblings differ."""
    chain = right[: draw.randrange(5)]
    tokens, parents = list(chain), list(range(len(chain)))
    for parent in range(len(chain) + 1):
        wrong = draw.randrange(VOCABULARY)
        if draw.random() < 0.5 and right[parent : parent + 1] != (wrong,):
            tokens.append(wrong)
            parents.append(parent)
    return tuple(tokens), tuple(parents)


def test_a_sequence_that_has_begun_continues_its_text():
    tokens = _recorded(_SAMPLINGS["hot"])
    target = _Target(_engine(_SAMPLINGS["hot"], tokens), _SAMPLINGS["hot"], prompt=(*_PROMPT, *tokens[:7]))

    assert isinstance(target.started, Prefilled)
    assert target.started.tokens == len(_PROMPT) + 6
    assert target.verify().bonus == tokens[7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "none is recorded for this prompt, temperature and seed"),
        ({"top_p": 0.5}, "none is recorded for this prompt, temperature and seed"),
        ({"prompt_logprobs": True}, "no log-probabilities of prompts"),
        ({"verification": "rejection"}, "Rejection sampling needs the target's whole distribution"),
    ],
)
def test_a_request_without_a_recorded_text_is_refused(changes: dict, words: str):
    target = _Target(_engine(_SAMPLINGS["hot"], (1, 2, 3)), replace(_SAMPLINGS["hot"], **changes))

    assert isinstance(target.started, Fault)
    assert words in target.started.text


def test_a_round_beyond_the_recorded_text_is_an_error():
    target = _Target(_engine(_SAMPLINGS["greedy"], (1, 2)), _SAMPLINGS["greedy"])
    assert target.verify((1,), (0,)).bonus == 2

    with pytest.raises(PipelineError, match="The recorded text ends after 8 tokens"):
        target.verify()
