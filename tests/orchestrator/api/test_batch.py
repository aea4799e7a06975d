"""Laws of batches: results in the order of the prompts, all checked before one is sent, nothing left when one fails."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from orchestrator import AsyncClient, Client, SamplingParams
from orchestrator.api.submission import MOST_AT_ONCE, RequestBatch, is_batch, submits
from protocol.errors import InputError, PipelineError
from protocol.messages.client import Cancel, Done, Inquire, Output, Refused, Submit
from protocol.transport import Stamp, decode, encode
from tests.support.fake_pipeline import READY, statistics
from tests.support.processes import until

PROMPTS = ["def quicksort(items):", "import os", "class Node:"]


def batch(count: int) -> tuple[RequestBatch, list[Submit]]:
    sent = [SamplingParams().submit(f"r{index}", "x") for index in range(count)]
    return RequestBatch(sent), sent


def finish(batch: RequestBatch, request: str) -> None:
    batch.feed(Output(request, f"text of {request}", (1,)))
    batch.feed(Done(request, "length", statistics(1, 1)))


def test_results_are_in_the_order_of_the_prompts_whatever_ends_first():
    one, sent = batch(3)
    assert one.due() == sent
    for request in ("r2", "r0", "r1"):
        assert Cancel(request) in one.cancellations()
        finish(one, request)

    finish(one, "stranger")
    results = one.results
    assert results is not None
    assert [result.text for result in results] == ["text of r0", "text of r1", "text of r2"]
    assert [result.seed for result in results] == [submit.sampling.seed for submit in sent]
    assert one.cancellations() == []


def test_no_more_are_open_than_a_pipeline_has_room_for():
    one, sent = batch(MOST_AT_ONCE + 2)
    assert one.due() == sent[:MOST_AT_ONCE]
    assert one.due() == []

    finish(one, "r5")
    assert one.due() == [sent[MOST_AT_ONCE]]


def test_a_refused_request_names_its_prompt_and_the_others_are_cancelled():
    one, _ = batch(3)
    one.due()
    finish(one, "r0")

    with pytest.raises(InputError, match="Prompt 1: too long"):
        one.feed(Refused("r1", "too long", "input"))
    assert one.cancellations() == [Cancel("r2")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("text", False), ([1, 2], False),
      ((1, 2), False), ([], True), (["a"], True), ([[1], [2, 3]], True), (["a", 1], True)],
)  # fmt: skip
def test_a_list_is_a_batch_if_it_is_empty_or_holds_prompts(prompt, expected: bool):
    assert is_batch(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        *(
            (prompts, None, "give prompts of one kind")
            for prompts in (["a", [1]], ["a", 1], [[1], 2], [[1], "a"], [None], [b"a"], [{"prompt": "a"}])
        ),
        *((prompt, None, "A prompt is text or a list of token ids") for prompt in (b"a", {"prompt": "a"}, None)),
        *((["a"], params, r"Parameters are SamplingParams\(\.\.\.\)") for params in ({"max_tokens": 3}, [{}], 3)),
    ],
)
def test_prompts_and_parameters_of_other_types_are_an_error(prompt: Any, params: Any, words: str):
    with pytest.raises(InputError, match=words):
        submits(prompt, params) if isinstance(prompt, list) else is_batch(prompt)


def test_parameters_are_for_all_or_one_for_each():
    params = [SamplingParams(max_tokens=count, stop=None) for count in (3, 4)]

    assert [(each.max_tokens, each.stop) for each in submits(["a", "b"], params)] == [(3, ()), (4, ())]
    assert [each.max_tokens for each in submits(["a", "b"], params[0])] == [3, 3]
    with pytest.raises(InputError, match="2 prompts and 1 SamplingParams"):
        submits(["a", "b"], params[:1])


class Hub:
    """A pipeline that answers by a script and notes what it was sent."""

    def __init__(self, refuse: bool) -> None:
        self.cancelled: set[str] = set()
        self.submitted: list[str] = []
        self.ended = threading.Event()
        self._refuse = refuse
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self.ended.is_set():
            if not self._socket.poll(50):
                continue
            peer, frame = self._socket.recv_multipart()
            _, message = decode(frame, Submit | Cancel | Inquire)
            match message:
                case Inquire():
                    self._socket.send_multipart([peer, encode(READY, Stamp(0, 0))])
                case Cancel(request):
                    self.cancelled.add(request)
                case Submit(request):
                    self.submitted.append(request)
                    if self._refuse and len(self.submitted) == 2:
                        self._socket.send_multipart(
                            [peer, encode(Refused(request, "no room", "pipeline"), Stamp(0, 0))]
                        )

    def close(self) -> None:
        self.ended.set()
        self._thread.join()
        self._socket.close(linger=0)

    def others(self) -> set[str]:
        return {self.submitted[0], self.submitted[2]}


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    hub = Hub(refuse="interruption" not in request.node.name)
    yield hub
    hub.close()


async def _asked(hub: Hub) -> None:
    client = AsyncClient(hub.address)
    try:
        await client.generate(PROMPTS)
    finally:
        while len(hub.cancelled) < 2:
            await asyncio.sleep(0.01)
        client.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_refusal_cancels_the_rest(hub: Hub, asynchronous: bool):
    with pytest.raises(PipelineError, match="Prompt 1: no room"):
        asyncio.run(_asked(hub)) if asynchronous else Client(hub.address).generate(PROMPTS)

    until(lambda: len(hub.cancelled) == 2)
    assert hub.cancelled == hub.others()


def test_an_interruption_cancels_all(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    client = Client(hub.address)

    def interrupt(_: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.generate(PROMPTS)
    until(lambda: len(hub.cancelled) == 3)


def test_a_stream_takes_one_prompt_and_one_prompt_one_set_of_parameters():
    client, prompts, many = Client("tcp://127.0.0.1:9"), cast("Any", PROMPTS), cast("Any", [SamplingParams()])
    with pytest.raises(InputError, match="A stream continues one prompt"):
        client.stream(prompts)
    with pytest.raises(InputError, match="one prompt and a list of SamplingParams"):
        client.generate("x", many)
    assert client.generate([]) == []
