"""A target with quantized KV in real processes: its tokens are its own with the same bits, whatever happens."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from orchestrator import Pipeline, SamplingParams
from protocol.errors import InputError
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import mark, members, remains
from tests.target_worker.tensor_parallel.test_ranks import free_ports

PROMPT = "\n".join(f"import {name}\n" for name in ("os", "sys", "json", "math", "random", "time")) * 3
COLD = SamplingParams(max_tokens=80)
HOT = SamplingParams(max_tokens=80, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The greedy and the sampled tokens of plain decoding in 4 bits."""
    with Pipeline(str(DEMO_TARGET), strategy="ar", kv_bits=4) as plain:
        return [plain.generate(PROMPT, params).tokens for params in (COLD, HOT)]


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT), kv_bits=4) as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


@pytest.mark.thorough
def test_trees_change_no_token(pipeline: Pipeline, expected: list[tuple[int, ...]]):
    results = [pipeline.generate(PROMPT, params) for params in (COLD, HOT)]

    assert [result.tokens for result in results] == expected
    assert all(result.statistics.acceptance_rate for result in results)


@pytest.mark.thorough
def test_chains_change_no_token(expected: list[tuple[int, ...]]):
    with Pipeline(str(DEMO_TARGET), str(DEMO_DRAFT), strategy="ssd", kv_bits=4) as chains:
        assert [chains.generate(PROMPT, params).tokens for params in (COLD, HOT)] == expected


@pytest.mark.thorough
def test_other_bits_give_other_tokens(expected: list[tuple[int, ...]]):
    """That 4 bits are inexact shows that the option reaches the target."""
    with Pipeline(str(DEMO_TARGET), strategy="ar") as sixteen:
        assert sixteen.generate(PROMPT, HOT).tokens != expected[1]


@pytest.mark.thorough
def test_a_killed_target_adopts_the_quantized_rows_that_it_saved(pipeline: Pipeline, expected: list[tuple[int, ...]]):
    with pipeline.stream(PROMPT, HOT) as stream:
        for count, _ in enumerate(stream):
            if count == 1:
                os.kill(members(mark(pipeline))["target_worker"], signal.SIGKILL)
        assert stream.result is not None

    assert stream.result.tokens == expected[1]
    assert stream.result.statistics.adopted_tokens


@pytest.mark.thorough
def test_four_requests_at_once(pipeline: Pipeline):
    texts = [f"{PROMPT}\ndef {name}(" for name in ("read", "write", "open", "close")]
    alone = [pipeline.generate(text, HOT).tokens for text in texts]
    found: dict[int, object] = {}

    def ask(index: int) -> None:
        found[index] = pipeline.generate(texts[index], HOT).tokens

    threads = [Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [found[index] for index in range(4)] == alone


@pytest.mark.thorough
def test_a_prefill_worker_quantizes_alike(expected: list[tuple[int, ...]]):
    options = {"prefill_engine": "mlx", "prefill": "always", "kv_bits": 4}
    with Pipeline(str(DEMO_TARGET), strategy="ar", **options) as pipeline:
        result = pipeline.generate(PROMPT, COLD)

    assert result.tokens == expected[0]
    assert result.statistics.adopted_tokens


@pytest.mark.slow
def test_each_rank_of_a_divided_target_quantizes_its_heads(tmp_path: Path):
    """The ranks' sums round otherwise than the whole target's products, so a divided target is its own reference."""
    file = tmp_path / "hosts.json"
    tokens = []
    for strategy in ("ar", "adaptive"):
        file.write_text(json.dumps({"hosts": [[f"127.0.0.1:{port}"] for port in free_ports(2)]}))
        with Pipeline(target_hosts=str(file), strategy=strategy, target=str(DEMO_TARGET), kv_bits=4) as pipeline:
            tokens.append(pipeline.generate(PROMPT, HOT).tokens)

    assert tokens[0] == tokens[1]


def test_a_core_ml_prefill_worker_is_refused():
    with pytest.raises(InputError, match=r"can't quantize KV.*kv_bits 16"):
        Pipeline(str(DEMO_TARGET), strategy="ar", prefill_engine="coreml", kv_bits=8)
