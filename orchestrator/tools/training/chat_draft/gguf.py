"""Converts a Llama GGUF file of types F32, Q4_1 and Q8_0 to a model folder of mlx-lm, bit for bit. Knows no network.

    python -m orchestrator.tools.training.chat_draft.gguf --file SmolLM2-135M-Instruct.Q4_1.gguf --out build/target

Needs safetensors and tokenizers. The format is described in ggml's docs/gguf.md and ggml-common.h.
"""

import argparse
import json
import re
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP = 32
"""Weights that share a scale, in both quantised types."""
ALIGNMENT = 32
F32, Q4_1, Q8_0 = 0, 3, 8
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL_TOKEN = 3
NAMES = (
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_output", "self_attn.o_proj"),
    *((f"attn_{name}", f"self_attn.{name}_proj") for name in "qkv"),
    *((f"ffn_{name}", f"mlp.{name}_proj") for name in ("gate", "up", "down")),
)


class Tensor(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--file", type=Path, required=True, help="the GGUF file")
    options.add_argument("--out", type=Path, required=True, help="folder of the model")
    arguments = options.parse_args()
    convert(arguments.file, arguments.out)


def convert(file: Path, out: Path) -> None:
    """Write model.safetensors, config.json and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    with file.open("rb") as stream:
        facts, tensors, start = read_header(stream)
    data = np.memmap(file, np.uint8, "r", start)
    heads = {"q": facts["llama.attention.head_count"], "k": facts["llama.attention.head_count_kv"]}
    arrays, bits = {}, {}
    for tensor in tensors:
        name = mlx_name(tensor.name)
        parts, bits[name] = weights(tensor, data)
        if permuted := re.search(r"attn_([qk])\.", tensor.name):
            parts = {part: halves_from_pairs(values, heads[permuted[1]]) for part, values in parts.items()}
        arrays |= {f"{name}.{part}": np.ascontiguousarray(values) for part, values in parts.items()}
    save_file(arrays, out / "model.safetensors", {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(configuration(facts, bits), indent=1))
    write_tokenizer(facts, out)


def read_header(stream: BinaryIO) -> tuple[dict, list[Tensor], int]:
    """(metadata, tensors, offset of the data)."""
    if stream.read(4) != b"GGUF":
        raise SystemExit("not a GGUF file")
    _, count, pairs = read(stream, "<IQQ")
    facts = {}
    for _ in range(pairs):
        key = read_string(stream)
        facts[key] = read_value(stream, *read(stream, "<I"))
    tensors = []
    for _ in range(count):
        name, (dimensions,) = read_string(stream), read(stream, "<I")
        shape = read(stream, f"<{dimensions}Q")[::-1]
        tensors.append(Tensor(name, shape, *read(stream, "<IQ")))
    return facts, tensors, -(-stream.tell() // ALIGNMENT) * ALIGNMENT


def read(stream: BinaryIO, form: str) -> tuple:
    return struct.unpack(form, stream.read(struct.calcsize(form)))


def read_string(stream: BinaryIO) -> str:
    (length,) = read(stream, "<Q")
    return stream.read(length).decode()


def read_value(stream: BinaryIO, kind: int) -> object:
    if kind == STRING:
        return read_string(stream)
    if kind == ARRAY:
        item, count = read(stream, "<IQ")
        return [read_value(stream, item) for _ in range(count)]
    return read(stream, "<" + SCALARS[kind])[0]


def mlx_name(name: str) -> str:
    name = re.sub(r"^blk\.", "model.layers.", name.removesuffix(".weight"))
    for theirs, ours in NAMES:
        name = re.sub(rf"(^|\.){theirs}$", rf"\g<1>{ours}", name)
    return name


def weights(tensor: Tensor, data: np.ndarray) -> tuple[dict[str, np.ndarray], int | None]:
    """The arrays of MLX's affine quantisation and their bits; None for a tensor that is not quantised."""
    rows, columns = tensor.shape[0], tensor.shape[-1]
    if tensor.kind == F32:
        values = data[tensor.offset :][: 4 * int(np.prod(tensor.shape))].view(np.float32).reshape(tensor.shape)
        return {"weight": values.astype(np.float16)}, None
    if tensor.kind not in (Q4_1, Q8_0):
        raise SystemExit(f"{tensor.name} is of type {tensor.kind}: only F32, Q4_1 and Q8_0 are supported")
    head, bits = (4, 4) if tensor.kind == Q4_1 else (2, 8)
    size = head + GROUP * bits // 8
    blocks = data[tensor.offset :][: rows * columns // GROUP * size].reshape(-1, size)
    scales = blocks[:, :2].copy().view(np.float16)
    if tensor.kind == Q4_1:
        low, high = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
        biases, digits = blocks[:, 2:4].copy().view(np.float16), np.concatenate((low, high), 1)
        packed = digits[:, ::2] | digits[:, 1::2] << 4
    else:
        # Q8_0 is symmetric and signed. MLX adds a bias to unsigned digits.
        biases, packed = (-128 * scales.astype(np.float32)).astype(np.float16), blocks[:, 2:] ^ 0x80
    parts = {"weight": np.ascontiguousarray(packed).view(np.uint32), "scales": scales, "biases": biases}
    return {part: values.reshape(rows, -1) for part, values in parts.items()}, bits


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF rotates neighbouring rows of q and k, mlx-lm the two halves of a head."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def configuration(facts: dict, bits: dict[str, int | None]) -> dict:
    usual = bits["model.layers.0.mlp.down_proj"]
    others = {name: {"group_size": GROUP, "bits": own} for name, own in bits.items() if own not in (usual, None)}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": facts["llama.embedding_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 9),
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": "lm_head" not in bits,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "quantization": {"group_size": GROUP, "bits": usual, **others},
    }


def write_tokenizer(facts: dict, out: Path) -> None:
    """Byte-level BPE that splits digits first, as GGUF's pre-tokenizer `smollm` does."""
    if facts["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"the pre-tokenizer {facts['tokenizer.ggml.pre']} is not known")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(out / "tokenizer.json"))
    named = {name: tokens[facts[f"tokenizer.ggml.{name}_id"]] for name in ("bos_token", "eos_token")}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "pad_token": named["eos_token"],
        "chat_template": facts["tokenizer.chat_template"],
        "model_max_length": facts["llama.context_length"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    main()
