"""A decoder as a MIL function, in operations and layouts that the Neural Engine runs. Knows no files.

Activations have the shape (1, channels, 1, L), and every matrix is a 1x1 convolution. The host computes embeddings,
rotations and the mask, so the device needs no integers and no gather. Mask and positions express any token tree.

Inputs of the function for width L with T slots, all fp16:
    x         (1, hidden, 1, L)              embeddings
    cos, sin  (1, 1, head, L)                rotations; row i and row i + head / 2 are the same
    mask      (1, 1, L, T + L)               0 where a token may attend, -1e4 elsewhere: T slots, then the L tokens
    kv        (2 layers, key heads, T, head) keys of every layer, then values of every layer: a KV arena's body
and, for the architectures that need them:
    cos_1, sin_1                             a second rotation, of other layers
    window_mask                              the mask of sliding layers
    position_scale  (1, 1, 1, L)             factors of the queries
    past      (convolutions, taps - 1, hidden, L)  the convolutions' inputs at each token's ancestors, nearest first;
                                             0 where an ancestor is one of the L tokens, or before the first token
    ancestors (1, taps - 1, L, L)            1 in row i of column j if token i is that ancestor of token j, else 0
Outputs:
    logits_0, logits_1, ...  (1, 1, L, rows) the head in chunks, the logits of a token contiguous
    kv_new    (rows, key heads, L, head)     new keys and values, for the host to write to slots, then the new inputs
                                             of the convolutions, heads / key heads rows each
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from draft_worker.coreml.conversion.weights import Constants
from draft_worker.coreml.package import Layer, Package, rotation_inputs
from draft_worker.coreml.toolchain import toolchain

_LARGEST = np.float16(65_504)
"""fp16's largest number."""


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
        self._sharing = package.shape.sharing

    def function(self, on_layer: Callable[[], None]) -> Any:
        shapes, half = self._package.functions[self._package.function(self._width)], toolchain().types.fp16
        inputs = {name: self._mb.placeholder(shape=shape, dtype=half) for name, shape in shapes.items()}
        built = toolchain().program.Function(inputs, opset_version=toolchain().coremltools.target.iOS18)
        with built:
            inputs = dict(built.inputs)
            masks = {name: self._shared_mask(inputs[name]) for name in self._package.masks}
            hidden, keys, values, kept = inputs["x"], [], [], []
            for index, layer in enumerate(self._shape.layers):
                name = f"model.layers.{index}"
                normed = self._norm(hidden, f"{name}.input_layernorm.weight", axis=1)
                if layer.convolution:
                    mixed, row = self._convolution(f"{name}.conv", len(kept), normed, inputs)
                    kept.append(row)
                else:
                    mask = masks[self._package.mask_of(layer)]
                    mixed, (key, value) = self._attention(name, len(keys), layer, normed, inputs | {"mask": mask})
                    keys.append(key)
                    values.append(value)
                hidden = self._residual(hidden, mixed, f"{name}.attention_output_norm.weight")
                hidden = self._feed_forward(name, hidden)
                on_layer()
            normed = self._norm(hidden, "model.norm.weight", axis=1)
            logits = self._logits(normed)
            new = self._mb.concat(values=[*keys, *values, *kept], axis=0, name="kv_new")
            built.set_outputs([*logits, new])
        return built

    def _turned(self, name: str, heads: int, layer: Layer, x: Any, inputs: dict[str, Any]) -> Any:
        """Queries or keys with their norm and rotation: (1, heads, head, L)."""
        found = self._heads(x, f"{name}_proj", heads)
        if f"{name}_norm.weight" in self._constants:
            found = self._norm(found, f"{name}_norm.weight", axis=2)
        if layer.rotation is None:
            return found
        cosine, sine = (inputs[rotation] for rotation in rotation_inputs(layer.rotation))
        return self._rotate(found, cosine, sine)

    def _heads(self, x: Any, name: str, heads: int) -> Any:
        return self._mb.reshape(x=self._project(x, name), shape=(1, heads, self._shape.head, self._width))

    def _rotate(self, x: Any, cosine: Any, sine: Any) -> Any:
        first, second = self._mb.split(x=x, num_splits=2, axis=2)
        crossed = self._mb.concat(values=[self._mb.mul(x=second, y=np.float16(-1)), first], axis=2)
        return self._mb.add(x=self._mb.mul(x=x, y=cosine), y=self._mb.mul(x=crossed, y=sine))

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

    def _shared_mask(self, mask: Any) -> Any:
        """The mask for the query heads that share keys; these heads are concatenated on the token axis."""
        return mask if self._sharing == 1 else self._mb.concat(values=[mask] * self._sharing, axis=2)

    def _residual(self, hidden: Any, added: Any, norm: str) -> Any:
        """`hidden` + `added`, which goes through the norm if the model has it."""
        if norm in self._constants:
            added = self._norm(added, norm, axis=1)
        total = self._mb.add(x=hidden, y=added)
        if not self._shape.clips:
            return total
        return self._mb.maximum(x=self._mb.minimum(x=total, y=_LARGEST), y=-_LARGEST)

    def _feed_forward(self, name: str, hidden: Any) -> Any:
        normed = self._norm(hidden, f"{name}.post_attention_layernorm.weight", axis=1)
        gate = self._activate(self._project(normed, f"{name}.mlp.gate_proj"))
        gated = self._mb.mul(x=gate, y=self._project(normed, f"{name}.mlp.up_proj"))
        added = self._project(gated, f"{name}.mlp.down_proj")
        return self._residual(hidden, added, f"{name}.mlp_output_norm.weight")

    def _activate(self, x: Any) -> Any:
        match self._shape.activation:
            case "silu":
                return self._mb.silu(x=x)
            case "gelu":
                return self._mb.gelu(x=x, mode="TANH_APPROXIMATION")

    def _attention(
        self, layer_name: str, index: int, layer: Layer, x: Any, inputs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, Any]]:
        """Attention over slots and new tokens; the new keys and values, (1, key heads, L, head) each.

        `index`: the layer's place among those with attention. `inputs["mask"]`: its mask for all query heads.
        """
        shape, mb, name = self._shape, self._mb, f"{layer_name}.self_attn"
        queries = self._turned(f"{name}.q", shape.heads, layer, x, inputs)
        keys = self._turned(f"{name}.k", shape.key_heads, layer, x, inputs)
        values = self._heads(x, f"{name}.v_proj", shape.key_heads)
        keys, values = (mb.transpose(x=each, perm=[0, 1, 3, 2]) for each in (keys, values))
        if self._package.position_scale:
            queries = mb.mul(x=queries, y=inputs["position_scale"])
        queries = mb.mul(x=queries, y=np.float16(shape.score_scale))
        stacked = (1, shape.key_heads, self._sharing * self._width, shape.head)
        queries = mb.reshape(x=mb.transpose(x=queries, perm=[0, 1, 3, 2]), shape=stacked)
        all_keys = mb.concat(values=[self._cached(inputs["kv"], index), keys], axis=2)
        all_values = mb.concat(values=[self._cached(inputs["kv"], shape.attentions + index), values], axis=2)
        scores = self._cap(mb.matmul(x=queries, y=all_keys, transpose_y=True), shape.score_cap)
        scores = mb.add(x=scores, y=inputs["mask"])
        seen = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=all_values)
        seen = mb.reshape(x=seen, shape=(shape.key_heads, self._sharing, self._width, shape.head))
        seen = mb.transpose(x=seen, perm=[0, 1, 3, 2])
        seen = mb.reshape(x=seen, shape=(1, shape.heads * shape.head, 1, self._width))
        return self._project(seen, f"{name}.o_proj"), (keys, values)

    def _convolution(self, name: str, index: int, x: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """A gated short convolution along each token's path (LFM2), and its new inputs in the cache's layout.

        `index`: the layer's place among the convolutions. A tree's ancestors are chosen by a product with a matrix of
        zeros and ones, since the device has no gather.
        """
        shape, mb, width = self._shape, self._mb, self._width
        before, after, given = mb.split(x=self._project(x, f"{name}.in_proj"), num_splits=3, axis=1)
        current = mb.mul(x=before, y=given)
        columns = mb.reshape(x=current, shape=(1, 1, shape.hidden, width))
        size = [1, shape.taps - 1, shape.hidden, width]
        kept = mb.slice_by_size(x=inputs["past"], begin=[index, 0, 0, 0], size=size)
        past = mb.add(x=kept, y=mb.matmul(x=columns, y=inputs["ancestors"]))
        past_taps, last_tap = self._constants.taps(f"{name}.conv.weight")
        summed = mb.reduce_sum(x=mb.mul(x=past, y=past_taps), axes=[1], keep_dims=True)
        summed = mb.add(x=mb.reshape(x=summed, shape=(1, shape.hidden, 1, width)), y=mb.mul(x=current, y=last_tap))
        if f"{name}.conv.bias" in self._constants:
            summed = mb.add(x=summed, y=self._constants.vector(f"{name}.conv.bias", axis=1))
        row = mb.reshape(x=current, shape=(self._sharing, shape.key_heads, shape.head, width))
        mixed = self._project(mb.mul(x=after, y=summed), f"{name}.o_proj")
        return mixed, mb.transpose(x=row, perm=[0, 1, 3, 2])

    def _cached(self, cache: Any, row: int) -> Any:
        size = [1, self._shape.key_heads, self._package.context, self._shape.head]
        return self._mb.slice_by_size(x=cache, begin=[row, 0, 0, 0], size=size)

    def _cap(self, x: Any, cap: float | None) -> Any:
        if cap is None:
            return x
        return self._mb.mul(x=self._mb.tanh(x=self._mb.real_div(x=x, y=np.float16(cap))), y=np.float16(cap))

    def _logits(self, normed: Any) -> list[Any]:
        # The vocabulary is the last axis: with tokens last, the device would pad each logit to 64 bytes.
        return [
            self._mb.transpose(
                x=self._cap(self._convolve(normed, kernel), self._shape.logit_cap),
                perm=[0, 2, 3, 1],
                name=f"logits_{index}",
            )
            for index, kernel in enumerate(self._constants.head_kernels())
        ]
