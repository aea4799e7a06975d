"""The network of ReDrafter: a recurrence over the drafted tokens and a head. Knows no files and no trees.

From apple/ml-recurrent-drafter (recurrent_drafting/modeling_drafter.py; arXiv 2403.09919). The embedding is the
target's.
"""

import mlx.core as mx
import mlx.nn as nn
import msgspec


class ReDrafterForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a ReDrafter, as its config.json states them."""

    width: int
    """Elements of the target's states, of its embedding and of the recurrent state."""
    vocabulary: int
    exit: int
    """Elements of the head's states: 2 * width without an input projection."""
    blocks: int
    """Residual blocks of the head."""
    recurrent: bool = True
    """False: the state is the sum of the embeddings."""


class ResidualBlock(nn.Module):
    """x + SiLU(Linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def __call__(self, x: mx.array) -> mx.array:
        return x + nn.silu(self.linear(x))


class ReDrafter(nn.Module):
    """Reads the target's final state of the last verified token, and the tokens behind that one."""

    def __init__(self, form: ReDrafterForm) -> None:
        super().__init__()
        self.form = form
        if form.exit != 2 * form.width:
            self.input_proj = nn.Linear(2 * form.width, form.exit)
        self.lm_head = [
            *(ResidualBlock(form.exit) for _ in range(form.blocks)),
            nn.Linear(form.exit, form.vocabulary, bias=False),
        ]
        if form.recurrent:
            self.rnn_u = nn.Linear(form.width, form.width)
            self.rnn_w = nn.Linear(form.width, form.width, bias=False)

    def step(self, state: mx.array, embedded: mx.array) -> mx.array:
        """(..., width) states behind the tokens with these (..., width) embeddings. The first state is zeros."""
        if not self.form.recurrent:
            return embedded + state
        return nn.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def logits(self, feature: mx.array, state: mx.array) -> mx.array:
        """(..., vocabulary) logits of the next token. `feature` (..., width): the target's final state, behind its
        norm, of the last token that has one."""
        x = mx.concatenate([feature, state], axis=-1)
        if self.form.exit != 2 * self.form.width:
            x = self.input_proj(x)
        for layer in self.lm_head:
            x = layer(x)
        return x
