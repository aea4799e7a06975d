"""Core ML packages as others publish them: a Llama whose KV is a state, with the length of its mask as its place.

The inputs, states and output have the names of Apple's article on Llama 3.1 (see draft_worker/coreml/stateful/layout).
"""

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from draft_worker.coreml.stateful.layout import SOURCE_KEY
from draft_worker.coreml.toolchain import toolchain

CONTEXT = 64


def stateful_package(
    model: Any, folder: Path, *, context: int = CONTEXT, lengths: tuple[int, int] = (1, CONTEXT), source: str = ""
) -> Path:
    """An mlx-lm Llama `model` as FOLDER/draft.mlpackage. `lengths`: least and most tokens of one call. `source`: the
    converted model in its metadata."""
    tools = toolchain()
    symbol = tools.program.get_new_symbol
    rows, slots = symbol(), symbol()
    with redirect_stderr(StringIO()):
        built = _Llama(model, context).function(rows, slots)
        coremltools = tools.coremltools
        count = coremltools.RangeDim(lower_bound=lengths[0], upper_bound=lengths[1], default=lengths[0])
        end = coremltools.RangeDim(lower_bound=1, upper_bound=context, default=lengths[0])
        built.set_input_types(
            (
                coremltools.TensorType(name="inputIds", shape=(1, count), dtype=np.int32),
                coremltools.TensorType(name="causalMask", shape=(1, 1, count, end), dtype=np.float16),
            )
        )
        program = tools.program.Program()
        program.add_function("main", built)
        converted = coremltools.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=coremltools.target.iOS18,
            compute_precision=coremltools.precision.FLOAT32,
            pass_pipeline=coremltools.PassPipeline.EMPTY,
            skip_model_load=True,
        )
        if source:
            converted.user_defined_metadata[SOURCE_KEY] = source
        path = folder / "draft.mlpackage"
        converted.save(str(path))
    return path


def edit(path: Path, change: Any) -> Path:
    """The package with its specification changed in place."""
    manifest = json.loads((path / "Manifest.json").read_bytes())
    inside = path / "Data" / manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
    model = toolchain().coremltools.proto.Model_pb2.Model()
    model.ParseFromString(inside.read_bytes())
    change(model)
    inside.write_bytes(model.SerializeToString())
    return path


