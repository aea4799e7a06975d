"""MTP heads in their published forms equal their description, one token after the other; trees equal their paths."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from draft_worker.drafters.mtp import MtpHead, read_mtp
from protocol.errors import InputError
from tests.support.models.mtp_folders import (
    ARCHITECTURES,
    EMBEDDING,
    HEAD,
    WIDTH,
    mtp_beside,
    mtp_config,
    mtp_layer,
    write_mtp,
)

STATES = mx.random.normal((40, WIDTH), key=mx.random.key(3))


def _borrowing(folder: Path) -> MtpHead:
    network = read_mtp(folder)[0]
    network.borrow(lambda tokens: EMBEDDING[tokens], lambda hidden: hidden @ HEAD.T)
    return network


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_published_form_equals_its_description_token_by_token(tmp_path: Path, name: str):
    network, layer, parts = _borrowing(write_mtp(tmp_path, name)), mtp_layer(name), mtp_beside()
    eps = network.norm.eps
    tokens, cache = [5, 17, 3, 90, 44, 8], KVCache()
    expected = []
    for token, state in zip(tokens, STATES, strict=False):
        embedded, hidden = (np.array(each, np.float64) for each in (EMBEDDING[token], state))
        scaled = [x / np.sqrt((x**2).mean() + eps) for x in (embedded, hidden)]
        normed = [
            x * np.array(parts[f"{key}_norm.weight"]) for x, key in zip(scaled, ("embedding", "hidden"), strict=True)
        ]
        x = np.array(parts["fc.weight"]) @ np.concatenate(normed)
        out = np.array(layer(mx.array(x, mx.float32)[None, None], None, cache))[0, 0]
        expected.append(out / np.sqrt((out**2).mean() + eps) * np.array(parts["norm.weight"]))

    ours = network(mx.array([tokens]), STATES[None, : len(tokens)])

    assert np.allclose(np.array(ours)[0], np.stack(expected), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "glm4_moe"])
def test_a_config_in_the_newer_form_gives_the_same_positions(tmp_path: Path, name: str):
    folder = write_mtp(tmp_path, name)
    config, file = mtp_config(name), folder / "config.json"
    rope = {"rope_theta": 5_432.0, "partial_rotary_factor": config.pop("partial_rotary_factor", 1.0)}
    older, newer = config | rope | {"rope_scaling": None}, config | {"rope_parameters": rope}
    del newer["rope_theta"]
    newer.pop("rope_scaling", None)

    found = []
    for form in (older, newer):
        file.write_text(json.dumps(form))
        found.append(np.array(_borrowing(folder)(mx.array([[5, 17, 3, 90]]), STATES[None, :4])))

    assert np.array_equal(*found)


def test_a_checkpoint_without_a_head_and_an_unknown_one_get_a_sentence(tmp_path: Path):
    folder = write_mtp(tmp_path, "glm4_moe")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    for gone in stored:
        if "embed_tokens" not in gone:
            mx.save_safetensors(str(folder / "model.safetensors"), {k: v for k, v in stored.items() if k != gone})
            with pytest.raises(InputError, match="said to hold an MTP head"):
                read_mtp(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match="holds an ordinary language model"):
        read_mtp(folder)
