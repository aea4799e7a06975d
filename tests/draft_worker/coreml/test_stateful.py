"""Laws of a draft from a package of another's making: MLX's candidates on every path, and a sentence for a misfit."""

import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
from tokenizers import Tokenizer

from draft_worker.coreml.arrays import Array
from draft_worker.coreml.program_file import ProgramFile
from draft_worker.coreml.stateful import runtimes
from draft_worker.coreml.stateful.__main__ import inspect
from draft_worker.coreml.stateful.description import description
from draft_worker.coreml.stateful.forward import StatefulForward
from draft_worker.coreml.stateful.layout import StatefulLayout, layout
from draft_worker.coreml.stateful.package import StatefulPackage
from draft_worker.coreml.stateful.runtimes import CoreMlStates, ExecutorStates
from draft_worker.coreml.toolchain import messages, toolchain
from draft_worker.engine import Batch
from draft_worker.engines.mlx import MlxEngine
from draft_worker.engines.stateful import StatefulEngine
from draft_worker.worker import DraftWorker
from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Start
from tests.draft_worker.coreml.test_engine import DRAWN, FILTERED, GREEDY, SAMPLED, Both, assert_alike
from tests.support.models.coreml_runs import tiny
from tests.support.models.stateful_packages import CONTEXT, edit, stateful_package
from tests.support.models.tiny_models import VOCABULARY, stock_logits
from tests.support.models.tokenizer_files import write_tokenizer

MODEL = tiny()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stateful_package(MODEL, tmp_path_factory.mktemp("published"), source="someone/some-model")


@pytest.fixture
def path(published: Path, tmp_path: Path) -> Path:
    """A copy that a test may change, with a tokenizer beside it."""
    write_tokenizer(tmp_path)
    return Path(shutil.copytree(published, tmp_path / "draft.mlpackage"))


def engine(path: Path, **changes: Any) -> StatefulEngine:
    package = StatefulPackage.open(path)
    package = package._replace(layout=package.layout._replace(**changes))
    return StatefulEngine(package, ExecutorStates(package, "fp32"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED, DRAWN])
def test_a_random_walk_through_trees_gives_the_candidates_of_mlx(path: Path, sampling: Sampling):
    one, other = (each.open(sampling, VOCABULARY) for each in (engine(path), MlxEngine(LanguageModel(MODEL), "")))
    walk = Both(one, other, seed=3, sampling=sampling)
    walk.prefill(9)
    for step in range(8):
        assert_alike(*walk.evaluate(walk.source.choice([1, 2, 5]), committed=0 if walk.nodes else step % 3))
        walk.keep()
    assert one.committed == other.committed == len(walk.tokens)


@pytest.mark.parametrize("lengths", [{}, {"least": 4}, {"most": 3}, {"lengths": (2, 8)}, {"lengths": (CONTEXT,)}])
def test_the_lengths_that_a_package_takes_change_no_logits(path: Path, lengths: dict[str, Any]):
    """Padding lies behind the path, and a call near the end of the cache begins earlier."""
    source = random.Random(5)
    held = engine(path, **lengths).forward
    cache = held.cache()
    for size in (3, 20, 7, 40, CONTEXT, CONTEXT - 1, 5):
        tokens = [*cache.tokens[: source.randrange(size)][:size]]
        tokens += [source.randrange(VOCABULARY) for _ in range(size - len(tokens))]
        wanted = source.randint(1, 3)
        logits = held.run(cache, tokens, wanted)

        for back in range(wanted):
            expected = np.array(stock_logits(MODEL, tokens[: len(tokens) - back]))
            assert np.abs(logits[wanted - 1 - back, :VOCABULARY] - expected).max() < 0.05
        assert cache.tokens == tokens


def test_a_lower_end_of_the_mask_leaves_a_path(path: Path):
    calls: list[tuple[int, ...]] = []
    held = engine(path).open(GREEDY, VOCABULARY)
    watch(held, calls)
    held.prefill([1, 2, 3])
    held.evaluate(Batch((), [4, 5], [-1, 0], 4))
    held.truncate(2)
    held.evaluate(Batch((), [9], [-1], 4))

    # (tokens of the call, length of the mask): the last call begins at position 2 and overwrites it.
    assert calls == [(3, 3), (2, 5), (1, 3)]


