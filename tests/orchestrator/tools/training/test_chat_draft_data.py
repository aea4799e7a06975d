"""Laws of the data for a chat model's draft: the target from its GGUF file, and the prompts."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.tools.training.chat_draft import prompts, sources

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 1, 96
TOKENS = ["<|end|>", "<|im_end|>", "a", "b", "ab"]
F32, Q4_1, Q8_0 = 0, 3, 8


def quantised(shape: list[int], kind: int, source: np.random.Generator) -> tuple[bytes, np.ndarray]:
    """A tensor's bytes in a GGUF file, and its values."""
    blocks = shape[0] * shape[1] // 32
    scales = source.uniform(0.005, 0.01, (blocks, 1)).astype(np.float16)
    if kind == Q8_0:
        digits = source.integers(-127, 128, (blocks, 32)).astype(np.int8)
        raw, values = np.concatenate((scales.view(np.uint8), digits.view(np.uint8)), 1), scales.astype(float) * digits
    else:
        lowest = source.uniform(-0.1, 0.1, (blocks, 1)).astype(np.float16)
        digits = source.integers(0, 16, (blocks, 32)).astype(np.uint8)
        packed = digits[:, :16] | digits[:, 16:] << 4
        raw = np.concatenate((scales.view(np.uint8), lowest.view(np.uint8), packed), 1)
        values = scales.astype(float) * digits + lowest.astype(float)
    return raw.tobytes(), values.reshape(shape)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, value: object) -> bytes:
    match value:
        case str():
            return text(key) + struct.pack("<I", 8) + text(value)
        case float():
            return text(key) + struct.pack("<If", 6, value)
        case int():
            return text(key) + struct.pack("<II", 4, value)
        case list():
            kind, items = (8, map(text, value)) if value and isinstance(value[0], str) else (4, map(number, value))
            return text(key) + struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    raise AssertionError(value)


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def gguf_file(path: Path, source: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a model of one layer; returns the values of its tensors."""
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN, Q8_0),
        "output_norm": (HIDDEN, F32),
        "blk.0.attn_norm": (HIDDEN, F32),
        "blk.0.ffn_norm": (HIDDEN, F32),
        "blk.0.attn_q": (HIDDEN, HIDDEN, Q4_1),
        "blk.0.attn_k": (HIDDEN // HEADS, HIDDEN, Q4_1),
        "blk.0.attn_v": (HIDDEN // HEADS, HIDDEN, Q4_1),
        "blk.0.attn_output": (HIDDEN, HIDDEN, Q4_1),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN, Q4_1),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN, Q4_1),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD, Q4_1),
    }
    facts = {
        "llama.embedding_length": HIDDEN,
        "llama.block_count": 1,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 128,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }
    values, directory, data = {}, b"", b""
    for name, (*shape, kind) in shapes.items():
        if kind == F32:
            values[name] = source.uniform(0, 1, shape).astype(np.float32)
            raw = values[name].tobytes()
        else:
            raw, values[name] = quantised(shape, kind, source)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        directory += text(f"{name}.weight") + sizes + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(facts))
    header += b"".join(entry(key, value) for key, value in facts.items()) + directory
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return values


def test_a_gguf_file_becomes_a_folder_that_mlx_lm_reads_with_the_same_weights(tmp_path: Path):
    pytest.importorskip("safetensors")
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import dequantize_model, load_model

    from orchestrator.tools.training.chat_draft.gguf import convert

    values = gguf_file(tmp_path / "model.gguf", np.random.default_rng(0))

    convert(tmp_path / "model.gguf", tmp_path / "model")

    model: Any = dequantize_model(load_model(tmp_path / "model")[0])
    layer = model.model.layers[0]
    found = {
        "token_embd": model.model.embed_tokens,
        "output_norm": model.model.norm,
        "blk.0.attn_norm": layer.input_layernorm,
        "blk.0.attn_v": layer.self_attn.v_proj,
        "blk.0.attn_output": layer.self_attn.o_proj,
        "blk.0.ffn_gate": layer.mlp.gate_proj,
        "blk.0.ffn_down": layer.mlp.down_proj,
    }
    for name, module in found.items():
        np.testing.assert_allclose(np.array(module.weight.astype(mx.float32)), values[name], rtol=2e-3, atol=1e-3)
    pairs = values["blk.0.attn_q"].reshape(HEADS, -1, 2, HIDDEN)
    query = np.array(layer.self_attn.q_proj.weight.astype(mx.float32)).reshape(HEADS, 2, -1, HIDDEN)
    np.testing.assert_allclose(query, pairs.swapaxes(1, 2), rtol=2e-3, atol=1e-3)


def test_the_tokenizer_of_a_gguf_file_has_its_merges_and_control_tokens(tmp_path: Path):
    pytest.importorskip("safetensors")
    from tokenizers import Tokenizer

    from orchestrator.tools.training.chat_draft.gguf import convert

    gguf_file(tmp_path / "model.gguf", np.random.default_rng(1))

    convert(tmp_path / "model.gguf", tmp_path / "model")

    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("ab<|im_end|>b").tokens == ["ab", "<|im_end|>", "b"]


def real_text(folder: Path) -> Path:
    """Packages with a little of everything that prompts are made of."""
    (folder / "docs").mkdir(parents=True)
    nouns = [f"0 04 n 01 noun{chr(97 + i // 26)}{chr(97 + i % 26)} 0 003 @ 1 n 0000 ~ 2 n 0000 ~ 3 n 0000 | thing {i}"
             for i in range(200)]  # fmt: skip
    (folder / "data.noun").write_text("\n".join(nouns))
    paragraphs = [f"Paragraph {i} tells what it is about. {'It says so in plain words. ' * 10}" for i in range(100)]
    (folder / "docs" / "guide.rst").write_text("\n\n".join(paragraphs))
    functions = [f'def function_{i}(one):\n    """Compute what number {i} is good for."""\n' + "    one += 1\n" * 20
                 for i in range(100)]  # fmt: skip
    (folder / "code.py").write_text("\n\n".join(functions))
    return folder


def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict], list[dict]]:
    """Training and held-out prompts of the text in `folder`."""
    out = folder / "out"
    monkeypatch.setattr(prompts, "MOST_TEXTS", 200)
    monkeypatch.setattr(sys, "argv", ["prompts", "--sources", str(folder), "--out", str(out), "--held-out", "3"])
    prompts.main()
    train, held_out = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "held_out")
    )
    return train, held_out


def test_prompts_are_of_every_category_and_at_most_so_many_are_held_out(tmp_path: Path, monkeypatch):
    train, held_out = made(real_text(tmp_path / "sources"), monkeypatch)

    categories = {"chat", "code", "extraction", "maths", "summary", "translation"}
    assert {prompt["category"] for prompt in train} == categories
    counts = [sum(prompt["category"] == category for prompt in held_out) for category in categories]
    assert held_out
    assert max(counts) <= 3


def test_no_text_is_both_trained_on_and_held_out(tmp_path: Path, monkeypatch):
    train, held_out = made(real_text(tmp_path / "sources"), monkeypatch)

    trained = {turn for prompt in train if prompt["category"] != "maths" for turn in prompt["turns"][:1]}
    texts = [paragraph for paragraph in sources.paragraphs(tmp_path / "sources") if prompts.is_held_out(paragraph)]
    assert texts
    assert not any(text in turn for text in texts for turn in trained)
    assert not trained & {turn for prompt in held_out if prompt["category"] != "maths" for turn in prompt["turns"]}


def test_prompts_are_the_same_in_every_run(tmp_path: Path, monkeypatch):
    folder = real_text(tmp_path / "sources")

    assert made(folder, monkeypatch) == made(folder, monkeypatch)


def small_draft(folder: Path, source: np.random.Generator) -> dict[str, np.ndarray]:
    """Write a draft for the target of `gguf_file`, as `distil` would; returns its weights."""
    from safetensors.numpy import save_file

    sizes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // HEADS, HIDDEN),
        "self_attn.v_proj": (HIDDEN // HEADS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    named = {f"model.layers.0.{name}.weight": shape for name, shape in sizes.items()}
    named |= {"model.norm.weight": (HIDDEN,), "model.embed_tokens.weight": (len(TOKENS), HIDDEN)}
    weights = {name: source.normal(size=shape).astype(np.float16) for name, shape in named.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    np.save(folder / "head_tokens.npy", np.array([0, 1, 4], np.int32))
    fields = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return weights


def test_a_packed_draft_has_no_embedding_and_gets_its_targets_back(tmp_path: Path):
    pytest.importorskip("safetensors")
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import dequantize_model, load_model

    from orchestrator.tools.training.chat_draft.gguf import convert
    from orchestrator.tools.training.chat_draft.package import join, pack

    source = np.random.default_rng(2)
    values = gguf_file(tmp_path / "model.gguf", source)
    convert(tmp_path / "model.gguf", tmp_path / "target")
    weights = small_draft(tmp_path / "draft", source)

    pack(tmp_path / "draft", tmp_path / "packed")
    join(tmp_path / "packed", tmp_path / "target", tmp_path / "whole")

    assert not any(b"embed" in file.read_bytes() for file in (tmp_path / "packed").glob("*.safetensors"))
    model: Any = dequantize_model(load_model(tmp_path / "whole")[0])
    embedding = np.array(model.model.embed_tokens.weight.astype(mx.float32))
    np.testing.assert_allclose(embedding, values["token_embd"], rtol=2e-3, atol=1e-3)
    down = np.array(model.model.layers[0].mlp.down_proj.weight.astype(mx.float32))
    np.testing.assert_allclose(down, weights["model.layers.0.mlp.down_proj.weight"], atol=0.03)
    assert np.load(tmp_path / "whole" / "head_tokens.npy").tolist() == [0, 1, 4]
