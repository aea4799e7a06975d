"""A prompt read on another machine, whose KV comes over CURVE: played over loopback by real processes."""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from protocol.errors import InputError
from tests.conftest import Reference
from tests.end_to_end.test_attach import Machine, machine, named
from tests.end_to_end.test_kv_pipeline import arenas
from tests.support.processes import until

PARAMS = SamplingParams(temperature=0.8, seed=21, max_tokens=40)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 4096), k=length))


def known(server: Pipeline) -> set[str]:
    """Arenas by name; one may go while they are looked at."""
    with suppress(FileNotFoundError):
        return set(arenas(server))
    return set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("server")))
        with Pipeline(listen="127.0.0.1:0", prefill_engine="guest", prefill="always", strategy="ar") as pipeline:
            yield pipeline


@pytest.fixture
def reader(server: Pipeline, tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, "prefill", server.owner.invite().line, "--name", "reader") as lent:
        until(lambda: any(entry.role == "prefill" and entry.status == "ready" for entry in server.owner.workers()))
        yield lent
    server.owner.revoke(next(name for name in named(server) if name.startswith("reader")))


@pytest.mark.thorough
def test_a_prompt_may_be_read_on_another_machine_and_its_death_is_survived(
    server: Pipeline, reader: Machine, reference: Reference
):
    asked = prompt(61, 1500)

    result = server.generate(asked, PARAMS)

    assert result.statistics.adopted_tokens == len(asked) - 1
    assert result.tokens == reference(asked, PARAMS).tokens

    asked, before, worker = prompt(62, 1500), known(server), reader.worker()
    os.kill(worker, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(server.generate, asked, PARAMS)
            until(lambda: known(server) - before)
            reader.process.kill()
            result = answer.result()
    finally:
        # It can't notice that its parent is gone.
        os.kill(worker, signal.SIGKILL)

    assert result.tokens == reference(asked, PARAMS).tokens
    assert result.statistics.adopted_tokens == 0
    until(lambda: named(server)["reader"].status == "gone")


def test_a_prefill_worker_comes_only_where_the_owner_wants_one():
    with pytest.raises(InputError, match="set listen"):
        Pipeline(prefill_engine="guest")
    with pytest.raises(InputError, match="set arena_memory above 0"):
        Pipeline(prefill_engine="guest", listen="127.0.0.1:0", arena_memory=0)