def watch(sequence: Any, calls: list[tuple[int, ...]]) -> None:
    runtime = sequence._engine.forward._runtime
    real = runtime.predict

    def predict(inputs: Mapping[str, Array], state: Any) -> Mapping[str, Array]:
        calls.append((inputs["inputIds"].shape[1], inputs["causalMask"].shape[3]))
        return real(inputs, state)

    runtime.predict = predict


def test_sequences_have_states_of_their_own(path: Path):
    draft = engine(path)
    alone = draft.open(GREEDY, VOCABULARY)
    alone.prefill([1, 2, 3])
    expected = alone.evaluate(Batch((), [4], [-1], 4))
    one, other = (draft.open(GREEDY, VOCABULARY) for _ in range(2))
    one.prefill([1, 2, 3])
    other.prefill([7, 8, 9])

    assert one.evaluate(Batch((), [4], [-1], 4)) == expected


def test_another_request_continues_from_the_shared_prefix(path: Path):
    draft = engine(path)
    first = draft.open(GREEDY, VOCABULARY)
    first.prefill([1, 2, 3, 4, 5])
    fresh = draft.open(SAMPLED, VOCABULARY)
    fresh.prefill([1, 2])
    continued = first.reopen(2, SAMPLED, VOCABULARY, exclusive=True)

    assert continued.committed == 2
    assert continued.evaluate(Batch((), [6], [-1], 4)) == fresh.evaluate(Batch((), [6], [-1], 4))


def test_best_first_growth_evaluates_one_node_a_step(path: Path):
    worker = DraftWorker(engine(path), clock=lambda: 0.0)
    start = Start(SequenceId(1), 0, (1, 2, 3), NodeId(7), GREEDY, BestFirst(width=8, fan=4), vocabulary=VOCABULARY)
    list(worker.handle(start))
    grown = [reply for _ in range(6) for reply in worker.work() if isinstance(reply, Grow)]

    # The first step also evaluates the two tokens of the prompt.
    assert [grow.evaluated for grow in grown] == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_cost_candidates_alone(path: Path, number: float):
    draft = engine(path)
    sequence = draft.open(SAMPLED, VOCABULARY)
    sequence.prefill([1, 2])
    runtime: Any = draft.forward._runtime
    real = runtime.predict

    def broken(inputs: Mapping[str, Array], state: Any) -> Mapping[str, Array]:
        outputs = {name: value.copy() for name, value in real(inputs, state).items()}
        outputs["logits"][:, 0] = number
        return outputs

    runtime.predict = broken
    found = sequence.evaluate(Batch((), [3, 4], [-1, 0], 4))

    assert (found[0].tokens, len(found[1].tokens) >= 4) == ([], True)


def test_logits_of_another_shape_end_with_a_sentence(path: Path):
    draft = engine(path)
    runtime: Any = draft.forward._runtime
    runtime.predict = lambda inputs, state: {"logits": np.zeros((1, 1, 5), np.float16)}

    with pytest.raises(InputError, match=r"logits of \(1, 1, 5\), not \(1, 2, 67\)"):
        draft.open(GREEDY, VOCABULARY).prefill([1, 2])


Change = Callable[[Any], Any]


def feature(model: Any, group: str, name: str) -> Any:
    return next(each for each in getattr(model.description, group) if each.name == name)


def rename(group: str, old: str, new: str) -> Change:
    def change(model: Any) -> None:
        feature(model, group, old).name = new

    return change


def drop(group: str, name: str) -> Change:
    return lambda model: getattr(model.description, group).remove(feature(model, group, name))


def added(name: str) -> Change:
    def change(model: Any) -> None:
        model.description.input.add().CopyFrom(feature(model, "input", "inputIds"))
        model.description.input[-1].name = name

    return change


def sizes(name: str, axis: int, least: int, most: int) -> Change:
    def change(model: Any) -> None:
        span = feature(model, "input", name).type.multiArrayType.shapeRange.sizeRanges[axis]
        span.lowerBound, span.upperBound = least, most

    return change


def ours(model: Any) -> None:
    model.description.metadata.userDefined["launch_pipeline"] = "{}"


def halves(model: Any) -> None:
    feature(model, "state", "valueCache").type.stateType.arrayType.shape[3] = 8


def doubles(model: Any) -> None:
    feature(model, "input", "inputIds").type.multiArrayType.dataType = 65568


