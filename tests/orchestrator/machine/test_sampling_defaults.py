"""Laws of a model's own sampling values: what its folder states, else its card's, else the rule for its kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.machine import default_target
from orchestrator.machine.gguf.folder import gguf_folder
from orchestrator.machine.sampling_defaults import UNSTATED, known_sampling, model_sampling
from protocol.errors import InputError
from protocol.messages.sampling import ModelSampling
from tests.support.models.gguf_files import write_gguf
from tests.support.paths import DEMO_TARGET

pytestmark = pytest.mark.usefixtures("home")


def folder(place: Path, *, chat: bool = True, generation: Any = None) -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"} if chat else {}))
    if generation is not None:
        (place / "generation_config.json").write_text(json.dumps(generation))
    return place


@pytest.mark.parametrize(
    ("generation", "own"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            ModelSampling(temperature=0.6, top_k=20, top_p=0.95),
        ),
        ({"do_sample": True, "temperature": 1, "min_p": 0.05}, ModelSampling(temperature=1.0, min_p=0.05)),
        ({"do_sample": True}, ModelSampling(temperature=1.0)),
        ({"top_k": 64, "top_p": 0.95}, ModelSampling(temperature=1.0, top_k=64, top_p=0.95)),
        ({"temperature": 0.15}, ModelSampling(temperature=0.15)),
        ({"do_sample": True, "temperature": None, "top_k": -1}, ModelSampling(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6}, ModelSampling()),
        ({"eos_token_id": 2, "repetition_penalty": 1.1}, UNSTATED),
        ([], UNSTATED),
    ],
)
def test_a_folder_s_own_file_says_how_to_sample(tmp_path: Path, generation: Any, own: ModelSampling):
    assert model_sampling(folder(tmp_path / "model", generation=generation)) == own


def test_a_model_that_states_nothing_samples_if_it_converses(tmp_path: Path):
    assert model_sampling(folder(tmp_path / "instruct")) == ModelSampling(temperature=0.7, top_p=0.95)
    assert model_sampling(folder(tmp_path / "base", chat=False)) == ModelSampling()
    assert model_sampling(DEMO_TARGET) == ModelSampling()


def test_the_default_target_has_the_values_of_its_card_unless_its_folder_states_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(default_target.VARIABLE, "auto")
    place = tmp_path / "models" / "default"
    monkeypatch.setattr(default_target, "_place", lambda: place)

    assert known_sampling(None) == ModelSampling(temperature=0.2, top_p=0.9)
    folder(place)
    assert model_sampling(place) == known_sampling(None) == ModelSampling(temperature=0.2, top_p=0.9)
    (place / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.4}')
    assert model_sampling(place) == ModelSampling(temperature=0.4)


@pytest.mark.parametrize("content", ['{"temperature": "hot"}', '{"top_p": 0}', '{"top_k": 2.5}', "{", "\udcff"])
def test_a_file_that_can_t_be_meant_is_refused_in_one_sentence(tmp_path: Path, content: str):
    place = folder(tmp_path / "model")
    (place / "generation_config.json").write_text(content, errors="surrogateescape")

    with pytest.raises(InputError, match="generation_config") as refused:
        model_sampling(place)

    assert "\n" not in str(refused.value)
    assert "delete" in str(refused.value)


def test_a_gguf_file_s_metadata_say_how_to_sample(tmp_path: Path):
    file = tmp_path / "m.gguf"
    write_gguf(file, metadata={"general.sampling.temp": 0.7, "general.sampling.top_k": 20})

    assert known_sampling(str(file)) is None
    assert model_sampling(gguf_folder(file)) == ModelSampling(temperature=0.7, top_k=20)
    assert known_sampling(str(file)) == known_sampling(str(tmp_path)) == ModelSampling(temperature=0.7, top_k=20)
    assert known_sampling("nobody/nothing") is None
