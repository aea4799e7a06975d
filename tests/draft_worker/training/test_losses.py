"""The loss and its gradient, against MLX's own differentiation of the formula."""

import mlx.core as mx
import numpy as np
import pytest

from draft_worker.training.losses import DIVERGENCE, VARIATION, loss, wanted


def _formula(logits: mx.array, target: mx.array, temperature: float) -> mx.array:
    scale = temperature or 1.0
    p = mx.softmax(target / scale, axis=-1)
    log_q = logits / scale - mx.logsumexp(logits / scale, axis=-1, keepdims=True)
    cross = -(p * log_q).sum(-1)
    best = -mx.take_along_axis(log_q, mx.argmax(target, axis=-1)[:, None], axis=-1)[:, 0]
    second = 0.5 * mx.abs(mx.exp(log_q) - p).sum(-1) if temperature else best
    return DIVERGENCE * cross + VARIATION * second


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_loss_and_its_gradient_are_those_of_the_formula(temperature: float):
    mx.random.seed(3)
    logits, target = 2 * mx.random.normal((5, 11)), 2 * mx.random.normal((5, 11))
    weights = mx.array([1.0, 2.0, 0.5, 0.0, 3.0])

    def ours(logits: mx.array) -> mx.array:
        return (weights * loss(logits, wanted(target, temperature))).sum()

    def plain(logits: mx.array) -> mx.array:
        return (weights * _formula(logits, target, temperature)).sum()

    value, gradient = mx.value_and_grad(ours)(logits)
    expected, expected_gradient = mx.value_and_grad(plain)(logits)

    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(np.array(gradient), np.array(expected_gradient), atol=1e-5)


def test_a_drafter_that_equals_its_target_has_no_gradient():
    logits = mx.random.normal((4, 9), key=mx.random.key(1))

    gradient = mx.grad(lambda each: loss(each, wanted(logits, 1.0)).sum())(logits)

    assert float(mx.abs(gradient).max()) < 1e-6
