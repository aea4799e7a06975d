"""The function of a trained drafter's package that reads the target's features, in the layouts of `graph`.

Inputs for W tokens, all fp16, the columns behind the last token a repetition of it:
    features_0, ...  (1, columns, 1, W)  inputs of fc, times `Conditioning.scale`
    cos, sin         (1, 1, head, W)     of the tokens' positions; block drafters only
Output of EAGLE-3's fuse:
    fused            (1, 1, W, hidden)   the conditioning vectors
Output of a block drafter's context:
    kv_new           (2 layers, key heads, W, head)  keys of every layer, then values of every layer
"""

from typing import Any

from draft_worker.coreml.conditioning import Conditioning
from draft_worker.coreml.conversion.graph_parts import GraphParts
from draft_worker.coreml.conversion.weights import Constants
from draft_worker.coreml.package import Package
from draft_worker.coreml.toolchain import toolchain


def feature_reader(package: Package, constants: Constants, conditioning: Conditioning) -> Any:
    """The MIL function."""
    return _FeatureReader(package, constants, conditioning).function()


class _FeatureReader(GraphParts):
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
