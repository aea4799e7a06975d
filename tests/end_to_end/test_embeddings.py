"""mlx-embeddings itself in its own environment, which the first run installs (1 GB), with a small random BERT."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from orchestrator.http.embedding_process import EmbeddingProcess, embedding_command
from orchestrator.machine.checkpoints import demo_model
from protocol.contracts.coreml import silent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WIDTH, INNER, VOCABULARY, POSITIONS = 32, 64, 4096, 64
ROWS = [[5, 6, 7, 8], [9], [10, 11], [5, 6, 7, 8], [12, 13, 14, 15]]
SETTINGS = {
    "model_type": "bert",
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, out: int, width: int) -> None:
        weights[f"{name}.weight"] = random.normal(0, 0.3, (out, width)).astype(np.float32)
        weights[f"{name}.bias"] = random.normal(0, 0.1, out).astype(np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(WIDTH, np.float32)
        weights[f"{name}.bias"] = np.zeros(WIDTH, np.float32)

    for name, rows in (("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)):
        weights[f"embeddings.{name}_embeddings.weight"] = random.normal(0, 1, (rows, WIDTH)).astype(np.float32)
    norm("embeddings.LayerNorm")
    for layer in range(2):
        prefix = f"encoder.layer.{layer}"
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            linear(f"{prefix}.{name}", WIDTH, WIDTH)
        norm(f"{prefix}.attention.output.LayerNorm")
        linear(f"{prefix}.intermediate.dense", INNER, WIDTH)
        linear(f"{prefix}.output.dense", WIDTH, INNER)
        norm(f"{prefix}.output.LayerNorm")
    linear("pooler.dense", WIDTH, WIDTH)
    save_file(weights, str(folder / "model.safetensors"), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    shutil.copyfile(demo_model("target") / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.fixture
def process(bert: Path) -> Iterator[EmbeddingProcess]:
    with closing(EmbeddingProcess(embedding_command(bert, silent))) as process:
        yield process


def test_vectors_have_length_one_and_do_not_depend_on_what_is_asked_beside_them(process: EmbeddingProcess):
    together = np.array(process.embed(ROWS))
    alone = np.array([process.embed([row])[0] for row in ROWS])

    assert together.shape == (len(ROWS), WIDTH)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1.0, abs=1e-6)
    assert np.abs(together - alone).max() < 1e-5
    assert np.abs(together[0] - together[3]).max() < 1e-6
    assert np.abs(together[0] - together[4]).max() > 0.1


def test_the_models_own_file_chooses_the_pooling(bert: Path, tmp_path: Path, process: EmbeddingProcess):
    mean = np.array(process.embed(ROWS))
    found = {}
    for mode in ("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"):
        folder = tmp_path / mode
        shutil.copytree(bert, folder)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps({mode: True}))
        with closing(EmbeddingProcess(embedding_command(folder, silent))) as pooled:
            found[mode] = np.array(pooled.embed(ROWS))

    first, same, last = found.values()
    assert np.abs(same - mean).max() < 1e-5
    # A row of one token has one output, so all poolings agree there.
    assert np.abs(first[1] - mean[1]).max() < 1e-5
    assert np.abs(last[1] - mean[1]).max() < 1e-5
    assert (
        min(np.abs(first[0] - mean[0]).max(), np.abs(last[0] - mean[0]).max(), np.abs(first[0] - last[0]).max()) > 0.01
    )
