"""Laws of `serve` with several models before any is loaded."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.commands.serve import serve_models
from orchestrator.cli.configured_models import ConfiguredModel
from orchestrator.http import run
from orchestrator.http.model_table import ModelEntry
from orchestrator.http.settings import EmbeddingSettings, ServerSettings
from orchestrator.machine.memory.budget import GIB
from protocol.errors import InputError
from tests.support.fake_embeddings import COMMAND
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET


def test_an_embedding_model_that_leaves_no_room_for_others_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    settings = ServerSettings(names=(), embedding=EmbeddingSettings(name="vectors", folder=tmp_path, command=COMMAND))

    with pytest.raises(InputError, match="The embedding model alone takes"):
        serve_models([], settings, 0, False, keep_minutes=1, memory_gib=1 / 2048)


def _entries(
    monkeypatch: pytest.MonkeyPatch, gib: float, more: Mapping[str, Any] = MappingProxyType({}), **pinned: bool
) -> list[ModelEntry]:
    """Of models of the demo pair, with `more` options, and so much memory for all of them. Nothing is served."""
    found: list[ModelEntry] = []
    monkeypatch.setattr(run, "run_models", lambda served, *_: found.extend(entry for entry, _ in served))
    options = {"target": DEMO_TARGET, "draft": DEMO_DRAFT, "draft_engine": "mlx", "arena_memory": 1024}
    settings = PipelineSettings().changed(**{**options, **more})
    contexts = {"auto": {"context": "auto"}, "asked": {"context": 2048}}
    models = [
        ConfiguredModel(name, (), pin, settings.changed(**contexts.get(name, {}))) for name, pin in pinned.items()
    ]
    serve_models(models, ServerSettings(names=(), hosts=("127.0.0.1",)), 0, False, keep_minutes=1, memory_gib=gib)
    return found


def test_caches_of_a_model_take_what_the_memory_for_all_leaves(monkeypatch: pytest.MonkeyPatch):
    (roomy,), (narrow,) = _entries(monkeypatch, 8, one=False), _entries(monkeypatch, 1.5, one=False)

    assert roomy.bytes > 2.5 * GIB
    assert 1.45 * GIB < narrow.bytes <= 1.5 * GIB


def test_caches_leave_room_for_pinned_models(monkeypatch: pytest.MonkeyPatch):
    first, pinned = _entries(monkeypatch, 4, first=False, second=True)

    assert (first.name, pinned.name) == ("first", "second")
    assert pinned.bytes > 2.5 * GIB
    assert first.bytes <= 4 * GIB - pinned.bytes


def test_a_context_of_auto_is_what_the_memory_for_the_model_leaves(monkeypatch: pytest.MonkeyPatch):
    asked = {"context": "auto", "concurrent": 64}

    (alone,) = _entries(monkeypatch, 1.3, asked, one=False)
    first, pinned = _entries(monkeypatch, 5.2, asked, first=False, second=True)

    assert 1.2 * GIB < alone.bytes <= 1.3 * GIB
    assert first.bytes <= 5.2 * GIB - pinned.bytes


def test_pinned_models_share_the_memory(monkeypatch: pytest.MonkeyPatch):
    first, second = _entries(monkeypatch, 4, first=True, second=True)

    assert first.bytes > 2.5 * GIB
    assert second.bytes <= 4 * GIB - first.bytes


def test_pinned_models_that_do_not_fit_together_are_refused_with_what_counts(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"\(first 1\.0 GiB with KV of 1 × 2,048 tokens, second 0\.\d GiB with"):
        _entries(monkeypatch, 1, first=True, second=True)


def test_pinned_models_with_a_context_have_theirs_before_those_of_auto(monkeypatch: pytest.MonkeyPatch):
    more = {"draft_engine": "none", "arena_memory": 64, "concurrent": 64}
    auto, asked = _entries(monkeypatch, 3.2, more, auto=True, asked=True)
    assert asked.kv_for == "64 × 2,048 tokens"
    assert 0.9 * (3.2 * GIB - asked.bytes) < auto.bytes <= 3.2 * GIB - asked.bytes
