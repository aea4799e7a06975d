"""Laws of log-probabilities in answers: they go with the text that they belong to, however it was cut."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api.result import Chosen, Result
from orchestrator.http.generation import ChoiceEnd, TextPiece
from orchestrator.http.openai.answer import AnswerKind, ChoiceAnswer
from orchestrator.http.openai.answer_content import LogprobTranscript
from orchestrator.http.openai.prompts import PreparedRequest
from orchestrator.runtime.client_frontend import RequestState
from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.answer_format import AnswerFormat
from orchestrator.text.tokenizer import TextCodec
from protocol.messages.base import RequestId
from protocol.messages.client import Submit
from protocol.messages.sampling import Sampling, TokenLogprob
from protocol.transport import Stamp
from tests.support.fake_pipeline import statistics
from tests.support.paths import DEMO_TARGET

CODEC = TextCodec(DEMO_TARGET)
SAID = "for name in caf\u00e9s: # \N{PILE OF POO} end"
IDS = CODEC.encode(SAID)
END = 0


def token_logprob(place: int) -> TokenLogprob:
    return TokenLogprob(-0.5 - place, ((IDS[place % len(IDS)], -0.25), (7, -1.0 - place)))


def generated(stops: tuple[str, ...] = (), seed: int = 0) -> tuple[list[TextPiece], Result]:
    """The pieces and the result that a client gets for these tokens, split at random."""
    source = random.Random(seed)
    submit = Submit("r", "", None, Sampling(), 99, stops)
    state = RequestState.open(RequestId(1), b"", Stamp(0, 0), submit, CODEC)
    rest, pieces, place = [*IDS, END], [], 0
    while rest and not state.stopped:
        count = source.randrange(1, 4)
        token_logprobs = tuple(token_logprob(place + index) for index in range(len(rest[:count])))
        pieces.append(state.output(tuple(rest[:count]), token_logprobs=token_logprobs))
        del rest[:count]
        place += count
    last = state.rest()
    pieces += [last] if last else []
    texts = [TextPiece(0, piece.text, tuple(map(Chosen, piece.tokens, piece.token_logprobs))) for piece in pieces]
    chosen = [one for text in texts for one in text.chosen]
    tokens, known = tuple(one.token for one in chosen), tuple(one.token_logprob for one in chosen)
    whole = "".join(text.text for text in texts)
    return texts, Result(whole, tokens, "stop", statistics(1, len(tokens)), 0, token_logprobs=known)


def both(
    kind: AnswerKind, stops: tuple[str, ...] = (), seed: int = 0, form: AnswerFormat | None = None
) -> tuple[str, Any, list[Any]]:
    """The text, its log-probabilities as a whole, and those in the chunks of a stream. `form`: of an answer that
    begins inside a thought."""
    texts, result = generated(stops, seed)
    answer = ChoiceAnswer(kind, "m", codec=CODEC)
    if form is not None:
        answer = replace(answer, prompt=PreparedRequest((), lambda: form.parser(True, (), None)))
    (choice,) = answer.whole([result])["choices"]
    chunks = replace(answer)
    frames = [frame for event in [*texts, ChoiceEnd(0, result)] for frame in chunks.render(event)]
    streamed = [json.loads(frame.removeprefix(b"data: "))["choices"][0]["logprobs"] for frame in frames]
    return result.text, choice["logprobs"], [each for each in streamed if each]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stops", [(), (" in",), ("f\u00e9s",), ("for",), ("\N{PILE OF POO}",), (" end", "d!")])
def test_every_token_of_the_text_is_sent_once_and_no_other(stops: tuple[str, ...], seed: int):
    text, whole, streamed = both("chat", stops, seed)

    content = whole["content"]
    assert [entry for each in streamed for entry in each["content"]] == content
    spelt = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelt.startswith(text.encode())
    assert not content or len(spelt) - len(content[-1]["bytes"]) < len(text.encode())
    assert END not in [entry["token"] for entry in content]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", [" in", "f\u00e9s:"])
def test_tokens_of_a_thought_are_not_sent(end: str, seed: int):
    text, whole, streamed = both("chat", seed=seed, form=AnswerFormat(ThoughtMarkers("<>", end)))

    spelt = b"".join(bytes(entry["bytes"]) for entry in whole["content"]).decode()
    assert [entry for each in streamed for entry in each["content"]] == whole["content"]
    assert spelt
    assert text.partition(end)[2].endswith(spelt)


def test_tokens_of_a_later_thought_are_not_sent():
    start, end = CODEC.encode("class")[0], CODEC.encode("return")[0]
    word = IDS[0]
    tokens = [word, word, start, word, word, end, word, word]
    said, stream = [], CODEC.stream(marked=frozenset([start]))
    parser = AnswerFormat(ThoughtMarkers(CODEC.decode([start]), CODEC.decode([end]))).parser(False, (), None)
    transcript = LogprobTranscript("chat", CODEC, marked=frozenset([start]))
    for place, token in enumerate(tokens):
        text = stream.push([token])
        parser.push(text)
        found = transcript.push(text, [Chosen(token, token_logprob(place))], parser.thoughts)
        said += [entry["logprob"] for entry in found["content"]] if found else []

    assert said == [token_logprob(place).chosen for place in (0, 1, 6, 7)]


def test_an_entry_is_as_clients_know_it():
    _, whole, _ = both("chat")

    first = whole["content"][0]
    assert first["token"] == "for"
    assert bytes(first["bytes"]) == b"for"
    assert first["logprob"] == -0.5
    assert [(one["token"], one["logprob"]) for one in first["top_logprobs"]] == [
        ("for", -0.25),
        (CODEC.spelt(7).decode(), -1.0),
    ]
    assert any(entry["token"].startswith("\\x") for entry in whole["content"])


@pytest.mark.parametrize("seed", range(3))
def test_completions_tell_lists_and_where_in_the_text_each_token_begins(seed: int):
    text, whole, streamed = both("text", (" end",), seed)

    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for each in streamed for one in each[name]] == whole[name]
        assert len(whole[name]) == len(whole["tokens"])
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert token.startswith("\\x") or text[offset:].startswith(token)
    assert all(token in best for token, best in zip(whole["tokens"], whole["top_logprobs"], strict=True))


def test_tokens_are_spelt_as_the_text_that_they_are():
    assert b"".join(map(CODEC.spelt, CODEC.encode(SAID))) == SAID.encode()
    assert CODEC.spelt(END) == b"<|endoftext|>"
    assert CODEC.spelt(1 << 20) == b""
