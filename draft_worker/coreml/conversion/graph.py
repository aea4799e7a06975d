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
    ancestors (1, taps - 1, L, L)            1 in row i of column j if token i is that ancestor of token j, else 0; of a
                                             block drafter, ancestors in the token's own block
    g         (1, hidden, 1, L)              EAGLE-3's conditioning vectors
Outputs:
    logits_0, logits_1, ...  (1, 1, L, rows) the head in chunks, the logits of a token contiguous
    kv_new    (rows, key heads, L, head)     new keys and values, for the host to write to slots, then the new inputs
                                             of the convolutions, heads / key heads rows each; not of a block drafter
    state     (1, 1, L, hidden or rank)      of a trained drafter: `Conditioning.state`
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from draft_worker.coreml.conditioning import SELECTOR, Conditioning
from draft_worker.coreml.conversion.weights import Constants
from draft_worker.coreml.package import Layer, Package, rotation_inputs
from draft_worker.coreml.toolchain import toolchain


class GraphParts:
    """The parts that all functions of a package share: norms, projections, rotated heads.

    Adds operations to the function that is being built, whose calls have `width` tokens.
    """

    def __init__(self, package: Package, constants: Constants, width: int) -> None:
        self._package = package
        self._shape = package.shape
        self._constants = constants
        self._width = width
        self._mb = toolchain().operations

    def _placeholders(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        half = toolchain().types.fp16
        return {name: self._mb.placeholder(shape=shape, dtype=half) for name, shape in shapes.items()}

    def _keys_values(self, name: str, layer: Layer, x: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """The keys and values of an attention for the normed states `x`: (1, key heads, L, head) each."""
        keys = self._turned(f"{name}.k", self._shape.key_heads, layer, x, inputs)
        values = self._heads(x, f"{name}.v_proj", self._shape.key_heads)
        return self._mb.transpose(x=keys, perm=[0, 1, 3, 2]), self._mb.transpose(x=values, perm=[0, 1, 3, 2])

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


_LARGEST = np.float16(65_504)
"""fp16's largest number."""


def decoder(package: Package, constants: Constants, width: int, on_layer: Callable[[], None]) -> Any:
    """The MIL function for one width. Calls `on_layer` after each layer."""
    return _Decoder(package, constants, width).function(on_layer)


class _Decoder(GraphParts):
    def __init__(self, package: Package, constants: Constants, width: int) -> None:
        super().__init__(package, constants, width)
        self._sharing = package.shape.sharing

    def function(self, on_layer: Callable[[], None]) -> Any:
        built = toolchain().program.Function(self._inputs(), opset_version=toolchain().coremltools.target.iOS18)
        with built:
            inputs = dict(built.inputs)
            masks = {name: self._shared_mask(inputs[name]) for name in self._package.masks}
            hidden, keys, values, kept = inputs["x"], [], [], []
            for index, layer in enumerate(self._shape.layers):
                name = f"model.layers.{index}"
                normed = self._norm(hidden, f"{name}.input_layernorm.weight", axis=1)
                if "g" in inputs and index == 0:
                    normed, hidden = self._conditioned(name, normed, inputs["g"])
                if layer.convolution:
                    mixed, row = self._convolution(f"{name}.conv", len(kept), normed, inputs)
                    kept.append(row)
                else:
                    mask = masks[self._package.mask_of(layer)]
                    mixed, (key, value) = self._attention(name, len(keys), layer, normed, inputs | {"mask": mask})
                    keys.append(key)
                    values.append(value)
                hidden = self._residual(hidden, mixed, f"{name}.attention_output_norm.weight")
                hidden = self._feed_forward(name, hidden, inputs)
                on_layer()
            normed = self._norm(hidden, "model.norm.weight", axis=1)
            outputs = [*self._logits(normed), *self._states(hidden, normed)]
            if self._package.keeps_rows:
                outputs.append(self._mb.concat(values=[*keys, *values, *kept], axis=0, name="kv_new"))
            built.set_outputs(outputs)
        return built

    def _inputs(self) -> dict[str, Any]:
        return self._placeholders(self._package.input_shapes(self._width) | {"kv": self._package.cache_shape})

    def _conditioned(self, name: str, normed: Any, given: Any) -> tuple[Any, Any]:
        """The input of EAGLE-3's attention, embedding and conditioning vector side by side; its residual stream."""
        conditioning = self._package.conditioning
        normed_given = self._norm(given, f"{name}.hidden_norm.weight", axis=1)
        assert conditioning is not None
        form = conditioning.eagle3
        before = form is not None and form.norm_before_residual
        return self._mb.concat(values=[normed, normed_given], axis=1), normed_given if before else given

    def _states(self, hidden: Any, normed: Any) -> list[Any]:
        """A row's states, contiguous, as the package states them."""
        conditioning = self._package.conditioning
        if conditioning is None or conditioning.state == "none":
            return []
        states = hidden if conditioning.state == "raw" else normed
        if conditioning.state == "latent":
            states = self._project(normed, f"{SELECTOR}.hidden_projection")
        return [self._mb.transpose(x=states, perm=[0, 2, 3, 1], name="state")]

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

    def _feed_forward(self, name: str, hidden: Any, inputs: dict[str, Any]) -> Any:
        normed = self._norm(hidden, f"{name}.post_attention_layernorm.weight", axis=1)
        before, behind = self._block_kernels(f"{name}.mlp_conv", normed)
        normed = self._along_block(normed, before, inputs)
        gate = self._activate(self._project(normed, f"{name}.mlp.gate_proj"))
        gated = self._mb.mul(x=gate, y=self._project(normed, f"{name}.mlp.up_proj"))
        added = self._along_block(self._project(gated, f"{name}.mlp.down_proj"), behind, inputs)
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
        before, behind = self._block_kernels(f"{layer_name}.attention_conv", x)
        x = self._along_block(x, before, inputs)
        queries = self._turned(f"{name}.q", shape.heads, layer, x, inputs)
        keys, values = self._keys_values(name, layer, x, inputs)
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
        return self._along_block(self._project(seen, f"{name}.o_proj"), behind, inputs), (keys, values)

    def _block_kernels(self, name: str, x: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """DFlash2's kernels of each input `x` of a part of a layer, for its two convolutions: one before the part, one
        behind it. (1, groups, channels of a group, L) for each tap, the input's own first; none without convolutions.
        """
        if f"{name}.base_kernel" not in self._constants:
            return (), ()
        added = self._project(x, f"{name}.kernel_projection")
        groups = added.shape[1]
        base = self._constants.grid(f"{name}.base_kernel", groups)
        kernels = self._mb.split(x=self._mb.add(x=added, y=base), num_splits=2 * self._shape.taps, axis=1)
        return kernels[: self._shape.taps], kernels[self._shape.taps :]

    def _along_block(self, x: Any, kernels: Sequence[Any], inputs: dict[str, Any]) -> Any:
        """The convolution of `x` along each block with these kernels; `x` itself without any.

        Earlier inputs are chosen by a product with a matrix of zeros and ones, as in `_convolution`.
        """
        if not kernels:
            return x
        mb, shape = self._mb, (1, *kernels[0].shape[1:])
        tapped = [x]
        if len(kernels) > 1:
            columns = mb.reshape(x=x, shape=(1, 1, self._shape.hidden, self._width))
            earlier = mb.matmul(x=columns, y=inputs["ancestors"])
            tapped += [earlier] if len(kernels) == 2 else mb.split(x=earlier, num_splits=len(kernels) - 1, axis=1)
        products = [
            mb.mul(x=mb.reshape(x=each, shape=shape), y=kernel) for each, kernel in zip(tapped, kernels, strict=True)
        ]
        total = products[0]
        for product in products[1:]:
            total = mb.add(x=total, y=product)
        return mb.reshape(x=total, shape=(1, self._shape.hidden, 1, self._width))

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


def feature_reader(package: Package, constants: Constants, conditioning: Conditioning) -> Any:
    """The MIL function."""
    return _FeatureReader(package, constants, conditioning).function()


class _FeatureReader(GraphParts):
    """The function of a trained drafter's package that reads the target's features.

    Inputs for W tokens, all fp16, the columns behind the last token a repetition of it:
        features_0, ...  (1, columns, 1, W)  inputs of fc, times `Conditioning.scale`
        cos, sin         (1, 1, head, W)     of the tokens' positions; block drafters only
    Output of EAGLE-3's fuse:
        fused            (1, 1, W, hidden)   the conditioning vectors
    Output of a block drafter's context:
        kv_new           (2 layers, key heads, W, head)  keys of every layer, then values of every layer
    """

    def __init__(self, package: Package, constants: Constants, conditioning: Conditioning) -> None:
        super().__init__(package, constants, conditioning.width)
        self._conditioning = conditioning

    def function(self) -> Any:
        inputs = self._placeholders(self._package.feature_input_shapes)
        built = toolchain().program.Function(inputs, opset_version=toolchain().coremltools.target.iOS18)
        with built:
            inputs = dict(built.inputs)
            fused = self._fused(inputs)
            if self._conditioning.block is None:
                built.set_outputs([self._mb.transpose(x=fused, perm=[0, 2, 3, 1], name="fused")])
            else:
                built.set_outputs([self._context(self._norm(fused, "hidden_norm.weight", axis=1), inputs)])
        return built

    def _fused(self, inputs: dict[str, Any]) -> Any:
        """fc of the features. An axis that is too long for the device is divided, and fc with it."""
        products = [
            self._project(inputs[f"features_{index}"], f"fc.{index}") for index in range(len(self._conditioning.parts))
        ]
        total = products[0]
        for product in products[1:]:
            total = self._mb.add(x=total, y=product)
        return total

    def _context(self, states: Any, inputs: dict[str, Any]) -> Any:
        rows = [
            self._keys_values(f"model.layers.{index}.self_attn", layer, states, inputs)
            for index, layer in enumerate(self._shape.layers)
        ]
        keys, values = zip(*rows, strict=True)
        return self._mb.concat(values=[*keys, *values], axis=0, name="kv_new")
