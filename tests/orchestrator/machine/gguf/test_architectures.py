"""A GGUF file of each architecture gives the tokens of the mlx-lm model that it was written from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import dequantize_model

from orchestrator.machine.checkpoints import gguf_files
from orchestrator.machine.gguf import folder as folder_module
from orchestrator.machine.gguf import weights as weights_module
from orchestrator.machine.gguf.folder import convert_gguf
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.inference.stored_model import load_network
from tests.support.models.architectures import tiny
from tests.support.models.gguf_files import gguf_name, vocabulary, weights, write_gguf
from tests.support.models.tiny_models import greedy, stock_logits

PROMPT = [104, 101, 108, 108, 111, 32, 119, 7, 200]


class Case(NamedTuple):
    """`metadata`: from the arguments of the tiny model, beside the common entries; `changes`: to it."""

    model: str
    metadata: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    changes: Mapping[str, Any] = {}
    permuted: bool = False
    norm_offset: float = 0.0
    laid: Callable[[dict[str, Any], Any], dict[str, Any]] = lambda arrays, _: arrays
    """mlx-lm's arrays, by the names there, as llama.cpp's converter has them; names in `blk.` are a file's."""


def sparse(a: Any, count: str, width: str) -> dict[str, Any]:
    return {
        "expert_count": getattr(a, count),
        "expert_used_count": a.num_experts_per_tok,
        "expert_feed_forward_length": getattr(a, width),
    }


def scales(a: Any) -> dict[str, Any]:
    return {
        "attention.scale": float(a.attention_multiplier),
        "embedding_scale": float(a.embedding_multiplier),
        "residual_scale": float(a.residual_multiplier),
        "logit_scale": float(a.logits_scaling),
    }


def delta(arrays: dict[str, Any], a: Any) -> dict[str, Any]:
    """Of Gated DeltaNet. Qwen3-Next has its heads in order, and one projection for both gates."""
    found: dict[str, Any] = {}
    next_model, keys = a.model_type == "qwen3_next", a.linear_num_key_heads
    per_key, sizes = a.linear_num_value_heads // keys, (a.linear_key_head_dim, a.linear_value_head_dim)
    for full, array in arrays.items():
        name, place = full.removeprefix("language_model."), f"blk.{full.split('layers.')[-1].split('.')[0]}"
        last = name.rpartition("linear_attn.")[2]
        if "conv1d" in name:
            array = array[..., 0]
        elif last == "A_log":
            array = -np.exp(array)
        elif name.endswith("shared_expert_gate.weight"):
            array = array[0]
        if last == "in_proj_qkvz.weight":
            groups = array.reshape(keys, -1, array.shape[-1])
            parts = np.split(groups, np.cumsum([sizes[0], sizes[0], per_key * sizes[1]]), axis=1)
            flat = [part.reshape(-1, array.shape[-1]) for part in parts]
            found[f"{place}.attn_qkv.weight"], found[f"{place}.attn_gate.weight"] = np.concatenate(flat[:3]), flat[3]
            continue
        one = last in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")
        heads = a.linear_num_value_heads * (1 if one else sizes[1])
        if not next_model and last == "out_proj.weight":
            grouped = array.reshape(len(array), keys, per_key, -1)
            array = grouped.swapaxes(1, 2).reshape(array.shape)
        elif not next_model and last != name and last != "norm.weight":
            first, values = np.split(array, [len(array) - heads])
            grouped = values.reshape(keys, per_key, -1, *array.shape[1:])
            array = np.concatenate([first, grouped.swapaxes(0, 1).reshape(values.shape)])
        found[name] = array
    return found


HEADS = {"linear_num_value_heads": 6, "linear_num_key_heads": 2, "linear_key_head_dim": 16}


def deltas(a: Any) -> dict[str, Any]:
    moe = sparse(a, "num_experts", "moe_intermediate_size") if a.num_experts else {}
    return {
        **moe,
        **({"expert_shared_feed_forward_length": a.shared_expert_intermediate_size} if moe else {}),
        "attention.key_length": a.head_dim,
        "rope.dimension_count": a.head_dim // 2,
        "rope.dimension_sections": [3, 3, 2, 0],
        "ssm.conv_kernel": a.linear_conv_kernel_dim,
        "ssm.state_size": a.linear_key_head_dim,
        "ssm.group_count": a.linear_num_key_heads,
        "ssm.time_step_rank": a.linear_num_value_heads,
        "ssm.inner_size": a.linear_num_value_heads * a.linear_value_head_dim,
        "full_attention_interval": a.full_attention_interval,
    }


