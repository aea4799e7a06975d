"""Laws of the shipped drafts: the default target's own is complete, and serves no other target."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from orchestrator.machine.downloads.default_target import DefaultTarget
from orchestrator.machine.drafts import shipped_drafts as module
from orchestrator.machine.drafts.packed_draft import CONFIG, LAYERS
from orchestrator.machine.drafts.shipped_drafts import DefaultDraft, default_draft, packed_draft, shipped_draft
from protocol.contracts.head_tokens import HEAD_TOKENS
from protocol.contracts.tokenizer_fingerprint import tokenizer_fingerprint
from tests.support.models.packed_drafts import packed, target
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

MOST_BYTES = 20 << 20
HIDDEN, VOCABULARY = 576, 49_152
"""Of SmolLM2-135M-Instruct."""


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model as the default target, and its packed draft."""
    folder, draft = target(tmp_path / "target"), packed(tmp_path / "packed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "default_target", lambda *_: DefaultTarget(folder))
    monkeypatch.setattr(module, "is_default_target", lambda given: given == folder)
    monkeypatch.setattr(module, "packed_draft", lambda: draft)
    return folder


def test_the_default_target_gets_its_own_draft(fetched: Path):
    draft = shipped_draft(fetched)

    assert draft is not None
    assert default_draft() == DefaultDraft(draft)
    assert tokenizer_fingerprint(draft) == tokenizer_fingerprint(fetched)


def test_a_copy_of_the_default_target_elsewhere_gets_no_draft(fetched: Path, tmp_path: Path):
    assert shipped_draft(target(tmp_path / "other")) is None


def test_the_demo_draft_serves_targets_with_its_tokenizer(fetched: Path):
    assert shipped_draft(DEMO_TARGET) == DEMO_DRAFT


def test_where_the_default_target_is_the_demo_target_its_draft_is_the_default():
    assert default_draft() == DefaultDraft(DEMO_DRAFT)


def test_the_reason_for_the_demo_draft_is_told(fetched: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "default_target", lambda *_: DefaultTarget(DEMO_TARGET, "No network."))

    assert default_draft() == DefaultDraft(DEMO_DRAFT, "No network.")


def test_the_shipped_draft_has_the_default_targets_shape_and_no_embedding():
    config = json.loads((packed_draft() / CONFIG).read_text())

    with safe_open(packed_draft() / LAYERS, framework="numpy") as layers:
        names = set(layers.keys())
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCABULARY)
    assert not any("embed" in name or "lm_head" in name for name in names)
    assert {name.split(".")[2] for name in names if "layers" in name} == {
        str(layer) for layer in range(config["num_hidden_layers"])
    }


def test_the_shipped_drafts_head_names_ascending_tokens():
    tokens = np.load(packed_draft() / HEAD_TOKENS)

    assert tokens.dtype == np.int32
    assert (np.diff(tokens) > 0).all()
    assert 0 <= tokens[0] <= tokens[-1] < VOCABULARY


def test_the_shipped_draft_is_small_and_names_its_sources():
    files = list(packed_draft().iterdir())

    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    notice = (packed_draft() / "NOTICE").read_text()
    assert "Apache License" in notice
    assert "WordNet" in notice
