"""What a folder of a trained drafter holds, by its config.json and the headers of its tensors."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.contracts.drafters.description import FINAL, Drafter, Eagle3Form
from protocol.contracts.drafters.detection import is_drafter, read_drafter
from protocol.contracts.model_folder import HEAD_TOKENS, ModelFolder, TargetShape
from protocol.errors import InputError
from tests.support.models.drafter_files import DRAFTED, FORMATS, LAYERS, VOCABULARY, WIDTH, Format, write
from tests.support.paths import DEMO_DRAFT, DEMO_TARGET

TARGET = TargetShape(LAYERS, WIDTH, VOCABULARY)
_LAYER = 16 * WIDTH + 2 * 8 * WIDTH + 16 * WIDTH + 3 * 24 * WIDTH + 2 * WIDTH


def found(folder: Path, form: str) -> Drafter:
    drafter = read_drafter(write(folder, FORMATS[form]()))
    assert drafter is not None
    return drafter


PUBLISHED: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "safeailab": ("eagle3", "SafeAILab", (1, 3, 4)),
    "specforge": ("eagle3", "SafeAILab", (0, 2, 5)),
    "speculators": ("eagle3", "speculators", (1, 3, 4)),
    "deepspec_eagle3": ("eagle3", "DeepSpec", (1, 2, 3, 4, 5)),
    "dflash": ("dflash", "z-lab", (1, 3, 5)),
    "dspark": ("dspark", "DeepSpec", (1, 3, 5)),
    "specforge_dspark": ("dspark", "SpecForge", (1, 3, 5)),
    "deepspec_dflash": ("dflash", "DeepSpec", (1, 3, 5)),
    "speculators_layers": ("eagle3", "speculators", (1, 3, 4)),
    "speculators_peagle": ("peagle", "speculators", (1, 3, 4)),
    "dflash2": ("dflash2", "z-lab", (1, 3, 5)),
    "speculators_dflash": ("dflash", "speculators", (1, 3, 5)),
    "speculators_dspark": ("dspark", "speculators", (1, 3, 5)),
    "speculators_dflash2": ("dflash2", "speculators", (1, 3, 5)),
    "qwen_mtp": ("mtp", "Qwen", (FINAL,)),
    "deepseek_mtp": ("mtp", "DeepSeek", (FINAL,)),
}
"""Kind, format, and outputs of `TARGET`."""


@pytest.mark.parametrize("form", FORMATS)
def test_each_published_format_is_recognised(tmp_path: Path, form: str):
    drafter = found(tmp_path, form)

    assert (drafter.kind, drafter.format, drafter.outputs(TARGET)) == PUBLISHED[form]
    assert drafter.target_vocabulary == VOCABULARY
    assert drafter.misfit(TARGET) == ""


@pytest.mark.parametrize("form", ["safeailab", "dflash", "dspark"])
def test_tensors_may_be_named_as_parts_of_a_model(tmp_path: Path, form: str):
    config, tensors = FORMATS[form]()
    plain = found(tmp_path / "plain", form)

    assert read_drafter(write(tmp_path / "model", (config, {f"model.{name}": each for name, each in tensors.items()})))
    assert plain == read_drafter(tmp_path / "model")


def test_a_short_head_of_the_target_s_is_read(tmp_path: Path):
    config, tensors = lacking("lm_head.weight")(changed(draft_vocab_size=None)(FORMATS["safeailab"]()))
    write(tmp_path, (config, tensors))
    np.save(tmp_path / HEAD_TOKENS, np.arange(0, VOCABULARY, 4, dtype=np.int32))
    short = read_drafter(tmp_path)

    assert short is not None
    assert isinstance(short.form, Eagle3Form)
    assert (short.form.head_size, short.misfit(TARGET)) == (VOCABULARY // 4, "")
    for damaged in (b"no numbers", b"", b"PK\x03\x04"):
        (tmp_path / HEAD_TOKENS).write_bytes(damaged)
        with pytest.raises(InputError, match=r"head_tokens.npy can't be read"):
            read_drafter(tmp_path)


def test_an_ordinary_model_is_no_drafter():
    assert [read_drafter(folder) for folder in (DEMO_TARGET, DEMO_DRAFT)] == [None, None]


def test_a_language_model_with_an_mtp_head_is_a_language_model_unless_its_head_is_asked_for(tmp_path: Path):
    config, tensors = FORMATS["qwen_mtp"]()
    body = {"model.layers.0.self_attn.q_proj.weight": (16, WIDTH), "model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    folder = write(tmp_path, (config, tensors | body))
    head = read_drafter(folder, with_own_head=True)

    assert read_drafter(folder) is None
    assert head is not None
    assert (head.kind, head.parameters) == ("mtp", _LAYER + 2 * WIDTH * WIDTH + 3 * WIDTH)


def test_the_head_that_a_conversion_left_out_is_missed(tmp_path: Path):
    config, _ = FORMATS["qwen_mtp"]()
    folder = write(tmp_path, (config, {"model.layers.0.self_attn.q_proj.weight": (16, WIDTH)}))

    with pytest.raises(InputError, match="conversions to MLX leave them out"):
        read_drafter(folder, with_own_head=True)


@pytest.mark.parametrize(
    ("form", "target", "reason"),
    [
        ("safeailab", TARGET._replace(width=32), "states of 16 numbers, and the target's have 32"),
        ("safeailab", TARGET._replace(vocabulary=50), "its target knows 40 tokens, and this one knows 50"),
        ("safeailab", TARGET._replace(layers=5), "coincide in a target of 5 layers"),
        ("dspark", TARGET._replace(layers=12), "its target has 8 layers, and this one has 12"),
        ("specforge", TARGET._replace(layers=4), "output of layer 5, counted from 0, and the target has 4 layers"),
    ],
)
def test_a_drafter_of_another_target_does_not_fit(tmp_path: Path, form: str, target: TargetShape, reason: str):
    assert reason in found(tmp_path, form).misfit(target)


def changed(**changes: Any) -> Callable[[Format], Format]:
    return lambda given: (given[0] | changes, given[1])


def nested(**changes: Any) -> Callable[[Format], Format]:
    return lambda given: (given[0] | {"dflash_config": given[0]["dflash_config"] | changes}, given[1])


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Format], Format]:
    return lambda given: (given[0], given[1] | {name: shape})


def lacking(name: str) -> Callable[[Format], Format]:
    return lambda given: (given[0], {key: shape for key, shape in given[1].items() if key != name})


DAMAGES: list[tuple[str, Callable[[Format], Format], str]] = [
    ("safeailab", changed(hidden_size=0), "hidden_size 0"),
    ("safeailab", changed(vocab_size="many"), "vocab_size 'many'"),
    ("safeailab", changed(draft_vocab_size=VOCABULARY + 1), "drafts 41 of 40 tokens"),
    ("safeailab", changed(eagle_config=3), "eagle_config 3"),
    ("safeailab", changed(eagle_config={"eagle_aux_hidden_state_layer_ids": [5, 2, 1]}), "ascending order"),
    ("safeailab", changed(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}), "2 outputs"),
    ("safeailab", changed(hidden_act="relu"), "hidden_act 'relu'"),
    ("safeailab", changed(model_type="gemma4_text"), "model_type 'gemma4_text'"),
    ("safeailab", changed(num_key_value_heads=3), "4 heads of 4 numbers don't fit 3 KV heads"),
    ("safeailab", changed(norm_before_fc=True, fc_norm=True), "exclude"),
    ("safeailab", changed(rope_parameters={"rope_theta": "much"}), "rotary"),
    ("safeailab", changed(target_hidden_size=24), "has the shape"),
    ("safeailab", lacking("fc.weight"), "lacks the tensor fc.weight"),
    ("safeailab", lacking("d2t"), "lacks the tensor d2t"),
    ("safeailab", lacking("lm_head.weight"), "no head of its own"),
    ("safeailab", reshaped("fc.weight", (WIDTH, 4 * WIDTH)), "does not say which outputs it reads"),
    ("safeailab", reshaped("fc.weight", (WIDTH, 3 * WIDTH + 1)), "fc.weight has the shape"),
    ("safeailab", reshaped("fc.weight", (WIDTH,)), r"has the shape \(16,\)"),
    (
        "safeailab",
        reshaped("midlayer.self_attn.q_proj.weight", (16, WIDTH)),
        r"has the shape \(16, 16\), and its config.json says \(16, 32\)",
    ),
    ("safeailab", reshaped("lm_head.weight", (DRAFTED + 1, WIDTH)), "lm_head.weight has the shape"),
    ("speculators", changed(transformer_layer_config=[]), r"transformer_layer_config \[\]"),
    ("speculators", changed(eagle_aux_hidden_state_layer_ids=[0, 3, 4]), "target's embedding"),
    ("speculators", changed(speculators_model_type="peagle"), "lacks the tensor mask_hidden"),
    ("speculators", changed(speculators_model_type="hydra"), "of the kind hydra"),
    ("speculators_layers", lacking("layers.2.self_attn.q_proj.weight"), r"lacks the tensor layers\.2"),
    ("speculators_layers", reshaped("layers.1.self_attn.q_proj.weight", (16, 32)), r"config.json says \(16, 16\)"),
    ("speculators_peagle", reshaped("mask_hidden", (1, 1, WIDTH)), "mask_hidden has the shape"),
    ("speculators_peagle", changed(mask_token_id=VOCABULARY), "mask_token_id 40 is beyond its 40 tokens"),
    ("safeailab", changed(num_hidden_layers=2), r"lacks the tensor layers\.1\.self_attn\.q_proj\.weight"),
    ("safeailab", changed(num_hidden_layers=65), "num_hidden_layers 65"),
    ("dflash", changed(num_hidden_layers=1 << 20), "num_hidden_layers 1048576"),
    ("deepspec_eagle3", changed(target_layer_ids=[-1, 2]), "target's embedding"),
    ("dflash", changed(block_size=4096), "block_size 4096"),
    ("dflash", changed(dflash_config={}), "missing required field `target_layer_ids`"),
    ("dflash", changed(num_hidden_layers=3), r"lacks the tensor layers\.2"),
    ("dflash", changed(num_target_layers=5), r"outputs \(1, 3, 5\), counted from 0, of a target of 5"),
    ("dflash2", nested(conv_group_size=5), "conv_group_size 5 don't fit blocks of 8 tokens and a width of 16"),
    ("dflash2", nested(conv_kernel_size=9), "conv_kernel_size 9"),
    ("dflash2", nested(selector_rank=None), "without a rank"),
    ("speculators_dflash2", changed(draft_vocab_size=DRAFTED), "among 24 of 40 tokens"),
    ("speculators_dflash", changed(draft_vocab_size=VOCABULARY + 1), "drafts 41 of 40 tokens"),
    ("speculators_dflash", lacking("d2t"), "lacks the tensor d2t"),
    ("speculators_dflash", changed(aux_hidden_state_layer_ids=[0, 2]), "target's embedding"),
    ("dspark", changed(markov_rank=-1), "markov_rank -1"),
    ("dspark", changed(mask_token_id=VOCABULARY), "mask token 40 is beyond its 40"),
    ("dspark", changed(markov_head_type="quantum"), "markov_head_type"),
    ("dspark", changed(hidden_size=64), "has the shape"),
    ("dflash", changed(target_hidden_size=24), "has the shape"),
    ("dflash", changed(hidden_act="gelu"), "hidden_act"),
    ("dflash", changed(num_key_value_heads=3), "4 heads of 4 numbers don't fit 3 KV heads"),
    ("dflash", changed(layer_types=["sliding_attention"]), "layer_types fit neither"),
    ("dflash", changed(attention_sink_bias=True), "attention_sink_bias, a variant"),
    ("dflash", nested(attention_sink_bias=True), "a variant"),
    ("dflash", nested(projector_type="domino"), "'domino', a variant"),
    ("dflash", nested(use_swa=True), r"windows \(use_swa\) of no size"),
    ("qwen_mtp", reshaped("mtp.fc.weight", (WIDTH, WIDTH)), r"mtp\.fc\.weight has the shape"),
    ("qwen_mtp", changed(model_type="mimo"), "its architecture is 'mimo'; known ones are qwen3_next, "),
    ("qwen_mtp", changed(mtp_num_hidden_layers=4), "mtp_num_hidden_layers = 4"),
    ("deepseek_mtp", changed(num_nextn_predict_layers=9), "num_nextn_predict_layers = 9"),
]


@pytest.mark.parametrize(("form", "damage", "reason"), DAMAGES)
def test_what_does_not_fit_together_gets_a_sentence(
    tmp_path: Path, form: str, damage: Callable[[Format], Format], reason: str
):
    with pytest.raises(InputError, match=reason) as told:
        read_drafter(write(tmp_path, damage(FORMATS[form]())))

    assert str(tmp_path) in str(told.value)
    assert str(told.value).endswith(".")


def test_weights_that_can_run_code_are_not_opened(tmp_path: Path):
    config, _ = FORMATS["safeailab"]()
    folder = write(tmp_path, (config, {}))
    (folder / "pytorch_model.bin").write_bytes(b"anything")

    with pytest.raises(InputError, match=r"without model\.safetensors"):
        read_drafter(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_none_gets_a_sentence(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(InputError, match="download the model again"):
        _ = ModelFolder(tmp_path).config
    assert not is_drafter(tmp_path)


def test_quantised_tensors_count_as_what_they_stand_for(tmp_path: Path):
    config, tensors = FORMATS["qwen_mtp"]()
    plain = read_drafter(write(tmp_path / "plain", (config, tensors)))
    folder = write(tmp_path / "quantised", (config | {"quantization": {"bits": 4, "group_size": 32}}, tensors))
    header = {
        "mtp.fc.weight": {"dtype": "U32", "shape": [WIDTH, WIDTH // 4], "data_offsets": [0, 0]},
        "mtp.fc.scales": {"dtype": "F16", "shape": [WIDTH, 1], "data_offsets": [0, 0]},
        "mtp.fc.biases": {"dtype": "F16", "shape": [WIDTH, 1], "data_offsets": [0, 0]},
    }
    written = json.dumps(header).encode()
    # Later files win: this one stands for the same tensor.
    (folder / "model-2.safetensors").write_bytes(len(written).to_bytes(8, "little") + written)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")

    quantised = read_drafter(folder)
    assert plain is not None
    assert quantised is not None
    assert quantised.parameters == plain.parameters


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(form=st.sampled_from(sorted(FORMATS)), seed=st.integers(0, 10**6))
def test_a_fuzzed_folder_is_read_or_gets_a_sentence(tmp_path: Path, form: str, seed: int):
    draw = random.Random(seed)
    config, tensors = FORMATS[form]()
    values: list[Any] = [None, -1, 0, 1, 2**70, 1.5, "x", [], [1], ["a"], {}, {"a": 1}, True]
    for key in draw.sample(sorted(config), draw.randint(0, min(3, len(config)))):
        config[key] = draw.choice(values)
    for name in draw.sample(sorted(tensors), draw.randint(0, min(3, len(tensors)))):
        tensors[name] = draw.choice([(), (1,), (2, 2), (1, 2, 3), (0, 5)])
    for name in draw.sample(sorted(tensors), draw.randint(0, min(3, len(tensors)))):
        del tensors[name]
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    folder = write(tmp_path, (config, tensors))
    weights = folder / "model.safetensors"
    if weights.is_file() and draw.random() < 0.3:
        content = bytearray(weights.read_bytes())
        content[draw.randrange(min(200, len(content)))] = draw.randrange(256)
        weights.write_bytes(content[: draw.randint(0, len(content))])

    told = ""
    try:
        drafter = read_drafter(folder, with_own_head=draw.random() < 0.5)
        told = str(tmp_path) if drafter is None else f"{tmp_path}{drafter.misfit(TARGET)}"
    except InputError as error:
        told = str(error)
    assert str(tmp_path) in told
