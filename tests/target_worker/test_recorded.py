"""A target that replays recorded texts answers like the target that generated them, and serves nothing else."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.contracts.model_folder import ModelFolder
from protocol.errors import InputError, PipelineError
from protocol.inference.language_model import LanguageModel
from protocol.inference.recorded_network import KnownText
from protocol.inference.slots import PREFIX
from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.features import FINAL
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Fault
from protocol.worker.recorded_texts import RecordedTarget, RecordedText, RecordedTexts
from target_worker.engine import TargetEngine
from target_worker.recorded import RecordedEngine, RecordedFeatures, RecordedModel, RecordedSequence, compute
from target_worker.worker import TargetWorker
from tests.support.models.tiny_models import VOCABULARY, tree_model
from tests.support.paths import DEMO_TARGET
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
        ({"verification": "rejection"}, "Rejection sampling needs the target's whole distribution"),
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


_OUTPUTS = (FINAL, 1, 4)
_PROMPTS = ((5, 9, 2, 33), (41, 7, 12))
_GENERATED = (8, 80, 11, 300, 21, 17)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of recorded texts, with their states beside it."""
    model = LanguageModel.load(DEMO_TARGET)
    recorded = [RecordedText(prompt=each, temperature=0.0, seed=0, tokens=_GENERATED) for each in _PROMPTS]
    target = RecordedTarget(
        model_fingerprint=ModelFolder(DEMO_TARGET).fingerprint,
        vocabulary=model.vocabulary,
        context=model.context,
        texts=len(recorded),
    )
    path = tmp_path_factory.mktemp("recorded") / "texts.jsonl"
    RecordedTexts(target, recorded).write(path)
    compute(DEMO_TARGET, path, _OUTPUTS)
    return path


def states(texts: Path) -> RecordedFeatures:
    found = RecordedFeatures.beside(texts)
    assert found is not None
    return found


def replaying(texts: Path, index: int, outputs: tuple[int, ...]) -> RecordedSequence:
    recorded = RecordedTexts.read(texts, ModelFolder(DEMO_TARGET).fingerprint)
    model = RecordedModel(DEMO_TARGET, recorded, states(texts))
    model.record(outputs)
    sequence = model.sequence()
    sequence.follow(KnownText(recorded.texts[index].whole, model.vocabulary), index)
    return sequence


@pytest.mark.sampled(2)
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("outputs", [_OUTPUTS, (1,), (FINAL, 4)])
def test_every_row_is_what_the_model_records(texts: Path, index: int, outputs: tuple[int, ...]):
    model, prompt = LanguageModel.load(DEMO_TARGET), _PROMPTS[index]
    model.record(outputs)
    real, replayed = model.sequence(), replaying(texts, index, outputs)
    path = _GENERATED[:3]

    for sequence in (real, replayed):
        sequence.prefill(prompt)
    assert same(real, replayed)

    tip = real.next_row
    parents = [PREFIX, tip, tip + 1]
    for sequence in (real, replayed):
        sequence.evaluate(path, parents)
    assert same(real, replayed)


def test_nothing_is_recorded_until_a_tap_asks_for_it(texts: Path):
    sequence = replaying(texts, 0, ())
    sequence.prefill(_PROMPTS[0])

    assert sequence.recorded is None


def test_an_output_that_was_not_computed_is_not_recorded(texts: Path):
    sequence = replaying(texts, 0, (0, 1))
    sequence.prefill(_PROMPTS[0])

    assert sequence.recorded is None


def test_states_are_computed_once(texts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LanguageModel, "load", lambda *_: pytest.fail("the model was loaded again"))

    compute(DEMO_TARGET, texts, (FINAL, 4))


def test_an_output_that_the_model_lacks_is_refused(texts: Path):
    with pytest.raises(InputError, match="can't be recorded"):
        compute(DEMO_TARGET, texts, (FINAL, 99))


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda _: b"", lambda _: b"no archive"])
def test_damaged_states_are_as_if_they_were_absent(tmp_path: Path, texts: Path, damage):
    file = tmp_path / "texts.features.npz"
    file.write_bytes(damage(texts.with_name("texts.features.npz").read_bytes()))

    assert RecordedFeatures.beside(tmp_path / "texts.jsonl") is None


def same(real: TreeSequence, replayed: RecordedSequence) -> bool:
    ours, theirs = real.recorded, replayed.recorded
    assert ours is not None
    assert theirs is not None
    return ours.outputs == theirs.outputs and np.allclose(
        np.array(ours.rows), np.array(theirs.rows), rtol=1e-3, atol=1e-3
    )
