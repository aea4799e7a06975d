"""Rejection verification through real processes: the target's distribution, a fixed output for a fixed seed."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from orchestrator import Pipeline, Result, SamplingParams
from tests.support.models.tiny_models import network, stock_logits, write_model

VOCABULARY = 12
PROMPT = (3, 1, 4, 1, 5)
DRAWS = 400
_FEWEST = 5.0
"""Cells of which fewer draws are expected are counted together."""

Options = dict[str, Any]
OPTIONS: dict[str, Options] = {
    "sd": {"strategy": "sd", "draft_tokens": 2},
    "ssd": {"strategy": "ssd", "draft_tokens": 2, "fallback": "neural"},
}


def save(folder: Path, model: Any) -> Path:
    """The model in mlx-lm's format, with a tokenizer of one word a token."""
    write_model(folder, model)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    level = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": level}))
    return folder


@pytest.fixture(scope="module")
def target() -> Any:
    return network("llama", seed=1, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def folders(target: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny target and a draft that is not much like it."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "target": str(save(folder / "target", target)),
        "draft": str(save(folder / "draft", network("llama", seed=2, vocab_size=VOCABULARY))),
    }


@pytest.fixture(scope="module", params=OPTIONS.values(), ids=[*OPTIONS])
def options(request: pytest.FixtureRequest) -> Options:
    return request.param


@pytest.fixture(scope="module")
def pipeline(folders: dict[str, str], options: Options) -> Iterator[Pipeline]:
    with Pipeline(**folders, **options) as pipeline:
        yield pipeline


def chi_square_excess(draws: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the draws as a standard normal deviate (Wilson and Hilferty 1931); cells below `_FEWEST` as one."""
    total = draws.total()
    common = [cell for cell, share in expected.items() if share * total >= _FEWEST]
    pairs = [(draws[cell], expected[cell] * total) for cell in common]
    pairs.append((total - sum(seen for seen, _ in pairs), total - sum(due for _, due in pairs)))
    statistic = sum((seen - due) ** 2 / due for seen, due in pairs)
    freedom = len(pairs) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def distribution(model: Any) -> dict[tuple[int, ...], float]:
    """Probability of each pair of tokens behind the prompt and one more token, at temperature 1."""

    def next_token(tokens: tuple[int, ...]) -> np.ndarray:
        return np.array(mx.softmax(stock_logits(model, tokens))).astype(np.float64)

    tokens = range(VOCABULARY)
    found = dict.fromkeys(product(tokens, tokens), 0.0)
    for zero, share in enumerate(next_token(PROMPT)):
        for one, likely in enumerate(next_token((*PROMPT, zero))):
            for two, row in enumerate(next_token((*PROMPT, zero, one))):
                found[one, two] += float(share * likely * row)
    return found


def draw(pipeline: Pipeline, draws: int, **params: Any) -> list[Result]:
    sampling = {"temperature": 1.0, "verification": "rejection", "max_tokens": 4} | params
    return [pipeline.generate(PROMPT, SamplingParams(seed=seed, **sampling)) for seed in range(draws)]


@pytest.mark.thorough
def test_pairs_are_distributed_as_the_target_alone_would_have_them(pipeline: Pipeline, target: Any):
    require_exact(draw(pipeline, DRAWS), target)


def require_exact(results: list[Result], target: Any) -> None:
    """The first token comes of a plain round; the second and the third are verified as a block."""
    pairs = Counter(tuple(result.tokens[1:3]) for result in results)
    assert chi_square_excess(pairs, distribution(target)) < 3.5
    rejected = sum(result.statistics.rounds == 4 for result in results)
    assert DRAWS / 20 < rejected < 0.95 * DRAWS, "both acceptance and rejection must have been at work"


@pytest.mark.thorough
def test_a_fixed_seed_gives_a_fixed_output(pipeline: Pipeline, folders: dict[str, str], options: Options):
    """A draft that gets no processor time misses its turn, which changes the tree and thus the text: hence three tries
    on each side. Sixteen tokens of an unseeded run would not agree in any of them."""
    with Pipeline(**folders, **options) as other:
        runs = [[draw(each, 5, max_tokens=16) for _ in range(3)] for each in (pipeline, other)]
    here, there = ([{result.tokens for result in tries} for tries in zip(*side, strict=True)] for side in runs)

    assert all(one & another for one, another in zip(here, there, strict=True))
    assert len(set.union(*here)) >= len(here)
