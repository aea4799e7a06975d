"""Laws of the target's features: rows of committed tokens and no others, and not one message more without a Tap."""

import logging
import os
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.features.blocks import received
from protocol.features.ring import FeatureRing
from protocol.inference.language_model import LanguageModel
from protocol.kv import segments
from protocol.kv.segments import create_segment
from protocol.messages.base import RequestId
from protocol.messages.features import (
    FINAL,
    Features,
    FeatureShipment,
    FeaturesTaken,
    Tap,
)
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Forest, Prefilled, Prefilling, Start, Stop, ToWorker, Verdict
from protocol.worker.interface import WorkerReply
from target_worker.feature_rings import FeatureRings
from tests.support.models.tiny_models import VOCABULARY, alike, tree_model
from tests.support.segments import exists
from tests.support.target_requests import PROMPT, Request, start, target

pytestmark = pytest.mark.usefixtures("registry")

_OUTPUTS = (FINAL, 0, 1)


class Talk:
    """A worker and its orchestrator, which sends what is asked of it, and reads every ring as soon as it is named."""

    def __init__(
        self, chunk: int = 3, model: LanguageModel | None = None, prefix_cache: int = 0, remote: bool = False
    ) -> None:
        self.model = model or tree_model()
        assert self.model.tap is not None
        rings = FeatureRings(self.model.tap, self.model.record, fingerprint="a" * 64, epoch=7, remote=remote)
        self.worker = target(self.model, chunk, prefix_cache=prefix_cache, rings=rings)
        self.replies: list[WorkerReply] = []
        self.requests: dict[int, TappedRequest] = {}
        self.rows: dict[int, dict[int, np.ndarray]] = {}
        """By sequence and position: what a draft that reads in time has read."""

    def send(self, message: ToWorker, idle: bool = True) -> list[Any]:
        """The replies; with `idle`, also those of all work that follows."""
        replies = [*self._read(self.worker.handle(message))]
        while idle and self.worker.has_work:
            replies += self._read(self.worker.work())
        self.replies += replies
        return replies

    def _read(self, replies: Any) -> Any:
        for reply in replies:
            if isinstance(reply, Features):
                ring = FeatureRing.attach(reply.name)
                found = ring.read(reply.first, reply.rows, ring.form.outputs)
                assert found is not None
                self.rows.setdefault(reply.request, {}).update(enumerate(found, reply.first))
                ring.close()
            if isinstance(reply, FeatureShipment):
                found = received(*reply)
                assert found is not None
                self.rows.setdefault(reply.block.request, {}).update(enumerate(found, reply.block.first))
            yield reply

    def start(
        self, tokens: Sequence[int] = PROMPT, request: int = 1, round: int = 0, **sampling: Any
    ) -> "TappedRequest":
        begun = start(tokens, Sampling(**sampling), request, round)
        found = self.requests[request] = TappedRequest(self, begun)
        return found


class TappedRequest(Request):
    def __init__(self, talk: Talk, begun: Start) -> None:
        self.talk = talk
        super().__init__(talk.worker, begun)

    def ask(self, message: ToWorker) -> list[Any]:
        return self.talk.send(message)

    def tree(self, seed: int) -> tuple[list[int], list[int]]:
        """The right next tokens among wrong ones, so that some are accepted."""
        chance = random.Random(seed)
        coming = continuation(self.tokens, 3)
        right = [coming[0], coming[1], coming[2]]
        wrong = [(token + 1 + chance.randrange(5)) % VOCABULARY for token in right]
        return [wrong[0], right[0], wrong[1], right[1], (right[2] + 1) % VOCABULARY], [0, 0, 2, 2, 4]


def continuation(tokens: Sequence[int], length: int) -> list[int]:
    """Greedy, by the stock model."""
    network, text = tree_model().network, list(tokens)
    for _ in range(length):
        text.append(int(mx.argmax(network(mx.array([text]), cache=make_prompt_cache(network))[0, -1])))
    return text[len(tokens) :]


def expected(tokens: Sequence[int], outputs: Sequence[int] = _OUTPUTS) -> np.ndarray:
    """(L, outputs * width): the layers of the stock model by hand, over the whole text."""
    network = tree_model().network
    states = [network.model.embed_tokens(mx.array([list(tokens)]))]
    for layer in network.model.layers:
        states.append(layer(states[-1], "causal"))
    found = [network.model.norm(states[-1]) if output == FINAL else states[output + 1] for output in outputs]
    return np.array(mx.concatenate(found, axis=-1)[0].astype(mx.float32))


def assert_rows(
    talk: Talk, request: TappedRequest, positions: range, outputs: Sequence[int] = _OUTPUTS, error: float = 1e-4
) -> None:
    """All these tokens have rows, no other has one, and all are right."""
    rows, right = talk.rows[request.sequence], expected(request.tokens, outputs)
    assert sorted(rows) == list(positions)
    found = np.stack([rows[place] for place in positions])
    assert alike(mx.array(found), mx.array(right[positions.start : positions.stop]), error)


