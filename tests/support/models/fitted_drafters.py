"""Tiny drafters fitted to a text that a tiny target writes, texts fitted to a drafter, and features of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx import optimizers
from numpy.typing import NDArray

from draft_worker.drafter_examination import OwnText
from draft_worker.drafters.block import BlockDrafter, BlockPart
from draft_worker.engine_interface import Batch, Engine
from protocol.messages.features import FINAL
from protocol.messages.sampling import Sampling
from tests.support.models.block_files import latents

_STEPS = 40
_PROMPT = 17


def features(target: Any, tokens: Sequence[int], outputs: Sequence[int]) -> NDArray[np.float32]:
    """(tokens, outputs * width) of a Llama-like mlx-lm model."""
    hidden = target.model.embed_tokens(mx.array([list(tokens)]))
    found: dict[int, mx.array] = {}
    for index, layer in enumerate(target.model.layers):
        hidden = layer(hidden, "causal", None)
        found[index] = hidden[0]
    found[FINAL] = target.model.norm(hidden)[0]
    return np.array(mx.concatenate([found[output] for output in outputs], axis=-1))


def continued(target: Any, prompt: Sequence[int], length: int) -> list[int]:
    """The prompt, and the target's greedy continuation of it to so many tokens."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(int(mx.argmax(target(mx.array([tokens]))[0, -1])))
    return tokens


def fit_block(network: BlockDrafter, target: Any, text: Sequence[int]) -> None:
    """Train on every anchor of the text, all in one forward."""
    form = network.form
    anchors = range(1, len(text) - form.rows)
    tokens = mx.array([[t for anchor in anchors for t in (text[anchor], *[form.mask_token] * form.masks)]])
    positions = mx.array([[anchor + i for anchor in anchors for i in range(form.block)]])
    numbers = mx.array([[number for number in range(len(anchors)) for _ in range(form.block)]])
    known = mx.array([[anchor for anchor in anchors for _ in range(form.block)]])
    context = mx.arange(len(text))[None]
    visible = network.visibility(context, positions, numbers, known)
    read = mx.array(features(target, text, form.outputs))[None]
    before = mx.array([list(text[anchor : anchor + form.rows]) for anchor in anchors])
    right = mx.array([list(text[anchor + 1 : anchor + 1 + form.rows]) for anchor in anchors])

    def loss(network: BlockDrafter) -> mx.array:
        part = BlockPart(tokens.shape[1], network.keys_values(network.encode(read), context), visible)
        states = network(target.model.embed_tokens(tokens), positions, [part], numbers)
        states = states.reshape(len(anchors), form.block, -1)[:, form.block - form.rows :]
        logits = target.lm_head(states)
        if form.markov is not None:
            logits = logits + network.markov_head.correction(latents(network.markov_head, before, states))
        if form.choices:
            selector = network.candidate_selector
            projected = selector.predecessor_codebook[before] * selector.hidden_projection(states)
            logits = logits + projected @ selector.successor_codebook.T
        return nn.losses.cross_entropy(logits, right).mean()

    optimizer = optimizers.Adam(learning_rate=5e-3)
    step = nn.value_and_grad(network, loss)
    for _ in range(_STEPS):
        _, gradients = step(network)
        optimizer.update(network, gradients)
        mx.eval(network.parameters(), optimizer.state)


def guessed_text(engine: Engine, sizes: Mapping[str, int], own: int) -> OwnText:
    """A text behind some random tokens of which the drafter guesses each of `own` tokens, and random states. `sizes`:
    of the target, as its config.json names them."""
    assert engine.features is not None
    random, length = np.random.default_rng(1), _PROMPT + own
    tokens = random.integers(0, sizes["vocab_size"], _PROMPT).tolist()
    states = 2 * random.standard_normal((length, 1 + sizes["num_hidden_layers"], sizes["hidden_size"]), np.float32)
    rows = states[:, [output + 1 for output in engine.features.outputs]].reshape(length, -1)
    while len(tokens) < length:
        root, sequence = len(tokens) - 1, engine.open(Sampling(), engine.vocabulary)
        sequence.prefill(tokens[:root])
        sequence.feed(0, rows[:root])
        while sequence.unread:
            sequence.read(root)
        tokens.append(sequence.evaluate(Batch([], [tokens[root]], [-1], 1))[0].tokens[0])
    return OwnText(tokens, states)
