"""A GGUF file of each architecture gives the tokens of the mlx-lm model that it was written from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from mlx_lm.utils import dequantize_model

from orchestrator.machine.gguf.folder import convert_gguf
from orchestrator.machine.models.checkpoints import gguf_files
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.inference.stored_model import load_network
from tests.support.models.architectures import tiny
from tests.support.models.gguf_files import add_entry, gguf_name, interleaved, tokenizer_metadata, vocabulary, weights
from tests.support.models.tiny_models import stock_logits

PROMPT = [104, 101, 108, 108, 111, 32, 119, 7, 200]
EXPERTS = {f"{each}_proj": f"ffn_{each}_exps" for each in ("gate", "up", "down")}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class Case(NamedTuple):
    """`changes`: to the tiny model; `names`: of its tensors where they differ from Llama's; `metadata`: from its
    arguments, beside the common entries."""

    model: str
    names: Mapping[str, str] = {}
    metadata: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    changes: Mapping[str, Any] = {}
    permuted: bool = False
    norm_offset: float = 0.0


def experts(module: str) -> dict[str, str]:
    return {f"{module}.{name}": each for name, each in EXPERTS.items()}


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


GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
CASES = {
    "qwen3moe": Case(
        "qwen3_moe",
        {"mlp.gate": "ffn_gate_inp", **experts("mlp.switch_mlp")},
        lambda a: sparse(a, "num_experts", "moe_intermediate_size"),
        {"mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "gemma": Case("gemma", norm_offset=1.0),
    "gemma2": Case(
        "gemma2", GEMMA, lambda a: {"attention.key_length": a.head_dim}, {"query_pre_attn_scalar": 16}, norm_offset=1.0
    ),
    "gemma3": Case(
        "gemma3_text",
        GEMMA,
        lambda a: {"attention.sliding_window": a.sliding_window, "attention.key_length": a.head_dim},
        {"sliding_window_pattern": 6, "num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 16},
        norm_offset=1.0,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {
            "post_attention_layernorm": "post_attention_norm",
            "self_attn.sinks": "attn_sinks",
            "mlp.router": "ffn_gate_inp",
            **experts("mlp.experts"),
        },
        lambda a: {
            **sparse(a, "num_local_experts", "intermediate_size"),
            **{"attention.sliding_window": a.sliding_window, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.original_context_length": 32,
        },
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "granite": Case("granite", {}, scales, GRANITE, permuted=True),
    "granitemoe": Case(
        "granitemoe",
        {"block_sparse_moe.router.layer": "ffn_gate_inp", **experts("block_sparse_moe.switch_mlp")},
        lambda a: {**scales(a), **sparse(a, "num_local_experts", "intermediate_size")},
        GRANITE,
        permuted=True,
    ),
    "lfm2": Case(
        "lfm2",
        {
            "operator_norm": "attn_norm",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            "self_attn.out_proj": "attn_output",
            "ffn_norm": "ffn_norm",
            **{f"feed_forward.w{n}": name for n, name in ((1, "ffn_gate"), (2, "ffn_down"), (3, "ffn_up"))},
            **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
            "model.embedding_norm": "token_embd_norm",
        },
        lambda a: {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": a.conv_L_cache},
    ),
    "glm4": Case(
        "glm4",
        {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
        lambda a: {"rope.dimension_count": a.head_dim // 2},
    ),
    "mistral3": Case(
        "ministral3",
        {},
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
    "smollm3": Case("smollm3", changes={"no_rope_layer_interval": 4}, permuted=True),
}


@pytest.fixture(autouse=True)
def on_the_processor():
    mx.set_default_device(mx.cpu)


def written(
    path: Path,
    name: str,
    kinds: Mapping[str, str] | None = None,
    parts: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Write the file of a tiny model; returns the model. `kinds`: of tensors whose names contain the key; `parts`: so
    many tensors a file; `metadata` replaces entries."""
    case = CASES[name]
    model: Any = tiny(case.model, **{"vocab_size": len(vocabulary()), **case.changes})
    arguments = model.args
    writer = gguf.GGUFWriter(path, name, split_max_tensors=parts)
    entries = {
        "block_count": arguments.num_hidden_layers,
        "context_length": 512,
        "embedding_length": arguments.hidden_size,
        "feed_forward_length": arguments.intermediate_size,
        "attention.head_count": arguments.num_attention_heads,
        "attention.head_count_kv": arguments.num_key_value_heads,
        "rope.freq_base": float(getattr(arguments, "rope_theta", 10_000.0)),
        "attention.layer_norm_rms_epsilon": float(getattr(arguments, "rms_norm_eps", 1e-5)),
        **case.metadata(arguments),
    }
    named = {f"{name}.{key}": value for key, value in entries.items()}
    for key, value in {**named, **tokenizer_metadata(), **(metadata or {})}.items():
        add_entry(writer, key, value)
    for full, array in weights(model).items():
        short = gguf_name(full, case.names)
        if case.norm_offset and "norm" in short:
            array = array + np.float32(case.norm_offset)
        if "shortconv.conv" in short:
            array = array[..., 0]
        heads = {"attn_q": arguments.num_attention_heads, "attn_k": arguments.num_key_value_heads}
        stem = short.split(".")[-2]
        if case.permuted and stem in heads:
            array = interleaved(array, heads[stem])
        wanted = next((kind for key, kind in (kinds or {}).items() if key in short and array.ndim > 1), "F32")
        kind = GGMLQuantizationType[wanted]
        writer.add_tensor(short, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def converted(file: Path, folder: Path) -> Any:
    folder.mkdir()
    convert_gguf(file, folder)
    model, _ = load_network(folder)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


def greedy(model: Any, count: int = 10) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(np.argmax(np.array(stock_logits(model, tokens)))))
    return tokens