def names(replies: Sequence[WorkerReply]) -> set[str]:
    return {reply.name for reply in replies if isinstance(reply, Features)}


def test_a_prompt_has_rows_behind_each_chunk():
    talk = Talk(chunk=3)
    talk.send(Tap(_OUTPUTS))
    request = talk.start()

    spans = [(each.first, each.rows, each.round) for each in talk.replies if isinstance(each, Features)]
    assert spans == [(0, 3, 0), (3, 3, 0), (6, 1, 0)]
    assert_rows(talk, request, range(7))


def test_a_verdict_is_followed_by_the_rows_of_the_root_and_of_what_was_accepted():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    request = talk.start()
    for seed in range(5):
        before = len(request.tokens)
        verify = request.verify(*request.tree(seed))
        replies = talk.send(verify)
        request.fold(verify, replies)

        assert [type(reply) for reply in replies] == [Verdict, Features]
        features = replies[1]
        assert isinstance(features, Features)
        assert (features.first, features.rows) == (before - 1, len(request.tokens) - before)
        assert features.round == request.round

    assert len(request.tokens) > len(PROMPT) + 10
    assert_rows(talk, request, range(len(request.tokens) - 1))


def test_trees_that_are_verified_together_have_their_own_rows():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    one, other = talk.start(), talk.start(PROMPT[2:], request=2)
    for seed in range(3):
        asked = [one.verify(*one.tree(seed)), other.verify(*other.tree(seed + 1))]
        replies = talk.send(Forest(tuple(asked)))
        for request, verify in zip((one, other), asked, strict=True):
            request.fold(verify, replies)
        assert [type(reply) for reply in replies] == [Verdict, Verdict, Features, Features]

    for request in (one, other):
        assert_rows(talk, request, range(len(request.tokens) - 1))


def test_a_forward_that_begins_before_its_verify_has_right_rows_if_it_is_used_and_if_it_is_not():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    request = talk.start()
    for seed in range(3):
        request.step(plain_next=True)
        request.step(plain_next=True)
        request.step(*request.tree(seed))

    assert_rows(talk, request, range(len(request.tokens) - 1))


def test_a_repeated_verify_gets_its_verdict_and_no_second_rows():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    request = talk.start()
    verify = request.verify(*request.tree(0))
    replies = talk.send(verify)

    assert talk.send(verify) == replies[:1]
    request.fold(verify, replies)
    request.step()
    assert_rows(talk, request, range(len(request.tokens) - 1))


def test_a_restart_begins_a_new_ring_whose_rows_begin_behind_the_kv_that_was_kept():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    first = talk.start()
    first.step(*first.tree(0))
    (before,) = names(talk.replies)
    forked = [*first.tokens[:-2], 60, 61, 62, 63]
    talk.rows.clear()
    again = talk.start(forked, round=9)
    again.step(*again.tree(1))

    assert not exists(before)
    assert_rows(talk, again, range(len(forked) - 4, len(again.tokens) - 1))


@pytest.mark.parametrize("ended", [False, True])
def test_kv_of_another_sequence_has_no_features(ended: bool):
    """Its tokens are evaluated no second time. KV that is taken over whole leaves nothing to prefill."""
    prompt = random.Random(1).choices(range(VOCABULARY), k=80)
    talk = Talk(chunk=64, prefix_cache=1 << 24)
    talk.send(Tap(_OUTPUTS))
    talk.start(prompt)
    if ended:
        talk.send(Stop(RequestId(1)))
    other = talk.start([*prompt[:70], *PROMPT], request=2)
    other.step(*other.tree(0))

    assert_rows(talk, other, range(70, len(other.tokens) - 1))
    third = talk.start(prompt, request=3)
    third.step()
    assert min(talk.rows[3]) >= 70
    for place, row in talk.rows[3].items():
        np.testing.assert_allclose(row, expected(third.tokens)[place], atol=1e-4)


def test_a_tap_that_comes_late_has_rows_of_what_follows():
    talk = Talk()
    request = talk.start()
    request.step(plain_next=True)
    talk.send(Tap(_OUTPUTS))
    # That of the last token is being computed already.
    position = len(request.tokens)
    request.step(*request.tree(0))
    request.step(*request.tree(1))

    assert_rows(talk, request, range(position, len(request.tokens) - 1))


def test_a_tap_that_changes_while_a_forward_runs_never_mixes_outputs():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    request = talk.start()
    request.step(plain_next=True)
    (before,) = names(talk.replies)
    talk.rows.clear()
    begun = talk.worker._begun
    talk.send(Tap((1,)))
    verify = request.verify(plain_next=True)
    request.fold(verify, talk.send(verify, idle=False))
    position = len(request.tokens) - 1
    request.step()

    assert begun is not None
    assert not exists(before)
    assert_rows(talk, request, range(position, len(request.tokens) - 1), (1,))


