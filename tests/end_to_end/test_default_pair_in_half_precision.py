"""The default pair in the element types of a Mac: levels, joint forwards, and how often rounding decides a token."""

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import dequantize_model

from orchestrator.lab.first_light.widths import sentences
from orchestrator.lab.forwards import TIE, Compared, ForwardOrder, Ties
from orchestrator.lab.forwards_process import examine
from orchestrator.text.tokenizer import TextCodec
from protocol.inference.language_model import LanguageModel
from protocol.inference.stored_model import load_network
from tests.support.default_pair import default_pair
from tests.support.paths import ROOT

PROMPT, PLACES = 32, 40
WIDTHS = (5, 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_rounding_decides_between_nearly_tied_tokens_alone(role: str, kind: mx.Dtype):
    """`-s` prints what was counted; the log has figures of 120 places."""
    with default_pair() as pair:
        folder: Path = getattr(pair, role)
        tokens = tuple(TextCodec(pair.target).encode((ROOT / "README.md").read_text())[: PROMPT + PLACES])
        network, config = load_network(folder)
        network: Any = dequantize_model(network)
        network.set_dtype(kind)
        model = LanguageModel(network, folder, config)
    assert (model.level, model.joins) == ("tree", True), model.level_reason
    order = ForwardOrder(tokens=tokens, prompt=PROMPT, compared=WIDTHS, heads=("own", "float32"))
    reports = list(examine(model, order, time.perf_counter))

    print("", role, kind, *reports, *sentences(reports), sep="\n")
    compared = [one for one in reports if isinstance(one, Compared)]
    assert {one.head for one in compared} == {"own", "float32"}
    assert all((one.gap or 0.0) < TIE for one in compared)
    assert [one.equal for one in reports if isinstance(one, Ties)][1] == 0
