"""A draft that seems far away: its messages arrive late and in order, and no token changes."""

import tempfile
import time
from collections.abc import Iterator

import pytest
import zmq

from orchestrator import Pipeline, SamplingParams
from orchestrator.runtime.link_emulation import DelayedHub, EmulatedLink
from protocol.messages.worker import FromWorker, Ping, Pong, ToWorker
from protocol.transport.codec import Stamp
from protocol.transport.link import Link

NEAR, FAR = Stamp(1, 1), Stamp(1, 2)
DELAY = 0.05


def heard(hub, count):
    """So many arrivals, with when they came."""
    arrived = []
    while len(arrived) < count:
        hub.socket.poll(max(0, int(hub.timeout(1.0) * 1000) + 1))
        arrived += [(arrival.message.sent, time.monotonic()) for arrival in hub.receive()]
    return arrived


@pytest.fixture
def address() -> Iterator[str]:
    """Of a socket whose path is short enough for macOS: its temporary folder is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"ipc://{folder}/hub"


def test_only_the_far_worker_is_late_and_its_order_is_kept(address):
    context = zmq.Context()
    hub = DelayedHub(context, address, FromWorker, EmulatedLink(delay=DELAY, loss=0.2), lambda stamp: stamp == FAR)
    near, far = (Link(context, address, stamp, ToWorker) for stamp in (NEAR, FAR))
    try:
        began = time.monotonic()
        for number in range(20):
            far.send(Pong(float(number)))
        near.send(Pong(99.0))
        arrived = heard(hub, 21)

        late = [(sent, at) for sent, at in arrived if sent != 99.0]
        assert [sent for sent, _ in late] == [float(number) for number in range(20)]
        assert min(at for _, at in late) >= began + DELAY
    finally:
        for end in (near, far, hub):
            end.close()
        context.term()


def test_a_far_worker_hears_late_too(address):
    context = zmq.Context()
    hub = DelayedHub(context, address, FromWorker, EmulatedLink(delay=DELAY), lambda stamp: stamp == FAR)
    far = Link(context, address, FAR, ToWorker)
    try:
        far.send(Pong(1.0))
        while not (arrivals := list(hub.receive())):
            hub.socket.poll(max(0, int(hub.timeout(1.0) * 1000) + 1))
        began = time.monotonic()
        hub.send(arrivals[0].peer, Ping(2.0), FAR)
        while not (messages := far.receive(0.0)):
            hub.socket.poll(max(0, int(hub.timeout(1.0) * 1000) + 1))
            list(hub.receive())

        assert messages == [Ping(2.0)]
        assert time.monotonic() >= began + DELAY
    finally:
        far.close()
        hub.close()
        context.term()


@pytest.mark.thorough
def test_tokens_are_the_targets_over_a_bad_link(reference):
    with Pipeline(draft_link=EmulatedLink(delay=0.004, loss=0.1)) as pipeline:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=160, temperature=temperature, seed=4)
            result = pipeline.generate("def quicksort(items):\n", params)

            assert result.tokens == reference("def quicksort(items):\n", params).tokens
            assert result.statistics.draft_busy > 0