def test_a_ring_ends_with_its_sequence_and_with_the_tap():
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    talk.start()
    talk.start(request=2)
    one, other = (
        each.name for each in {each.request: each for each in talk.replies if isinstance(each, Features)}.values()
    )

    talk.send(Stop(RequestId(1)))
    assert (exists(one), exists(other)) == (False, True)
    talk.send(Tap(_OUTPUTS))
    assert exists(other)
    talk.send(Tap(()))
    assert not exists(other)
    talk.requests[2].step()
    assert not isinstance(talk.replies[-1], Features)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("remote", "taken"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("tap", [None, Tap(()), Tap((0, 7)), Tap(_OUTPUTS)])
def test_no_token_and_no_other_message_depends_on_features(
    tap: Tap | None, remote: bool, taken: bool, caplog: pytest.LogCaptureFixture
):
    """Whether they are recorded, sent and answered or not."""
    plain, tapped = Talk(), Talk(remote=remote)
    if tap is not None:
        assert tapped.send(tap) == []
    for talk in (plain, tapped):
        request = talk.start(temperature=1.0, seed=3)
        for seed in range(6):
            request.step(*request.tree(seed), plain_next=seed % 2 == 0)
            if taken:
                tapped.send(FeaturesTaken(seed))

    assert [each for each in tapped.replies if not isinstance(each, Features | FeatureShipment)] == plain.replies
    assert bool(tapped.rows) == (tap == Tap(_OUTPUTS))
    assert ("reads layer 7, and the target has 2 layers" in caplog.text) == (tap == Tap((0, 7)))


def test_without_shared_memory_the_target_works_on_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("protocol.kv.segments.free_shared_memory", lambda: 0)
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    with caplog.at_level(logging.WARNING):
        for sequence in (1, 2):
            talk.start(request=sequence).step()

    replies = [type(reply) for reply in talk.replies if not isinstance(reply, Prefilling)]
    assert replies == [Prefilled, Verdict] * 2
    assert caplog.text.count("drafts get no features") == 1


def test_a_ring_that_a_chunk_overruns_names_the_rows_that_are_left(monkeypatch: pytest.MonkeyPatch):
    create = FeatureRing.create
    monkeypatch.setattr(FeatureRing, "create", lambda *a, **k: create(*a, **k, capacity=4))
    talk = Talk(chunk=6)
    talk.send(Tap(_OUTPUTS))
    request = talk.start()

    assert_rows(talk, request, range(2, 7))


def test_the_first_ring_removes_those_of_a_target_that_crashed(monkeypatch: pytest.MonkeyPatch):
    name, memory = create_segment(4096)
    memory.close()
    entry = segments.segments_folder() / name
    entry.write_bytes(entry.read_bytes().replace(str(os.getpid()).encode(), b"999999999"))
    talk = Talk()
    talk.send(Tap(_OUTPUTS))
    assert exists(name)

    talk.start()
    assert not exists(name)


# The orchestrator on another machine ---------------------------------------------------------------


def test_another_machine_gets_the_rows_behind_the_verdict_and_two_blocks_at_most_before_it_answers():
    talk = Talk(remote=True)
    talk.send(Tap(_OUTPUTS))
    request = talk.start()
    blocks = [each for each in talk.replies if isinstance(each, FeatureShipment)]
    assert [(each.block.first, each.block.rows, each.block.number) for each in blocks] == [(0, 3, 1), (3, 3, 2)]
    for seed in range(2):
        verify = request.verify(*request.tree(seed))
        replies = talk.send(verify)
        request.fold(verify, replies)
        assert [type(reply) for reply in replies] == [Verdict]
    (rest,) = talk.send(FeaturesTaken(2))
    assert isinstance(rest, FeatureShipment)
    assert (rest.block.first, rest.block.number) == (6, 3)
    verify = request.verify(*request.tree(2))
    replies = talk.send(verify)
    request.fold(verify, replies)

    assert [type(reply) for reply in replies] == [Verdict, FeatureShipment]
    assert not names(talk.replies)
    assert_rows(talk, request, range(len(request.tokens) - 1), error=2e-3)


def test_lost_answers_hold_up_one_sequence_and_not_the_next():
    talk = Talk(remote=True)
    talk.send(Tap(_OUTPUTS))
    talk.start().step()
    talk.start(request=2)
    meanwhile = dict(talk.rows)
    for sequence in (1, 2):
        talk.send(Stop(RequestId(sequence)))
    talk.start(request=3)

    assert meanwhile.keys() == {1}
    assert sorted(talk.rows[3]) == list(range(6))
