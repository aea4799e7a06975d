"""Targets with sliding windows, with states, of lower levels and with quantized KV, in real processes: their tokens are
those of plain decoding, whatever happens meanwhile."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from orchestrator import Pipeline, SamplingParams
from protocol.errors import InputError
from tests.support.models.architectures import write_tiny
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET
from tests.support.processes import generate_while, mark, remains, shoot
from tests.target_worker.tensor_parallel.test_ranks import free_ports

PROMPT = tuple(range(2, 152))
"""Six windows."""
GREEDY = SamplingParams(max_tokens=60)
HOT = SamplingParams(temperature=0.5, seed=5, max_tokens=60)
LEVELS = {"qwen3_next": "tree", "lfm2": "tree", "rwkv7": "chain", "gpt2": "chain", "phi3small": "plain"}
"""Of random models. Each is its own draft, so that many guesses are right; the temperature makes some wrong."""


class Target(NamedTuple):
    folder: Path
    draft: Path
    level: str
    options: dict[str, Any]

    def opened(self, **options: Any) -> Pipeline:
        return Pipeline(str(self.folder), str(self.draft), **self.options, **options)

    def alone(self, params: SamplingParams, *texts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """By plain decoding, without any reuse."""
        with Pipeline(str(self.folder), strategy="ar", prefix_cache_memory=0, **self.options) as plain:
            return [tuple(plain.generate(text, params).tokens) for text in texts]


def with_windows(folder: Path) -> Path:
    """The demo target, half of whose layers see the last 24 tokens only."""
    shutil.copytree(DEMO_TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    windows = {"layer_types": kinds[: config["num_hidden_layers"]], "sliding_window": 24}
    (folder / "config.json").write_text(json.dumps(config | windows))
    return folder


@pytest.fixture(
    scope="module",
    params=["windows", "4 bits", "qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LEVELS][1:])],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("unusual") / request.param
    match request.param:
        case "windows":
            return Target(with_windows(folder), DEMO_DRAFT, "tree", {})
        case "4 bits":
            return Target(DEMO_TARGET, DEMO_DRAFT, "tree", {"kv_bits": 4})
        case name:
            return Target(write_tiny(folder, name), folder, LEVELS[name], {})


@pytest.fixture(scope="module")
def pipeline(target: Target) -> Iterator[Pipeline]:
    with target.opened() as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("params", [GREEDY, HOT])
def test_tokens_are_those_of_plain_decoding(pipeline: Pipeline, target: Target, params: SamplingParams):
    assert [tuple(pipeline.generate(PROMPT, params).tokens)] == target.alone(params, PROMPT)
    assert pipeline.state().level == target.level


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["sd", "ssd"])
def test_right_guesses_are_taken_in_chains(target: Target, strategy: str):
    """In turns, where the target waits for guesses: left to itself, a target this small needs none."""
    with target.opened(strategy=strategy) as pipeline:
        result = pipeline.generate(PROMPT, HOT)

    assert [tuple(result.tokens)] == target.alone(HOT, PROMPT)
    if strategy == "sd":
        assert bool(result.statistics.acceptance_rate) == (target.level != "plain")


@pytest.mark.thorough
def test_a_killed_target_goes_on_and_adopts_rows_that_it_saved(pipeline: Pipeline, target: Target):
    result = generate_while(pipeline, PROMPT, HOT, 1, lambda: shoot(pipeline, "target_worker"))

    assert [tuple(result.tokens)] == target.alone(HOT, PROMPT)
    assert result.statistics.adopted_tokens or target.folder != DEMO_TARGET


@pytest.mark.thorough
def test_another_turn_reuses_the_kv_and_an_edited_prompt_does_not_disturb(pipeline: Pipeline, target: Target):
    """The edit lies many windows before the end, so rows before the window are needed again."""
    first = pipeline.generate(PROMPT, HOT)
    turn, edited = (*PROMPT, *first.tokens, *range(40, 80)), (*PROMPT[:90], *range(60, 120))
    found = [pipeline.generate(text, HOT) for text in (turn, edited)]

    assert [tuple(each.tokens) for each in found] == target.alone(HOT, turn, edited)
    assert found[0].statistics.adopted_tokens >= len(PROMPT)


@pytest.mark.thorough
def test_four_requests_at_once(pipeline: Pipeline, target: Target):
    texts = [PROMPT[begin:] for begin in (0, 10, 20, 30)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: tuple(pipeline.generate(text, HOT).tokens), texts))

    assert found == target.alone(HOT, *texts)


@pytest.mark.thorough
def test_greedy_tokens_of_a_target_with_windows_are_those_of_mlx_lm(tmp_path: Path):
    target = Target(with_windows(tmp_path / "windows"), DEMO_DRAFT, "tree", {})
    model, _ = load_model(target.folder)
    model.set_dtype(mx.float32)

    steps = generate_step(mx.array(PROMPT), model, max_tokens=60)

    assert [tuple(int(token) for token, _ in steps)] == target.alone(GREEDY, PROMPT)


# Quantized KV --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_four_bits_are_inexact_and_a_prefill_worker_quantizes_alike():
    """That other bits give other tokens shows that the option reaches the target."""
    (expected,) = Target(DEMO_TARGET, DEMO_DRAFT, "tree", {"kv_bits": 4}).alone(HOT, PROMPT)
    options = {"prefill_engine": "mlx", "prefill": "always", "kv_bits": 4}
    with Pipeline(str(DEMO_TARGET), strategy="ar", **options) as pipeline:
        result = pipeline.generate(PROMPT, HOT)

    assert tuple(result.tokens) == expected
    assert result.statistics.adopted_tokens
    assert Target(DEMO_TARGET, DEMO_DRAFT, "tree", {}).alone(HOT, PROMPT) != [expected]


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


def test_a_core_ml_prefill_worker_can_not_quantize():
    with pytest.raises(InputError, match=r"can't quantize KV.*kv_bits 16"):
        Pipeline(str(DEMO_TARGET), strategy="ar", prefill_engine="coreml", kv_bits=8)