def routed(a: Any) -> dict[str, Any]:
    return {
        **sparse(a, "n_routed_experts", "moe_intermediate_size"),
        "expert_shared_count": a.n_shared_experts,
        "leading_dense_block_count": a.first_k_dense_replace,
        "expert_weights_scale": float(a.routed_scaling_factor),
        "expert_group_count": a.n_group,
        "expert_group_used_count": a.topk_group,
    }


def latent(a: Any, **entries: Any) -> dict[str, Any]:
    return {
        **routed(a),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": a.kv_lora_rank,
        "attention.q_lora_rank": a.q_lora_rank,
        "attention.key_length": a.kv_lora_rank + a.qk_rope_head_dim,
        "attention.value_length": a.kv_lora_rank,
        "attention.key_length_mla": a.qk_nope_head_dim + a.qk_rope_head_dim,
        "attention.value_length_mla": a.v_head_dim,
        "rope.dimension_count": a.qk_rope_head_dim,
        **entries,
    }


def split_keys(arrays: dict[str, Any], a: Any) -> dict[str, Any]:
    """Keys (transposed) and values of each head apart from one another."""
    found = {}
    for name, array in arrays.items():
        if "kv_b_proj" not in name:
            found[name] = array
            continue
        heads = array.reshape(a.num_attention_heads, -1, a.kv_lora_rank)
        keys, values = np.split(heads, [a.qk_nope_head_dim], axis=1)
        place = f"blk.{name.split('.')[2]}"
        found |= {f"{place}.attn_k_b.weight": keys.swapaxes(1, 2), f"{place}.attn_v_b.weight": values}
    return found


def gemma3n(arrays: dict[str, Any], a: Any) -> dict[str, Any]:
    """The projections of the other streams one behind the other."""
    found: dict[str, Any] = {}
    for full, array in arrays.items():
        name = full.replace("language_model.", "")
        stem = next((stem for stem in ("altup_projections", "altup_unembed_projections") if stem in name), None)
        if stem is not None:
            short = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}[stem]
            found.setdefault(f"{short}.weight", []).append(array)
        elif name.endswith("correct_output_scale"):
            found[f"blk.{name.split('.')[2]}.altup_correct_scale.weight"] = array
        else:
            found[name] = array
    return {name: np.stack(array) if isinstance(array, list) else array for name, array in found.items()}


def gemma4(arrays: dict[str, Any], a: Any) -> dict[str, Any]:
    """Gate and up of the experts in one; in front, how much of a head of full attention is rotated."""
    found: dict[str, Any] = {}
    special = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    special["layer_scalar"] = "layer_output_scale.weight"
    for name, array in arrays.items():
        place, _, inner = name.removeprefix("model.layers.").partition(".")
        if "switch_glu.gate_proj" in name:
            both = [array, arrays[name.replace("gate_proj", "up_proj")]]
            found[f"blk.{place}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
        elif "switch_glu.up_proj" not in name:
            found[f"blk.{place}.{special[inner]}" if inner in special else name] = array
    factors = [1.0] * (a.global_head_dim // 8) + [1e30] * (3 * a.global_head_dim // 8)
    return {**found, "rope_freqs.weight": np.array(factors, np.float32)}


def windows(a: Any) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in a.layer_types]
    first_shared = a.num_hidden_layers - a.num_kv_shared_layers
    full_heads = a.num_global_key_value_heads if a.attention_k_eq_v else a.num_key_value_heads
    moe = {"num_experts": a.num_experts} if a.enable_moe_block else {}
    return {
        "attention.head_count_kv": [a.num_key_value_heads if each else full_heads for each in kinds],
        "feed_forward_length": [a.intermediate_size * (1 + (layer >= first_shared)) for layer in range(len(kinds))],
        "attention.key_length": a.global_head_dim,
        "attention.key_length_swa": a.head_dim,
        "attention.sliding_window": a.sliding_window,
        "attention.sliding_window_pattern": kinds,
        "attention.shared_kv_layers": a.num_kv_shared_layers,
        "embedding_length_per_layer_input": a.hidden_size_per_layer_input,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": a.global_head_dim,
        "final_logit_softcapping": a.final_logit_softcapping,
        **({"expert_count": a.num_experts, "expert_used_count": a.top_k_experts} if moe else {}),
        **({"expert_feed_forward_length": a.moe_intermediate_size} if moe else {}),
    }


def altup(a: Any) -> dict[str, Any]:
    return {
        "attention.key_length": a.head_dim,
        "attention.sliding_window": a.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in a.layer_types],
        "attention.shared_kv_layers": a.num_kv_shared_layers,
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(each) if each else -np.inf for each in a.activation_sparsity_pattern
        ],
        "altup.active_idx": a.altup_active_idx,
        "altup.num_inputs": a.altup_num_inputs,
        "embedding_length_per_layer_input": a.hidden_size_per_layer_input,
    }


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "type": "longrope",
    "long_factor": [2.0 + i for i in range(8)],
    "short_factor": [1.0 + i / 4 for i in range(8)],
}


