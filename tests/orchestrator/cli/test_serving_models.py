"""Laws of `serve` with several models before any is loaded."""

from pathlib import Path

import pytest

from orchestrator.cli.serving_models import serve_models
from orchestrator.http.settings import EmbeddingSettings, ServerSettings
from protocol.errors import InputError
from tests.support.fake_embeddings import COMMAND


def test_an_embedding_model_that_leaves_no_room_for_others_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    settings = ServerSettings(names=(), embedding=EmbeddingSettings(name="vectors", folder=tmp_path, command=COMMAND))

    with pytest.raises(InputError, match="The embedding model alone takes"):
        serve_models([], settings, 0, False, keep_minutes=1, memory_gib=1 / 2048)
