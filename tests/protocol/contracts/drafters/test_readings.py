"""How each key of a published config was read."""

from pathlib import Path
from typing import Any

import pytest

from protocol.contracts.drafters.readings import keys_as_read
from tests.support.models.drafter_files import FORMATS, write

STATED: list[tuple[str, dict[str, Any], str, str]] = [
    ("safeailab", {}, "rope_theta", "rope base 10000.0"),
    ("specforge", {}, "eagle_config.eagle_aux_hidden_state_layer_ids", "outputs (0, 2, 5)"),
    ("speculators", {}, "eagle_aux_hidden_state_layer_ids", "outputs (1, 3, 4)"),
    ("speculators_dflash", {}, "aux_hidden_state_layer_ids", "outputs (1, 3, 5)"),
    ("speculators_dflash", {}, "transformer_layer_config.hidden_size", "other values are refused"),
    ("speculators_peagle", {}, "speculators_config.proposal_methods.0.speculative_tokens", "depths 6"),
    ("dflash", {}, "dflash_config.mask_token_id", "mask token 39"),
    ("dflash", {"dflash_config": {**FORMATS["dflash"]()[0]["dflash_config"], "block_size": 16}}, "block_size", ""),
    ("dflash", {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta", ""),
    ("dflash", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta", "rope base 1000000.0"),
    ("dflash2", {}, "is_causal", "causal none"),
    ("dspark", {}, "num_anchors", ""),
    ("qwen_mtp", {}, "vocab_size", "target vocabulary 40"),
    ("qwen_mtp", {}, "rms_norm_eps", "left to the target's architecture"),
]
"""Format, changes of its config, a key, and what it states; nothing: it is not used."""


@pytest.mark.parametrize(("form", "changes", "key", "use"), STATED)
def test_a_key_states_what_would_be_another_drafter_with_another_value(
    form: str, changes: dict[str, Any], key: str, use: str, tmp_path: Path
):
    config, tensors = FORMATS[form]()
    found = {name: stated for name, _, stated in keys_as_read(write(tmp_path, (config | changes, tensors)))}

    assert found[key] == use
    assert {name.partition(".")[0] for name in found} == {
        name for name, value in (config | changes).items() if value is not None
    }