@pytest.mark.parametrize("name", CASES)
def test_a_file_gives_the_tokens_of_its_model(tmp_path: Path, name: str):
    model = written(tmp_path / "model.gguf", name)

    ours = converted(tmp_path / "model.gguf", tmp_path / "folder")

    assert np.allclose(stock_logits(ours, PROMPT), stock_logits(model, PROMPT), atol=1e-4, rtol=1e-4)
    assert greedy(ours) == greedy(model)


def test_experts_in_mxfp4_stay_packed(tmp_path: Path):
    written(tmp_path / "model.gguf", "gpt-oss", {"_exps.weight": "MXFP4"})

    ours = converted(tmp_path / "model.gguf", tmp_path / "folder")

    packed, config = load_network(tmp_path / "folder")
    assert (config["quantization"]["mode"], config["quantization"]["bits"]) == ("mxfp4", 4)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up_exps.weight")
    expected = gguf.quants.dequantize(found.data, found.tensor_type)
    assert np.array_equal(ours.model.layers[1].mlp.experts.up_proj.weight, expected.reshape(4, 96, 64))
    assert packed.model.layers[1].mlp.experts.up_proj.mode == "mxfp4"


@pytest.mark.parametrize("place", [0, -1])
def test_a_model_in_several_files_is_read_from_any_of_them(tmp_path: Path, place: int):
    model = written(tmp_path / "model.gguf", "granite", parts=20)
    files = sorted(tmp_path.glob("*.gguf"))

    ours = converted(files[place], tmp_path / "folder")

    assert len(files) > 1
    assert gguf_files(tmp_path) == files[:1]
    assert greedy(ours) == greedy(model)


def test_a_missing_part_is_named(tmp_path: Path):
    written(tmp_path / "model.gguf", "granite", parts=20)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    second.unlink()

    with pytest.raises(InputError, match=rf"1 of them are missing, first {second.name}"):
        convert_gguf(first, tmp_path)


def test_the_way_of_splitting_text_follows_the_architecture_where_a_file_does_not_state_it(tmp_path: Path):
    folders = {}
    for name in ("qwen3moe", "gpt-oss"):
        written(tmp_path / f"{name}.gguf", name, metadata={"tokenizer.ggml.pre": None})
        converted(tmp_path / f"{name}.gguf", tmp_path / name)
        folders[name] = TextCodec(tmp_path / name)

    assert len(folders["qwen3moe"].encode("12", special=False)) == 2
    assert len(folders["gpt-oss"].encode("12", special=False)) == 1


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("glm4", "glm4.rope.dimension_sections", [8, 4, 4, 0]), ("gemma3", "gemma3.final_logit_softcapping", 30.0)],
)
def test_what_mlx_lm_does_not_compute_is_refused(tmp_path: Path, name: str, key: str, value: object):
    written(tmp_path / "model.gguf", name, metadata={key: value})

    with pytest.raises(InputError, match=rf"states {key}, which mlx-lm does not compute"):
        converted(tmp_path / "model.gguf", tmp_path / "folder")


def test_templates_with_names_come_along(tmp_path: Path):
    named = {"tokenizer.chat_template.tool_use": "tools: {{ tools }}"}
    written(tmp_path / "model.gguf", "granite", metadata=named)
    converted(tmp_path / "model.gguf", tmp_path / "folder")
    template = ChatTemplate(tmp_path / "folder")

    asked = [{"role": "user", "content": "Hi"}]
    assert template.text(asked, [{"type": "function"}]).startswith("tools: [")
    assert "Hi" in template.text(asked)