class _Llama:
    """The graph of a Llama without biases, in fp16."""

    def __init__(self, model: Any, context: int) -> None:
        self._mb = toolchain().operations
        self._model = model
        self._arguments = model.args
        self._head = model.args.hidden_size // model.args.num_attention_heads
        self._sharing = model.args.num_attention_heads // model.args.num_key_value_heads
        self._cache = (model.args.num_hidden_layers, 1, model.args.num_key_value_heads, context, self._head)
        half = model.args.rope_theta ** (-np.arange(0, self._head, 2) / self._head)
        angles = np.outer(np.arange(context), half)
        self._tables = {
            "cos": np.tile(np.cos(angles), 2).astype(np.float16),
            "sin": np.concatenate([-np.sin(angles), np.sin(angles)], -1).astype(np.float16),
        }

    def function(self, rows: Any, slots: Any) -> Any:
        mb, types = self._mb, toolchain().types
        states = {name: mb.state_tensor_placeholder(shape=self._cache, dtype=types.fp16) for name in _STATES}
        inputs = {
            "inputIds": mb.placeholder(shape=(1, rows), dtype=types.int32),
            "causalMask": mb.placeholder(shape=(1, 1, rows, slots), dtype=types.fp16),
        }
        built = toolchain().program.Function(inputs | states, opset_version=toolchain().coremltools.target.iOS18)
        with built:
            built.set_outputs([self._logits(built.inputs)])
        return built

    def _logits(self, inputs: Any) -> Any:
        mb = self._mb
        sizes = mb.shape(x=inputs["causalMask"])
        end, count = self._size(sizes, 3), self._size(sizes, 2)
        begin = mb.sub(x=end, y=count)
        places = mb.range_1d(start=self._number(begin), end=self._number(end), step=np.int32(1))
        turns = {name: mb.gather(x=table, indices=places, axis=0) for name, table in self._tables.items()}
        hidden = mb.gather(x=half(self._model.model.embed_tokens.weight), indices=inputs["inputIds"], axis=0)
        for index, layer in enumerate(self._model.model.layers):
            normed = self._norm(hidden, layer.input_layernorm)
            hidden = mb.add(x=hidden, y=self._attention(index, layer.self_attn, normed, inputs, turns, (begin, end)))
            normed = self._norm(hidden, layer.post_attention_layernorm)
            gate = mb.silu(x=self._linear(normed, layer.mlp.gate_proj))
            gated = mb.mul(x=gate, y=self._linear(normed, layer.mlp.up_proj))
            hidden = mb.add(x=hidden, y=self._linear(gated, layer.mlp.down_proj))
        normed = self._norm(hidden, self._model.model.norm)
        head = self._model.model.embed_tokens if self._arguments.tie_word_embeddings else self._model.lm_head
        return mb.linear(x=normed, weight=half(head.weight), name="logits")

    def _attention(self, index: int, layer: Any, x: Any, inputs: Any, turns: Any, span: Any) -> Any:
        mb, sharing = self._mb, self._sharing
        queries = self._turned(self._heads(x, layer.q_proj), turns)
        keys = self._turned(self._heads(x, layer.k_proj), turns)
        values = self._heads(x, layer.v_proj)
        seen = [
            self._written(index, inputs[name], new, span) for name, new in zip(_STATES, (keys, values), strict=True)
        ]
        repeated = [
            mb.reshape(
                x=mb.concat(values=[each] * sharing, axis=2), shape=[1, self._cache[2] * sharing, -1, self._head]
            )
            for each in (mb.expand_dims(x=each, axes=[2]) for each in seen)
        ]
        attended = mb.scaled_dot_product_attention(
            query=queries, key=repeated[0], value=repeated[1], attn_mask=inputs["causalMask"]
        )
        joined = mb.reshape(
            x=mb.transpose(x=attended, perm=[0, 2, 1, 3]), shape=[1, -1, self._cache[2] * sharing * self._head]
        )
        return self._linear(joined, layer.o_proj)

    def _written(self, index: int, state: Any, new: Any, span: Any) -> Any:
        """The layer's rows of the cache below the end of the call, after `new` is written to the rows of the call."""
        mb, (begin, end) = self._mb, span
        heads = self._cache[2]
        first = mb.concat(values=[np.array([index, 0, 0], np.int32), begin, np.array([0], np.int32)], axis=0)
        last = mb.concat(
            values=[np.array([index + 1, 1, heads], np.int32), end, np.array([self._head], np.int32)], axis=0
        )
        update = mb.expand_dims(x=new, axes=[0])
        changed = mb.slice_update(x=mb.read_state(input=state), update=update, begin=first, end=last)
        mb.coreml_update_state(state=state, value=changed)
        start = np.array([index, 0, 0, 0, 0], np.int32)
        return mb.slice_by_index(x=changed, begin=start, end=last, squeeze_mask=[True, False, False, False, False])

    def _heads(self, x: Any, projection: Any) -> Any:
        split = self._mb.reshape(
            x=self._linear(x, projection), shape=[1, -1, projection.weight.shape[0] // self._head, self._head]
        )
        return self._mb.transpose(x=split, perm=[0, 2, 1, 3])

    def _turned(self, x: Any, turns: Any) -> Any:
        mb = self._mb
        first, second = mb.split(x=x, num_splits=2, axis=3)
        crossed = mb.concat(values=[second, first], axis=3)
        return mb.add(x=mb.mul(x=x, y=turns["cos"]), y=mb.mul(x=crossed, y=turns["sin"]))

    def _norm(self, x: Any, norm: Any) -> Any:
        mb = self._mb
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        scaled = mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(self._arguments.rms_norm_eps)))
        return mb.mul(x=scaled, y=half(norm.weight))

    def _linear(self, x: Any, projection: Any) -> Any:
        return self._mb.linear(x=x, weight=half(projection.weight))

    def _size(self, sizes: Any, axis: int) -> Any:
        return self._mb.slice_by_index(x=sizes, begin=[axis], end=[axis + 1])

    def _number(self, size: Any) -> Any:
        return self._mb.slice_by_index(x=size, begin=[0], end=[1], squeeze_mask=[True])


_STATES = ("keyCache", "valueCache")


def half(weights: Any) -> np.ndarray:
    return np.array(weights).astype(np.float16)
