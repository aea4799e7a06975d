"""Laws of the loss."""

import mlx.core as mx

from draft_worker.training.language import loss, wanted


def test_a_drafter_that_equals_its_target_has_no_gradient():
    logits = mx.random.normal((4, 9), key=mx.random.key(1))

    gradient = mx.grad(lambda each: loss(each, wanted(logits, 1.0)).sum())(logits)

    assert float(mx.abs(gradient).max()) < 1e-6
