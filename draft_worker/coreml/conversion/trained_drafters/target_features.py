"""The states of a target that a drafter reads, recorded over a text: to measure them, and to compare a package with."""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from draft_worker.coreml.arrays import Single
from protocol.errors import InputError
from protocol.inference.tap import proved_tap
from protocol.messages.features import FeatureForm

_MOST = 96
"""Tokens of the text."""
_TEXT = (
    "The largest numbers in the states of a language model stand at its first token, at line breaks and at full stops. "
    "They are hundreds of times larger than the others, and they are the same for every text.\n\n"
    "def largest(states):\n    return max(abs(number) for row in states for number in row)\n\n"
    "1. How tall is Mount Everest?\nIt is 8,849 metres tall; “Chomolungma” is its Tibetan name.\n"
    "2. Wie heißt das auf Deutsch?\nDas ist der höchste Berg der Erde.\n"
)


class TargetFeatures(NamedTuple):
    tokens: list[int]
    rows: Single
    """(tokens, outputs * width): behind each token."""

    @property
    def largest(self) -> float:
        return float(np.abs(self.rows).max())


def target_features(folder: Path, form: FeatureForm) -> TargetFeatures:
    """What the target in `folder` leaves of a text for a drafter of this form. Raises InputError if it can't be had."""
    try:
        loaded: Any = load_model(folder, lazy=True, trust_remote_code=False)
        tokens: list[int] = list(load_tokenizer(folder).encode(_TEXT))[:_MOST]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(f"The target in {folder} can't be loaded ({str(error)[:200]}): download it again.") from error
    network = loaded[0]
    if mx.default_device() == mx.Device(mx.cpu):
        # A processor has fast kernels for float32 alone.
        network = dequantize_model(network)
        network.set_dtype(mx.float32)
    tap = proved_tap(network)
    lack = "its hidden states can't be recorded" if tap is None else tap.taps.lack(form)
    if tap is None or lack:
        raise InputError(f"The target in {folder} does not fit the drafter ({lack}): pass the drafter's own target.")
    tap.record(form.outputs)
    mx.eval(network(mx.array([tokens]), cache=make_prompt_cache(network)))
    recorded = tap.take()
    assert recorded is not None, "every forward is recorded"
    rows = np.array(
        recorded.rows.view(mx.bfloat16).astype(mx.float32)
        if recorded.rows.dtype == mx.uint16
        else recorded.rows.astype(mx.float32)
    )
    if not np.isfinite(rows).all():
        raise InputError(f"The states of the target in {folder} are not finite: download it again.")
    return TargetFeatures(tokens, rows)
