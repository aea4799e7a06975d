"""Laws of the choice of a trained drafter: its engine by itself, its target's folder, and a sentence where it can't."""

import json
import shutil
from pathlib import Path

import pytest

from orchestrator.machine.drafts.converted_draft import converted_draft
from orchestrator.machine.drafts.draft_choice import DraftChoice, draft_choice, draft_for, first_engine
from orchestrator.machine.memory.weights import loaded_drafter
from orchestrator.machine.models.checkpoints import resolve, weight_bytes
from orchestrator.machine.progress import silent
from protocol.contracts.drafters.description import ENGINES
from protocol.contracts.engines import AUTO
from protocol.errors import InputError
from tests.support.models.drafter_files import FORMATS, LAYERS, VOCABULARY, WIDTH, layer, write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("orchestrator.machine.drafts.trained_drafter.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A language model of the shape that the tiny drafters were made for, with its own MTP head."""
    config, head = FORMATS["qwen_mtp"]()
    body = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for index in range(LAYERS):
        body |= layer(f"model.layers.{index}")
    folder = write(tmp_path / "target", (config, body | head))
    shutil.copy(DEMO_TARGET / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_folder_of_each_format_gets_its_engine_and_its_target(tmp_path: Path, target: Path, form: str):
    folder = write(tmp_path / "drafter", FORMATS[form]())
    kind = {"safeailab": "eagle3", "dspark": "dspark", "dflash": "dflash"}.get(form)
    choice = draft_for(str(target), AUTO, str(folder), silent)

    assert choice == DraftChoice(choice.engine, folder, target=target)
    assert kind is None or choice.engine == ENGINES[kind]  # type: ignore[index]


def test_a_drafter_needs_no_tokenizer_and_a_target_does(tmp_path: Path, target: Path):
    folder = write(tmp_path / "drafter", FORMATS["safeailab"]())

    assert resolve(str(folder), "draft") == folder
    with pytest.raises(InputError, match="holds a trained drafter, no language model"):
        resolve(str(folder), "target")
    (target / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        resolve(str(target), "draft")


def test_the_target_s_own_mtp_head_drafts_for_it_and_a_smaller_relative_drafts_as_a_model(tmp_path: Path, target: Path):
    relative = tmp_path / "relative"
    shutil.copytree(target, relative)
    config = json.loads((relative / "config.json").read_text())
    (relative / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 4}))

    assert draft_for(str(target), AUTO, str(target), silent) == DraftChoice("mtp", target, target=target)
    assert draft_for(str(relative), AUTO, str(target), silent).engine == "mlx"
    assert draft_for(str(target), "mlx", str(target), silent).engine == "mlx"


@pytest.mark.parametrize(
    ("own_target", "engine", "form", "words"),
    [
        (False, AUTO, "safeailab", r"does not fit the target .*states of 16 numbers, and the target's have 256"),
        (True, "mlx", "dspark", r"a DSpark drafter, which the draft engine mlx can't run: .*choose block"),
        (False, "layerskip", None, "an ordinary language model, which the draft engine layerskip can't run"),
    ],
)
def test_a_drafter_of_another_target_and_an_engine_that_can_t_run_it_are_refused_before_anything_starts(
    tmp_path: Path, target: Path, own_target: bool, engine: str, form: str | None, words: str
):
    draft = DEMO_DRAFT if form is None else write(tmp_path / "drafter", FORMATS[form]())

    with pytest.raises(InputError, match=words):
        draft_for(str(target if own_target else DEMO_TARGET), engine, str(draft), silent)


def test_a_lent_drafter_needs_its_target_s_name(tmp_path: Path, target: Path):
    folder = write(tmp_path / "drafter", FORMATS["safeailab"]())

    with pytest.raises(InputError, match="uses the embedding or layers of its target: name the target's folder"):
        draft_choice(AUTO, str(folder))
    assert draft_choice(AUTO, str(folder), target=str(target)).target == target


def test_a_drafter_s_engine_is_left_to_its_kind_and_it_is_not_converted(tmp_path: Path):
    folder = write(tmp_path / "drafter", FORMATS["safeailab"]())

    assert [first_engine(AUTO, name) for name in (str(folder), "exit:3", str(DEMO_DRAFT))] == [AUTO, AUTO, "mlx"]
    with pytest.raises(InputError, match="trained drafter, which is not converted on its first use"):
        converted_draft(str(folder))


# Exits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("exit", 1), ("exit:3", 3)])
def test_an_exit_is_named_by_its_layers_or_by_the_engine_alone(cache: Path, name: str, layers: int):
    choice = draft_for(str(DEMO_TARGET), AUTO, name, silent)

    assert choice == DraftChoice("layerskip", cache / "exits" / f"exit-{layers}", target=DEMO_TARGET)
    assert layers > 1 or choice == draft_for(str(DEMO_TARGET), "layerskip", None, silent)


def test_a_target_s_own_files_may_recommend_the_exit(tmp_path: Path):
    shutil.copytree(DEMO_TARGET, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text('{"assistant_early_exit": 4}')

    folder = draft_for(str(tmp_path / "target"), AUTO, "exit", silent).folder
    assert folder is not None
    assert folder.name == "exit-4"


@pytest.mark.parametrize("name", ["exit:6", "exit:99"])
def test_an_exit_behind_the_last_layer_is_refused(name: str):
    with pytest.raises(InputError, match="the target has 6: choose 1 to 5"):
        draft_for(str(DEMO_TARGET), AUTO, name, silent)


# Memory --------------------------------------------------------------------------------------------


def test_an_exit_takes_the_memory_of_its_layers(tmp_path: Path):
    sizes = [
        loaded_drafter(
            write(tmp_path / str(n), ({"model_type": "exit", "layers": n}, {})), DEMO_TARGET, on_processor=False
        )
        for n in (1, 3, 5)
    ]

    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] > 0
    assert sizes[2] < weight_bytes(DEMO_TARGET)


def test_a_drafter_takes_its_own_memory_and_that_of_the_target_s_embedding_and_head(tmp_path: Path, target: Path):
    folder = write(tmp_path / "drafter", FORMATS["dflash"]())
    shared = 2 * 2 * VOCABULARY * WIDTH

    assert loaded_drafter(folder, target, on_processor=False) == pytest.approx(weight_bytes(folder) + shared, abs=8192)
    head = 2 * (2 * WIDTH * WIDTH + 3 * WIDTH + sum(a * (b or 1) for a, b in _sizes()))
    assert loaded_drafter(target, target, on_processor=False) == head + shared


def _sizes() -> list[tuple[int, int]]:
    return [(shape[0], shape[1] if len(shape) > 1 else 1) for shape in layer("x").values()]
