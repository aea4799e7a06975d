"""Measures the gaps at which texts part: `python -m orchestrator.lab.bench.tie_examination ORDER`."""

import sys
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from orchestrator.lab.bench.ties import Gap, Parting, PartingsOrder
from protocol.child_process import claim_output
from protocol.inference.language_model import LanguageModel
from protocol.inference.slots import PREFIX
from protocol.messages.sampling import Sampling
from protocol.sampling.sampler import Noise, scores

_CHUNK = 512


def main() -> int:
    order = msgspec.json.decode(sys.argv[-1], type=PartingsOrder)
    tell = claim_output()
    model = LanguageModel.load(Path(order.folder))
    noise = Noise(model.vocabulary)
    for parting in order.partings:
        tell(Gap(gap(model, parting, noise)))
    return 0


def gap(model: LanguageModel, parting: Parting, noise: Noise) -> float:
    """See `Gap`."""
    sequence = model.sequence()
    before, last = parting.tokens[:-1], parting.tokens[-1]
    for begin in range(0, len(before), _CHUNK):
        sequence.prefill(before[begin : begin + _CHUNK])
    logits = sequence.evaluate([last], [PREFIX])
    sampling = Sampling(temperature=parting.temperature, seed=parting.seed)
    found = np.array(scores(logits, [len(parting.tokens)], sampling, noise))[0]
    following = [float(found[token]) for token in parting.following]
    if len(following) == 1:
        # The other text ends here, by a token that is not told: at best the second one.
        following.append(float(np.partition(found, -2)[-2]))
    spread = float(np.array(logits.astype(mx.float32)).std())
    return (float(found.max()) - min(following)) * (parting.temperature or 1.0) / spread


if __name__ == "__main__":
    sys.exit(main())
