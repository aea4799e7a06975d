"""No float32 enters a drafter that has none, whatever half type its target has: one such number makes float32 of all
that follows, and a GPU then casts every weight in every step. In each type trees give what their paths give."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.drafters import files, token_ends
from draft_worker.engine_interface import Batch
from protocol.contracts.drafters.detection import read_drafter
from protocol.contracts.model_folder import HEAD_TOKENS
from protocol.inference import language_model
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup
from tests.support.element_types import let_experts_run_in_half, watch
from tests.support.models import drafter_files, eagle3_folders, mtp_folders
from tests.support.models.tiny_models import VOCABULARY
from tests.support.models.trained_drafters import (
    BLOCK_KINDS,
    SHORT_HEAD,
    pack_as_speculators,
    random_features,
    write_block_folder,
    write_target,
)

BF16, FP16, F32 = mx.bfloat16, mx.float16, mx.float32
ENDS = ("embed_tokens.weight", "lm_head.weight")
Write = Callable[[Path, Path], object]
"""The folders of a drafter and of its target."""


def block(kind: str, folder: Path, target: Path) -> None:
    write_block_folder(folder, kind, write_target(target))


def speculators(kind: str, folder: Path, target: Path) -> None:
    block(kind, folder, target)
    pack_as_speculators(folder, target, None if kind == "DFlash2" else SHORT_HEAD)


def eagle3(write: Callable[..., Path], borrowed: tuple[str, ...], folder: Path, target: Path, **changes: Any) -> None:
    change(write(folder, **changes), lambda name, values: {} if name in borrowed else {name: values})
    sizes = {"hidden_size": drafter_files.WIDTH, "vocab_size": drafter_files.VOCABULARY}
    write_target(target, num_hidden_layers=drafter_files.LAYERS, **sizes)


def mtp(name: str, folder: Path, target: Path) -> None:
    folder.mkdir()
    mtp_folders.write_mtp(folder, name)
    write_target(target, hidden_size=mtp_folders.WIDTH, vocab_size=mtp_folders.VOCABULARY)


def short_head(folder: Path, target: Path) -> None:
    write_target(folder, tie_word_embeddings=True)
    np.save(folder / HEAD_TOKENS, SHORT_HEAD)
    write_target(target)


TRAINED: dict[str, Write] = {
    **{kind: partial(block, kind) for kind in BLOCK_KINDS},
    **{f"speculators, {kind}": partial(speculators, kind) for kind in ("z-lab", "vanilla", "DFlash2")},
    **{f"MTP, {name}": partial(mtp, name) for name in mtp_folders.ARCHITECTURES},
    "P-EAGLE": partial(eagle3, eagle3_folders.peagle, ()),
    "EAGLE-3": partial(eagle3, eagle3_folders.safe_ai_lab, ENDS[:1]),
    "EAGLE-3, several layers": partial(eagle3, eagle3_folders.several_layers, ()),
    "EAGLE-3, DeepSpec": partial(eagle3, eagle3_folders.deep_spec, ENDS),
    "EAGLE-3.1": partial(eagle3, eagle3_folders.safe_ai_lab, ENDS[:1], norm_output=True, norm_before_residual=True),
}
KINDS = TRAINED | {
    "language model": lambda *folders: [write_target(each) for each in folders],
    "short head": short_head,
}
CASES = [
    *(
        pytest.param(name, *pair, id=f"{name}, {', '.join(map(str, pair))}")
        for name in KINDS
        for pair in ((BF16, BF16), (BF16, FP16), (FP16, BF16))
    ),
    *(pytest.param(name, BF16, FP16, ("affine", "affine"), id=f"{name}, quantised") for name in KINDS),
    *(pytest.param(name, FP16, FP16, ("affine", "mxfp4"), id=f"{name}, MXFP4") for name in KINDS),
    *(
        pytest.param(name, BF16, F32, ("", ""), wide, id=f"{name}, {wide[0]} in float32")
        for name, wide in [*((name, ("norm",)) for name in TRAINED), ("vanilla", ENDS)]
    ),
]


@pytest.fixture(autouse=True)
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: weights stay in the types that they are stored in."""
    for module in (files, token_ends, language_model):
        monkeypatch.setattr(module, "ready_for_processor", lambda _: None)
    let_experts_run_in_half(monkeypatch)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("name", "kind", "of_target", "packed", "wide"),
    [pytest.param(*case.values, *(("", ""), ())[len(case.values) - 3 :], id=case.id) for case in CASES],
)
def test_outputs_logits_kv_and_inputs_have_the_weights_type(
    name: str,
    kind: mx.Dtype,
    of_target: mx.Dtype,
    packed: tuple[str, str],
    wide: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """`packed`: how matrices of the drafter and of the target are quantised. `wide`: parts of names of tensors of the
    drafter that are stored in float32."""
    seen = watch(monkeypatch)
    engine = loaded(KINDS[name], tmp_path, (kind, of_target), packed, wide)
    seen.clear()
    sequence = opened(engine, 8)
    sequence.evaluate(batch(sequence, (1, 2, 3), (-1, 0, 0)))
    feed(sequence, engine, 8, 17)
    sequence.evaluate(batch(sequence, (5, 6), (-1, 0), (4,)))
    feed(sequence, engine, 17, 21)
    sequence.evaluate(batch(sequence, (7,), (-1,)))
    opened(engine, 0).evaluate(batch(sequence, (1,), (-1,)))

    assert len(seen) > 5
    assert {element for _, element in seen} == {kind}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kind", "rounding"), [(F32, 1e-4), (FP16, 0.05), (BF16, 0.05)])
@pytest.mark.parametrize("name", TRAINED)
def test_trees_alone_and_together_give_what_their_paths_give(
    name: str, kind: mx.Dtype, rounding: float, tmp_path: Path
):
    engine = loaded(TRAINED[name], tmp_path, (kind, kind))
    path, alone, *both = (opened(engine, 20) for _ in range(4))
    expected = path.evaluate(batch(path, (7, 9), (-1, 0)))[1]
    found = engine.evaluate_together([(each, batch(each, (7, 8, 9, 11), (-1, 0, 0, 0))) for each in both])
    found.append(alone.evaluate(batch(alone, (7, 8, 9, 11), (-1, 0, 0, 0))))

    right = dict(zip(expected.tokens, expected.probabilities, strict=True))
    for _, _, each, _ in found:
        shares = dict(zip(each.tokens, each.probabilities, strict=True))
        assert sum(abs(shares.get(token, 0) - right.get(token, 0)) for token in {*shares, *right}) < 2 * rounding


def change(folder: Path, changed: Callable[[str, mx.array], dict[str, mx.array]]) -> None:
    stored: Any = mx.load(str(folder / "model.safetensors"))
    found = {new: each for name, values in stored.items() for new, each in changed(name, values).items()}
    mx.eval(found)
    mx.save_safetensors(str(folder / "model.safetensors"), found, {"format": "mlx"})


def hold(folder: Path, kind: mx.Dtype, packed: str = "", wide: tuple[str, ...] = ()) -> None:
    """Store floats in this type, but for those with one of `wide` in their names; `packed`: matrices quantised so."""

    def changed(name: str, values: mx.array) -> dict[str, mx.array]:
        if not mx.issubdtype(values.dtype, mx.floating):
            return {name: values}
        values = values.astype(F32 if any(each in name for each in wide) else kind)
        apart = any(each in name for each in ("expert", "kv_b_proj", "eh_proj"))
        if not packed or apart or not name.endswith(("proj.weight", *ENDS)) or values.shape[-1] % 32:
            return {name: values}
        parts = zip(("weight", "scales", "biases"), mx.quantize(values, 32, 4, packed), strict=False)
        return {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts}

    change(folder, changed)
    if packed:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        config["quantization"] = {"group_size": 32, "bits": 4, "mode": packed}
        (folder / "config.json").write_text(json.dumps(config))


def loaded(
    write: Write,
    root: Path,
    kinds: tuple[mx.Dtype, mx.Dtype],
    packed: tuple[str, str] = ("", ""),
    wide: tuple[str, ...] = (),
) -> Any:
    """The engine of a drafter, beside its target."""
    folder, target = root / "drafter", root / "target"
    write(folder, target)
    hold(folder, kinds[0], packed[0], wide)
    hold(target, kinds[1], packed[1])
    drafter = read_drafter(folder, with_own_head=True)
    engine = "mlx" if drafter is None else drafter.engine
    names: Any = {"engine": engine, "model": str(folder), "target": str(target)}
    setup = WorkerSetup(address="", epoch=0, incarnation=0, **names)
    return import_module(f"draft_worker.engines.{engine}").load(setup)


def opened(engine: Any, fed: int) -> Any:
    """A sequence of 20 tokens, the first of which have features."""
    sequence = engine.open(Sampling(temperature=1.0, seed=1), VOCABULARY)
    sequence.prefill(range(20))
    feed(sequence, engine, 0, fed)
    return sequence


def feed(sequence: Any, engine: Any, first: int, stop: int) -> None:
    if engine.features is not None and stop > first:
        sequence.feed(first, random_features(stop, engine.features.elements)[first:])


def batch(sequence: Any, tokens: tuple[int, ...], parents: tuple[int, ...], committed: tuple[int, ...] = ()) -> Batch:
    """`parents`: places in `tokens`."""
    first = sequence.next_row + len(committed)
    return Batch(committed, tokens, [each if each < 0 else first + each for each in parents], VOCABULARY)