def both(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


def choice(model: Any) -> None:
    rename("output", "logits", "nextToken")(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ours, "launch-pipeline made it. Pass the folder"),
        (rename("input", "inputIds", "hidden_states"), "no token ids, but causalMask, hidden_states. It may be one of"),
        (drop("state", "valueCache"), "its states are keyCache, not keyCache and valueCache"),
        (rename("state", "keyCache", "kv"), "its states are kv, valueCache, not"),
        (rename("input", "causalMask", "mask"), "takes no causalMask"),
        (added("position_ids"), "also takes position_ids, whose meaning is not known"),
        (choice, "returns nextToken, not logits"),
        (doubles, r"token ids are \(1, 1..64\) of float32, not \(1, L\) of int32"),
        (sizes("inputIds", 0, 2, 2), r"token ids are \(2, 1..64\)"),
        (sizes("causalMask", 3, 64, 64), "mask has a fixed length"),
        (sizes("causalMask", 3, 9, 64), "mask is at least 9 long"),
        (sizes("causalMask", 2, 1, 9), "another number of rows than tokens"),
        (halves, "not equal caches"),
        (
            both(sizes("inputIds", 1, 65, 99), sizes("causalMask", 2, 65, 99)),
            "at least 65 tokens, and its cache holds 64",
        ),
    ],
)
def test_a_package_that_does_not_fit_is_refused_with_the_reason(path: Path, change: Change, words: str):
    edit(path, change)
    with pytest.raises(InputError, match=words):
        StatefulPackage.open(path)


def test_an_inspection_tells_what_a_package_is_or_what_does_not_fit(path: Path):
    good, bad = inspect(path), inspect(edit(path, drop("state", "valueCache")))

    assert good.fits
    assert f"67 tokens, cache of 64, 1 to 64 tokens a call, tokenizer in {path.parent}" in good.text
    assert (bad.fits, "keyCache, not keyCache and valueCache" in bad.text) == (False, True)


def test_the_bounds_of_a_package_are_read_from_its_specification(path: Path):
    edit(path, sizes("causalMask", 3, 1, 40))
    edit(path, sizes("inputIds", 1, 1, -1))
    edit(path, sizes("causalMask", 2, 1, -1))

    found = StatefulPackage.open(path).layout
    assert (found.context, found.least, found.most, found.vocabulary) == (40, 1, 40, VOCABULARY)
    assert (found.source, found.lengths) == ("someone/some-model", ())


def test_a_package_of_links_is_read(path: Path, tmp_path: Path):
    """As the hub's cache keeps files."""
    for index, file in enumerate([part for part in path.rglob("*") if part.is_file()]):
        file.rename(tmp_path / f"blob-{index}")
        file.symlink_to(tmp_path / f"blob-{index}")

    assert engine(path).vocabulary == VOCABULARY


def test_the_names_of_core_ml_pipelines_are_known(path: Path):
    edit(path, rename("input", "inputIds", "input_ids"))
    edit(path, rename("input", "causalMask", "causal_mask"))
    for name in ("key", "value"):
        edit(path, rename("state", f"{name}Cache", f"{name}_cache"))

    found = StatefulPackage.open(path).layout
    assert (found.ids, found.mask, found.context) == ("input_ids", "causal_mask", CONTEXT)


def test_listed_shapes_are_the_lengths_of_calls(path: Path):
    def listed(model: Any) -> None:
        array = feature(model, "input", "inputIds").type.multiArrayType
        array.ClearField("shapeRange")
        for length in (16, 1, CONTEXT + 1):
            array.enumeratedShapes.shapes.add().shape.extend([1, length])

    found = layout(description(ProgramFile(edit(path, listed))), path)
    assert found.lengths == (1, 16)
    assert [found.length(tokens) for tokens in (1, 2, 16, 17)] == [1, 16, 16, 16]


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_specification_never_ends_in_another_error(path: Path, seed: int):
    """Bytes are changed where the protobuf describes inputs, outputs and states."""
    source = random.Random(seed)
    file = ProgramFile(path)
    raw = bytearray(file.description.SerializeToString())
    for _ in range(source.randint(1, 12)):
        raw[source.randrange(len(raw))] = source.randrange(256)
    damaged = type(file.description)()
    try:
        damaged.ParseFromString(bytes(raw))
    except messages().decode_error:
        return
    file.description = damaged
    file.metadata = dict(damaged.metadata.userDefined)
    try:
        found = layout(description(file), path)
    except InputError:
        return
    assert isinstance(found, StatefulLayout)
    assert 1 <= found.least <= found.most <= CONTEXT


