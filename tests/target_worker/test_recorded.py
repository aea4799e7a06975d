"""A target that replays recorded texts answers like the target that generated them, and serves nothing else."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.errors import PipelineError
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts
from target_worker.engine import TargetEngine
from target_worker.recorded import RecordedEngine, RecordedModel
from target_worker.worker import TargetWorker
from tests.support.models.tiny_models import VOCABULARY, tree_model
from tests.support.target_requests import GREEDY, HELLO, HOT, Request, start

_PROMPT = (5, 9, 2, 33, 41, 7)
_LENGTH = 20
_SAMPLINGS = {"greedy": GREEDY, "hot": HOT}


def _request(engine: TargetEngine, sampling: Sampling, prompt: tuple[int, ...] = _PROMPT) -> Request:
    return Request(TargetWorker(engine, float, HELLO), start(prompt, sampling))


def _recorded(sampling: Sampling) -> tuple[int, ...]:
    """What the tiny model generates after the prompt."""
    target = _request(TargetEngine(tree_model()), sampling)
    for _ in range(_LENGTH):
        target.step()
    return tuple(target.tokens[len(_PROMPT) :])


def _engine(sampling: Sampling, tokens: tuple[int, ...]) -> RecordedEngine:
    text = RecordedText(prompt=_PROMPT, temperature=sampling.temperature, seed=sampling.seed, tokens=tokens)
    target = RecordedTarget(model_fingerprint="", vocabulary=VOCABULARY, context=512, texts=1)
    texts = RecordedTexts(target, [text])
    return RecordedEngine(RecordedModel(Path(), texts), texts, prefill_chunk=4)


def test_a_sequence_that_has_begun_continues_its_text():
    tokens = _recorded(_SAMPLINGS["hot"])
    target = _request(_engine(_SAMPLINGS["hot"], tokens), _SAMPLINGS["hot"], prompt=(*_PROMPT, *tokens[:7]))

    assert len(target.replies) == 1
    assert target.prefilled.tokens == len(_PROMPT) + 6
    assert target.step().bonus == tokens[7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 4}, "none is recorded for this prompt, temperature and seed"),
        ({"top_p": 0.5}, "none is recorded for this prompt, temperature and seed"),
        ({"prompt_logprobs": True}, "no log-probabilities of prompts"),
    ],
)
def test_a_request_without_a_recorded_text_is_refused(changes: dict, words: str):
    target = _request(_engine(_SAMPLINGS["hot"], (1, 2, 3)), replace(_SAMPLINGS["hot"], **changes))

    (fault,) = target.replies
    assert isinstance(fault, Fault)
    assert words in fault.text


def test_a_round_beyond_the_recorded_text_is_an_error():
    target = _request(_engine(_SAMPLINGS["greedy"], (1, 2)), _SAMPLINGS["greedy"])
    assert target.step((1,), (0,)).bonus == 2

    with pytest.raises(PipelineError, match="The recorded text ends after 8 tokens"):
        target.step()
