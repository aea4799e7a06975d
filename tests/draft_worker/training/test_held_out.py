"""The report's figures, on cases computed by hand, and the noise that it is drawn with."""

import numpy as np

from draft_worker.training.held_out import acceptance, first_guess, posterior_noise
from draft_worker.training.language import NO_PLACE, reach
from draft_worker.training.rows import Row
from protocol.contracts.training import DEPTHS, HeldOut, HeldOutAcceptance


def test_a_rate_counts_only_places_whose_guesses_before_are_all_right():
    hits = np.full((4, DEPTHS), NO_PLACE, np.int8)
    hits[:, :3] = [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, NO_PLACE]]

    found = acceptance(0.7, hits)

    assert found.rates == (0.75, 0.6667, 0.0, None, None)  # 3 of 4, 2 of 3, 0 of the one that goes on


def test_a_chain_reaches_as_far_as_the_target_wrote():
    wanted = np.array([False, True, True, False, True, False])
    row = Row(np.zeros(6, np.int32), np.zeros(6, np.int32), wanted, 0.0, np.zeros((6, 2), np.float32))

    assert reach(row).tolist() == [0, 2, 1, 0, 1, 0]


def test_the_first_guess_is_a_mean_over_places():
    each = HeldOutAcceptance(0.0, 30, (0.5,) * DEPTHS), HeldOutAcceptance(1.0, 10, (0.8,) * DEPTHS)
    report = HeldOut(acceptance=each, parameters_per_guess=1)

    assert first_guess(report) == (30 * 0.5 + 10 * 0.8) / 40


def test_noise_given_the_target_s_token_lets_that_token_win_and_is_gumbel_noise_else():
    random = np.random.default_rng(4)
    logits = np.tile(np.array([1.0, 0.0, -1.0, 2.0]), (40_000, 1))
    normaliser = np.log(np.exp(logits).sum(-1))
    probabilities = np.exp(logits[0] - normaliser[0])
    chosen = random.choice(4, len(logits), p=probabilities)

    noise = posterior_noise(logits, normaliser, chosen, random)

    assert ((logits + noise).argmax(-1) == chosen).all()
    # Over all texts that a target samples, its noise is that of an ordinary Gumbel variable.
    np.testing.assert_allclose(noise.mean(0), np.full(4, np.euler_gamma), atol=0.03)
    np.testing.assert_allclose(noise.std(0), np.full(4, np.pi / 6**0.5), atol=0.03)


def test_a_token_outside_the_head_wins_against_all_of_it():
    random = np.random.default_rng(5)
    head = np.zeros((200, 3))

    noise = posterior_noise(head, np.full(200, np.log(4.0)), np.full(200, -1), random)

    assert noise.max(-1).mean() < np.log(3.0) + np.euler_gamma  # the head's best is below that of a free draw