class TestTokenizer:
    def test_without_one_the_sentence_says_which_to_put_where(self, path: Path):
        (path.parent / "tokenizer.json").unlink()
        with pytest.raises(InputError, match=rf"put the tokenizer.json of someone/some-model into {path.parent}"):
            StatefulPackage.open(path)

    def test_one_of_the_downloaded_source_is_found(self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        downloaded = tmp_path / "snapshot"
        downloaded.mkdir()
        (path.parent / "tokenizer.json").rename(downloaded / "tokenizer.json")
        asked: list[tuple[str, str]] = []

        def known(id: str, name: str) -> str:
            asked.append((id, name))
            return str(downloaded / name)

        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", known)

        assert StatefulPackage.open(path).tokenizer == downloaded
        assert asked == [("someone/some-model", "tokenizer.json")]

    def test_one_with_more_tokens_than_logits_is_refused(self, path: Path):
        larger = Tokenizer.from_file(str(path.parent / "tokenizer.json"))
        larger.add_special_tokens(["<more>"])
        larger.save(str(path.parent / "tokenizer.json"))

        with pytest.raises(InputError, match=r"has 68 tokens and .* has logits of 67"):
            StatefulPackage.open(path)

    def test_a_broken_one_is_refused(self, path: Path):
        (path.parent / "tokenizer.json").write_text("{}")
        with pytest.raises(InputError, match="is broken"):
            StatefulPackage.open(path)


def test_core_ml_is_called_by_the_library_s_signatures(path: Path, monkeypatch: pytest.MonkeyPatch):
    models = toolchain().coremltools.models
    package = StatefulPackage.open(path)
    executor = ExecutorStates(package, "fp32")
    kind = models.MLModel
    seen: list[Mapping[str, Array]] = []

    def load(*given: Any, **named: Any) -> Mock:
        loaded = create_autospec(kind, instance=True)
        loaded.make_state.side_effect = executor.make_state
        loaded.predict.side_effect = predict
        return loaded

    def predict(data: Mapping[str, Array], state: Any = None) -> Mapping[str, Array]:
        # The library's own requirements on inputs.
        kind._check_predict_data(data)
        seen.append(data)
        return executor.predict(data, state)

    made: Mock = create_autospec(kind, side_effect=load)
    monkeypatch.setattr(models, "MLModel", made)
    forwards = [StatefulForward(package.layout, runtime) for runtime in (CoreMlStates(package), executor)]
    logits = [forward.run(forward.cache(), [1, 2, 3], 2) for forward in forwards]

    assert np.array_equal(logits[0], logits[1])
    assert made.call_args.args == (str(path),)
    assert made.call_args.kwargs["compute_units"].name == "CPU_AND_NE"
    assert all(value.flags.c_contiguous for data in seen for value in data.values())
    assert {value.dtype for data in seen for value in data.values()} == {np.dtype(np.int32), np.dtype(np.float32)}


def test_a_package_that_core_ml_refuses_ends_with_a_sentence(path: Path, monkeypatch: pytest.MonkeyPatch):
    """As coremltools tells it: the model's class warns, and fails at the first call."""
    models = toolchain().coremltools.models

    def load(*given: Any, **named: Any) -> None:
        warnings.warn("You will not be able to run predict() on this Core ML model.", RuntimeWarning, stacklevel=2)

    monkeypatch.setattr(models, "MLModel", create_autospec(models.MLModel, side_effect=load))

    with pytest.raises(InputError, match=r"Core ML can't load .* draft with another model"):
        CoreMlStates(StatefulPackage.open(path))


def test_the_inputs_of_a_call_live_as_long_as_the_engine(path: Path):
    """Core ML releases them later, on a thread of its own."""
    draft = engine(path)
    held: list[Array] = []
    runtime: Any = draft.forward._runtime
    real = runtime.predict
    runtime.predict = lambda inputs, state: (held.extend(inputs.values()), real(inputs, state))[1]
    for _ in range(2):
        draft.open(GREEDY, VOCABULARY).prefill([1, 2, 3])

    assert held[0] is held[2]
    assert held[1] is held[3]


def test_core_ml_runs_packages_only_on_a_mac(path: Path, monkeypatch: pytest.MonkeyPatch):
    package = StatefulPackage.open(path)
    monkeypatch.setattr(runtimes.sys, "platform", "linux")

    assert isinstance(runtimes.open_stateful(package), ExecutorStates)
