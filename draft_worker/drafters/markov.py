"""The Markov heads of DSpark: how a block's tokens so far correct a row's logits. Knows no attention and no files.

The three forms are those of deepseek-ai/DeepSpec (deepspec/modeling/dspark/markov_head.py). A row's logits are those of
the block's forward plus `correction(latent)`, where the latent comes of the token before the row.
"""

import mlx.core as mx
import mlx.nn as nn

from draft_worker.drafters.block_form import BlockForm


def markov_head(form: BlockForm, tokens: int | None = None) -> "MarkovHead":
    """The head that the form states. `tokens`: how many it corrects; None: the whole vocabulary."""
    match form.markov:
        case "gated":
            return GatedMarkovHead(form, tokens)
        case "rnn":
            return RecurrentMarkovHead(form, tokens)
        case _:
            return MarkovHead(form, tokens)


class MarkovHead(nn.Module):
    """A correction by the token before alone, of limited rank."""

    def __init__(self, form: BlockForm, tokens: int | None = None) -> None:
        super().__init__()
        self._rank = form.rank
        self.markov_w1 = nn.Embedding(form.vocabulary, form.rank)
        self.markov_w2 = nn.Linear(form.rank, tokens or form.vocabulary, bias=False)

    def initial(self, count: int) -> mx.array:
        """(count, rank) states before the first row of a block."""
        return mx.zeros((count, self._rank), self.markov_w1.weight.dtype)

    def step(self, state: mx.array, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """The states behind a row, and the (..., rank) latents of its correction.

        `tokens` (...): those before the row. `hidden` (..., width): the row's states behind the final norm.
        """
        return state, self.markov_w1(tokens)

    def correction(self, latent: mx.array) -> mx.array:
        """(..., head) numbers to add to a row's logits."""
        return self.markov_w2(latent)

    def latents(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """(..., rows, rank) latents of whole blocks, whose tokens are known: in training.

        `tokens` (..., rows): the token before each row. `hidden` (..., rows, width).
        """
        return self.step(self.initial(0), tokens, hidden)[1]


class GatedMarkovHead(MarkovHead):
    """The row's state decides how much of the token's vector counts."""

    def __init__(self, form: BlockForm, tokens: int | None = None) -> None:
        super().__init__(form, tokens)
        self.gate_proj = nn.Linear(form.width + form.rank, form.rank)

    def step(self, state: mx.array, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        vector = self.markov_w1(tokens)
        return state, mx.sigmoid(self.gate_proj(mx.concatenate([hidden, vector], axis=-1))) * vector


class RecurrentMarkovHead(MarkovHead):
    """A recurrent state sees all tokens of the block so far."""

    def __init__(self, form: BlockForm, tokens: int | None = None) -> None:
        super().__init__(form, tokens)
        self.joint_proj = nn.Linear(2 * form.rank + form.width, 3 * form.rank)

    def step(self, state: mx.array, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        joined = mx.concatenate([state, self.markov_w1(tokens), hidden], axis=-1)
        gate, candidate, output = mx.split(self.joint_proj(joined), 3, axis=-1)
        gate = mx.sigmoid(gate)
        return gate * state + (1 - gate) * mx.tanh(candidate), mx.tanh(output)

    def latents(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        state = mx.zeros((*tokens.shape[:-1], self._rank), hidden.dtype)
        rows = []
        for row in range(tokens.shape[-1]):
            state, latent = self.step(state, tokens[..., row], hidden[..., row, :])
            rows.append(latent)
        return mx.stack(rows, axis=-2)