def llama3(arrays: dict[str, Any], a: Any) -> dict[str, Any]:
    """The factors that the rule made."""
    rope = tiny("llama", rope_scaling=LLAMA3, rope_theta=500_000.0).layers[0].self_attn.rope
    bases = 500_000.0 ** (np.arange(0, a.head_dim, 2) / a.head_dim)
    return {**arrays, "rope_freqs.weight": (np.array(rope._freqs) / bases).astype(np.float32)}


def longrope(arrays: dict[str, Any], _: Any) -> dict[str, Any]:
    factors = {f"rope_factors_{kind}.weight": LONGROPE[f"{kind}_factor"] for kind in ("long", "short")}
    return {**arrays, **{name: np.array(values, np.float32) for name, values in factors.items()}}


GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
CASES = {
    "qwen3moe": Case(
        "qwen3_moe",
        lambda a: sparse(a, "num_experts", "moe_intermediate_size"),
        {"mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "gemma": Case("gemma", norm_offset=1.0),
    "gemma2": Case(
        "gemma2", lambda a: {"attention.key_length": a.head_dim}, {"query_pre_attn_scalar": 16}, norm_offset=1.0
    ),
    "gemma3": Case(
        "gemma3_text",
        lambda a: {"attention.sliding_window": a.sliding_window, "attention.key_length": a.head_dim},
        {"sliding_window_pattern": 6, "num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 16},
        norm_offset=1.0,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        lambda a: {
            **sparse(a, "num_local_experts", "intermediate_size"),
            **{"attention.sliding_window": a.sliding_window, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.original_context_length": 32,
        },
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "granite": Case("granite", scales, GRANITE, permuted=True),
    "granitemoe": Case(
        "granitemoe",
        lambda a: {**scales(a), **sparse(a, "num_local_experts", "intermediate_size")},
        GRANITE,
        permuted=True,
    ),
    "lfm2": Case(
        "lfm2",
        lambda a: {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": a.conv_L_cache},
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        lambda a: {
            **sparse(a, "num_experts", "moe_intermediate_size"),
            "attention.head_count_kv": [0, 2, 0, 2],
            "shortconv.l_cache": a.conv_L_cache,
            "leading_dense_block_count": a.num_dense_layers,
            "expert_gating_func": 2,
        },
        {"num_dense_layers": 1, "norm_topk_prob": True, "use_expert_bias": True},
    ),
    "glm4": Case(
        "glm4",
        lambda a: {"rope.dimension_count": a.head_dim // 2},
    ),
    "mistral3": Case(
        "ministral3",
        lambda a: {
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": a.rope_parameters["factor"]},
            "rope.scaling.original_context_length": 4,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": a.rope_parameters["llama_4_scaling_beta"],
        },
        {
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {
                "type": "yarn",
                **{"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 4},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            },
        },
        permuted=True,
    ),
    "qwen35": Case("qwen3_5", deltas, {**HEADS, "linear_value_head_dim": 32}, laid=delta),
    "qwen35moe": Case("qwen3_5_moe", deltas, HEADS, laid=delta),
    "qwen3next": Case("qwen3_next", deltas, {**HEADS, "mlp_only_layers": [], "norm_topk_prob": True}, laid=delta),
    "deepseek2": Case(
        "glm4_moe_lite",
        lambda a: latent(a, **{"expert_gating_func": 2, "expert_weights_norm": True, "nextn_predict_layers": 1}),
    ),
    "deepseek2, softmax": Case(
        "deepseek_v2",
        lambda a: latent(
            a,
            **{
                **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_log_multiplier": 0.1,
            },
        ),
        {"topk_method": "greedy", "n_group": 1},
        laid=split_keys,
    ),
    "deepseek2, older": Case(
        "deepseek_v2",
        lambda a: latent(
            a,
            **{
                "attention.key_length": a.qk_nope_head_dim + a.qk_rope_head_dim,
                "attention.value_length": a.v_head_dim,
                **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla")),
                "attention.q_lora_rank": None,
            },
        ),
        {
            **{"topk_method": "greedy", "n_group": 1, "q_lora_rank": None},
            "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
        },
    ),
    "glm4moe": Case(
        "glm4_moe",
        lambda a: {**routed(a), "rope.dimension_count": a.head_dim // 2, "expert_weights_norm": True},
        {"norm_topk_prob": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "gemma3n": Case("gemma3n", altup, {"altup_num_inputs": 3}, laid=gemma3n),
    "gemma4": Case("gemma4_text", windows, {"attention_k_eq_v": True, "vocab_size_per_layer_input": 272}, laid=gemma4),
    "gemma4, dense": Case(
        "gemma4_text",
        windows,
        {"enable_moe_block": False, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        laid=gemma4,
    ),
    "llama, 3.1": Case(
        "llama",
        changes={"rope_scaling": LLAMA3, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        permuted=True,
        laid=llama3,
    ),
    "phi3": Case("phi3", lambda a: {"rope.dimension_count": 8}, {"partial_rotary_factor": 0.5}),
    "phi3, long": Case(
        "phi3",
        lambda a: {"rope.scaling.original_context_length": a.original_max_position_embeddings},
        {
            **{"partial_rotary_factor": 1.0, "rope_scaling": LONGROPE},
            **{"max_position_embeddings": 512, "original_max_position_embeddings": 4},
        },
        laid=longrope,
    ),
    "smollm3": Case("smollm3", changes={"no_rope_layer_interval": 4}, permuted=True),
}


@pytest.fixture(autouse=True)
def on_the_processor():
    mx.set_default_device(mx.cpu)


def written(path: Path, name: str, metadata: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Write the file of a tiny model; returns the model. `metadata` replaces entries."""
    case, name = CASES[name], name.partition(",")[0]
    model: Any = tiny(case.model, **{"vocab_size": len(vocabulary()), **case.changes})
    arguments = model.language_model.args if case.model.startswith("qwen3_5") else model.args
    if case.model == "gemma3n":
        arguments = model.model.language_model.config
    entries = {"context_length": 512, **case.metadata(arguments)}
    entries["block_count"] = arguments.num_hidden_layers + entries.get("nextn_predict_layers", 0)
    arrays = {}
    for full, array in case.laid(weights(model), arguments).items():
        short = full if full.startswith(("blk.", "rope_", "altup")) else gguf_name(full, name)
        offset = case.norm_offset if "norm" in short else 0.0
        arrays[short] = array[..., 0] if "shortconv.conv" in short else array + np.float32(offset)
    stated = {f"{name}.{key}": value for key, value in entries.items()} | dict(metadata or {})
    write_gguf(
        path, architecture=name, model=arguments, metadata=stated, arrays=arrays, permuted=case.permuted, **options
    )
    return model


def converted(place: Path, file: Path | None = None) -> Any:
    folder = place / "folder"
    folder.mkdir()
    convert_gguf(file or place / "model.gguf", folder)
    model, _ = load_network(folder)
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_tokens_of_its_model(tmp_path: Path, name: str):
    model = written(tmp_path / "model.gguf", name)

    ours = converted(tmp_path)

    assert np.allclose(stock_logits(ours, PROMPT), stock_logits(model, PROMPT), atol=1e-4, rtol=1e-4)
    assert greedy(ours, PROMPT) == greedy(model, PROMPT)


NEVER_PACKED = ("ffn_gate_inp", "conv", "altup", "laurel", "inp_gate", "proj.weight", "ssm_", ".bias")
"""Parts of the names of matrices that llama.cpp leaves as they are, and of those with heads as small as here."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_packed_weights_give_the_tokens_of_the_expanded_ones(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    written(tmp_path / "model.gguf", name, kinds={**dict.fromkeys(NEVER_PACKED, "F32"), "": "Q5_0"})
    monkeypatch.setattr(folder_module, "common_format", lambda _: "F32")
    ours = converted(tmp_path)
    monkeypatch.setattr(weights_module, "_FORMS", {})
    (tmp_path / "folder").rename(tmp_path / "packed")
    theirs = converted(tmp_path)

    stored: Any = mx.load(str(tmp_path / "packed" / "model.safetensors"))
    assert any(name.endswith(".scales") for name in stored)
    assert np.allclose(stock_logits(ours, PROMPT), stock_logits(theirs, PROMPT), atol=1e-4, rtol=1e-4)
    assert greedy(ours, PROMPT) == greedy(theirs, PROMPT)


def test_packed_columns_are_put_in_order_by_groups(tmp_path: Path):
    """Of the projection behind a linear attention's heads."""
    model = written(tmp_path / "model.gguf", "qwen35", kinds={"ssm_out": "Q8_0"})

    ours = converted(tmp_path)

    packed, _ = load_network(tmp_path / "folder")
    assert packed.layers[0].linear_attn.out_proj.bits == 8
    weights = (each.layers[0].linear_attn.out_proj.weight for each in (ours, model))
    assert np.allclose(*weights, atol=0.01)


def test_a_bias_that_chooses_experts_keeps_its_bits(tmp_path: Path):
    """Beside weights in 16 bits."""
    model = written(tmp_path / "model.gguf", "lfm2moe", kinds={"ffn_down": "F16"})

    ours = converted(tmp_path)

    stored: Any = mx.load(str(tmp_path / "folder" / "model.safetensors"))
    kept = sorted(name for name, array in stored.items() if array.dtype == mx.float32)
    assert kept == [f"model.layers.{layer}.feed_forward.expert_bias" for layer in (1, 2, 3)]
    biases = [layer.feed_forward.expert_bias for layer in model.layers[1:]]
    assert all(mx.array_equal(stored[name], bias) for name, bias in zip(kept, biases, strict=True))
    assert greedy(ours, PROMPT) == greedy(model, PROMPT)


@pytest.mark.parametrize("place", [0, -1])
def test_a_model_in_several_files_is_read_from_any_of_them(tmp_path: Path, place: int):
    model = written(tmp_path / "model.gguf", "granite", parts=20)
    files = sorted(tmp_path.glob("*.gguf"))

    ours = converted(tmp_path, files[place])

    assert len(files) > 1
    assert gguf_files(tmp_path) == files[:1]
    assert len(set(map(folder_module.gguf_place, files))) == 1
    assert greedy(ours, PROMPT) == greedy(model, PROMPT)


def test_a_missing_part_is_named_and_one_in_the_place_of_another_is_refused(tmp_path: Path):
    written(tmp_path / "model.gguf", "granite", parts=10)
    _, second, third, *_ = sorted(tmp_path.glob("*.gguf"))
    second.write_bytes(third.read_bytes())
    with pytest.raises(InputError, match=rf"{second.name} is not part 2 .* by split.no"):
        convert_gguf(third, tmp_path)
    second.unlink()

    with pytest.raises(InputError, match=rf"1 of them are missing, first {second.name}"):
        convert_gguf(third, tmp_path)


def test_the_way_of_splitting_text_follows_the_architecture_where_a_file_does_not_state_it(tmp_path: Path):
    folders = {}
    for name in ("qwen3moe", "gpt-oss"):
        place = tmp_path / name
        place.mkdir()
        written(place / "model.gguf", name, metadata={"tokenizer.ggml.pre": None})
        converted(place)
        folders[name] = TextCodec(place / "folder")

    assert len(folders["qwen3moe"].encode("12", special=False)) == 2
    assert len(folders["gpt-oss"].encode("12", special=False)) == 1


def test_templates_with_names_come_along(tmp_path: Path):
    named = {"tokenizer.chat_template.tool_use": "tools: {{ tools }}"}
    written(tmp_path / "model.gguf", "granite", metadata=named)
    converted(tmp_path)
    template = ChatTemplate(tmp_path / "folder")

    asked = [{"role": "user", "content": "Hi"}]
    assert template.text(asked, [{"type": "function"}]).startswith("tools: [")
    assert "Hi" in template.text(asked)


NOT_COMPUTED = "states {}, which mlx-lm does not compute"
PACKED = {"ssm_out": "Q8_0"}


@pytest.mark.parametrize(
    ("name", "key", "value", "kinds", "words"),
    [
        ("lfm2moe", "expert_gating_func", None, {}, "{} is missing"),
        ("gemma3n", "activation_sparsity_scale", None, {}, "{} is missing"),
        ("glm4", "rope.dimension_sections", [8, 4, 4, 0], {}, NOT_COMPUTED),
        ("gemma3", "final_logit_softcapping", 30.0, {}, NOT_COMPUTED),
        ("glm4moe", "rope.scaling.type", "yarn", {}, NOT_COMPUTED),
        # Before memory is taken for what it announces.
        ("qwen35", "ssm.time_step_rank", 1 << 31, {}, r"is broken \(a tensor of \d+ rows for \d+\)"),
        # Packed heads that are no whole groups.
        ("qwen35moe", "context_length", 512, PACKED, "no multiple of 32"),
    ],
)
def test_what_can_not_be_computed_is_refused(
    tmp_path: Path, name: str, key: str, value: object, kinds: dict[str, str], words: str
):
    written(tmp_path / "model.gguf", name, metadata={f"{name}.{key}": value}, kinds=kinds)

    with pytest.raises(InputError, match=words.format(rf"{name}.{key}")):
        converted(tmp_path)
