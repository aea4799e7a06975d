"""A decoder as a MIL function, in operations and layouts that the Neural Engine runs. Knows no files.

Activations have the shape (1, channels, 1, L), and every matrix is a 1x1 convolution. The host computes embeddings,
rotations and the mask, so the device needs no integers and no gather. Mask and positions express any token tree.

Inputs of the function for width L with T slots, all fp16:
    x         (1, hidden, 1, L)              embeddings
    cos, sin  (1, 1, head, L)                rotations; row i and row i + head / 2 are the same
    mask      (1, 1, L, T + L)               0 where a token may attend, -1e4 elsewhere: T slots, then the L tokens
    kv        (2 layers, key heads, T, head) keys of every layer, then values of every layer: a KV arena's body
Outputs:
    logits_0, logits_1, ...  (1, 1, L, rows) the head in chunks, the logits of a token contiguous
    kv_new    (2 layers, key heads, L, head) new keys and values, for the host to write to slots
With the cache as Core ML state, `kv` is that state, kv_new is not returned, and the int32 inputs `begin` and `end`
(4,) bound the L consecutive slots that take the new keys and values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from draft_worker.coreml.conversion.weights import Constants
from draft_worker.coreml.package import Package
from draft_worker.coreml.toolchain import toolchain


def decoder(package: Package, constants: Constants, width: int, on_layer: Callable[[], None]) -> Any:
    """The MIL function for one width. Calls `on_layer` after each layer."""
    return _Decoder(package, constants, width).function(on_layer)


class _Decoder:
    def __init__(self, package: Package, constants: Constants, width: int) -> None:
        self._package = package
        self._shape = package.shape
        self._constants = constants
        self._width = width
        self._mb = toolchain().operations
        self._sharing = package.shape.heads // package.shape.key_heads

    def function(self, on_layer: Callable[[], None]) -> Any:
        built = toolchain().program.Function(self._inputs(), opset_version=toolchain().coremltools.target.iOS18)
        with built:
            inputs = built.inputs
            cache = inputs["kv"] if self._package.cache == "io" else self._mb.read_state(input=inputs["kv"])
            mask = self._shared_mask(inputs["mask"])
            hidden, keys, values = inputs["x"], [], []
            for layer in range(self._shape.layers):
                hidden, (key, value) = self._layer(layer, hidden, inputs, mask, cache)
                keys.append(key)
                values.append(value)
                on_layer()
            outputs = self._logits(hidden)
            new = self._mb.concat(values=[*keys, *values], axis=0, name="kv_new")
            if self._package.cache == "io":
                outputs.append(new)
            else:
                written = self._mb.slice_update(x=cache, update=new, begin=inputs["begin"], end=inputs["end"])
                self._mb.coreml_update_state(state=inputs["kv"], value=written)
            built.set_outputs(outputs)
        return built

    def _inputs(self) -> dict[str, Any]:
        types, mb = toolchain().types, self._mb
        inputs = {
            name: mb.placeholder(shape=shape, dtype=types.fp16 if len(shape) == 4 else types.int32)
            for name, shape in self._package.input_shapes(self._width).items()
        }
        place = mb.placeholder if self._package.cache == "io" else mb.state_tensor_placeholder
        return inputs | {"kv": place(shape=self._package.cache_shape, dtype=types.fp16)}

    def _shared_mask(self, mask: Any) -> Any:
        """The mask for the query heads that share keys; these heads are concatenated on the token axis."""
        return mask if self._sharing == 1 else self._mb.concat(values=[mask] * self._sharing, axis=2)

    def _layer(self, layer: int, hidden: Any, inputs: Any, mask: Any, cache: Any) -> tuple[Any, list[Any]]:
        name = f"model.layers.{layer}"
        normed = self._norm(hidden, f"{name}.input_layernorm.weight", axis=1)
        attended, rows = self._attention(layer, normed, inputs, mask, cache)
        hidden = self._mb.add(x=hidden, y=attended)
        normed = self._norm(hidden, f"{name}.post_attention_layernorm.weight", axis=1)
        gate = self._mb.silu(x=self._project(normed, f"{name}.mlp.gate_proj"))
        gated = self._mb.mul(x=gate, y=self._project(normed, f"{name}.mlp.up_proj"))
        return self._mb.add(x=hidden, y=self._project(gated, f"{name}.mlp.down_proj")), rows

    def _attention(self, layer: int, x: Any, inputs: Any, mask: Any, cache: Any) -> tuple[Any, list[Any]]:
        """Attention over slots and new tokens; the new keys and values, (1, key heads, L, head) each."""
        shape, mb, name = self._shape, self._mb, f"model.layers.{layer}.self_attn"
        queries = self._heads(x, f"{name}.q_proj", shape.heads)
        keys = self._heads(x, f"{name}.k_proj", shape.key_heads)
        values = mb.transpose(x=self._heads(x, f"{name}.v_proj", shape.key_heads), perm=[0, 1, 3, 2])
        if f"{name}.q_norm.weight" in self._constants:
            queries = self._norm(queries, f"{name}.q_norm.weight", axis=2)
            keys = self._norm(keys, f"{name}.k_norm.weight", axis=2)
        queries = mb.mul(x=self._rotate(queries, inputs), y=np.float16(shape.head**-0.5))
        stacked = (1, shape.key_heads, self._sharing * self._width, shape.head)
        queries = mb.reshape(x=mb.transpose(x=queries, perm=[0, 1, 3, 2]), shape=stacked)
        keys = mb.transpose(x=self._rotate(keys, inputs), perm=[0, 1, 3, 2])
        all_keys = mb.concat(values=[self._cached(cache, layer), keys], axis=2)
        all_values = mb.concat(values=[self._cached(cache, shape.layers + layer), values], axis=2)
        scores = mb.add(x=mb.matmul(x=queries, y=all_keys, transpose_y=True), y=mask)
        seen = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=all_values)
        seen = mb.reshape(x=seen, shape=(shape.key_heads, self._sharing, self._width, shape.head))
        seen = mb.transpose(x=seen, perm=[0, 1, 3, 2])
        seen = mb.reshape(x=seen, shape=(1, shape.heads * shape.head, 1, self._width))
        return self._project(seen, f"{name}.o_proj"), [keys, values]

    def _heads(self, x: Any, name: str, heads: int) -> Any:
        return self._mb.reshape(x=self._project(x, name), shape=(1, heads, self._shape.head, self._width))

    def _cached(self, cache: Any, row: int) -> Any:
        size = [1, self._shape.key_heads, self._package.context, self._shape.head]
        return self._mb.slice_by_size(x=cache, begin=[row, 0, 0, 0], size=size)

    def _rotate(self, x: Any, inputs: Any) -> Any:
        first, second = self._mb.split(x=x, num_splits=2, axis=2)
        crossed = self._mb.concat(values=[self._mb.mul(x=second, y=np.float16(-1)), first], axis=2)
        straight = self._mb.mul(x=x, y=inputs["cos"])
        return self._mb.add(x=straight, y=self._mb.mul(x=crossed, y=inputs["sin"]))

    def _norm(self, x: Any, name: str, axis: int) -> Any:
        """RMS norm. A square can overflow fp16. [x, -x] has mean 0, so layer_norm divides by the RMS of x."""
        mirrored = self._mb.concat(values=[x, self._mb.mul(x=x, y=np.float16(-1))], axis=axis)
        scaled = self._mb.layer_norm(x=mirrored, axes=[axis], epsilon=np.float16(self._shape.epsilon))
        half, _ = self._mb.split(x=scaled, num_splits=2, axis=axis)
        return self._mb.mul(x=half, y=self._constants.vector(name, axis))

    def _project(self, x: Any, name: str) -> Any:
        return self._convolve(x, self._constants.kernel(f"{name}.weight"), self._constants.bias(f"{name}.bias"))

    def _convolve(self, x: Any, kernel: Any, bias: Any | None = None) -> Any:
        optional = {} if bias is None else {"bias": bias}
        return self._mb.conv(x=x, weight=kernel, pad_type="valid", **optional)

    def _logits(self, hidden: Any) -> list[Any]:
        normed = self._norm(hidden, "model.norm.weight", axis=1)
        # The vocabulary is the last axis: with tokens last, the device would pad each logit to 64 bytes.
        return [
            self._mb.transpose(x=self._convolve(normed, kernel), perm=[0, 2, 3, 1], name=f"logits_{index}")
            for index, kernel in enumerate(self._constants.head_kernels())
        ]
