"""Laws of a drafter's matrix at the target: it arrives whole or not at all, whatever is lost, late or hostile."""

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from msgspec.structs import replace

from draft_worker import projection as drafts
from draft_worker.projection import ProjectionMatrix
from protocol.features.blocks import projection_key
from protocol.kv.arena_header import ElementType
from protocol.messages.features import FeatureForm, Projection, ProjectionBlock, ProjectionShipment, ProjectionWanted
from target_worker.feature_rings import ProjectionIntake, projected

FORM = FeatureForm((0, 2), 64)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MAX_PAYLOAD", 3000)


def layer(dtype: mx.Dtype = mx.float16, bits: int = 0) -> nn.Module:
    mx.random.seed(1)
    made: nn.Module = nn.Linear(FORM.joined, 32, bias=True)
    made.set_dtype(dtype)
    return made.to_quantized(64, bits) if bits else made


def matrix(**options) -> ProjectionMatrix:
    made = ProjectionMatrix.of(layer(**options), FORM)
    assert made is not None
    return made


def key(sent: ProjectionMatrix) -> int:
    assert sent.form.projection is not None
    return sent.form.projection.key


def answered(sent: ProjectionMatrix, wanted: ProjectionWanted) -> ProjectionShipment:
    answer = sent.answer(wanted)
    assert answer is not None
    return answer


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "options", [{}, {"dtype": mx.bfloat16}, {"dtype": mx.float32}, {"bits": 4}, {"dtype": mx.bfloat16, "bits": 8}]
)
@pytest.mark.parametrize("element", list(ElementType))
def test_the_target_makes_of_its_rows_what_the_drafter_would(options: dict, element: ElementType):
    """But for the bias, which the drafter adds."""
    own, sent = layer(**options), matrix(**options)
    intake = ProjectionIntake(sent.form)
    blocks = 0
    while (wanted := intake.wanted) is not None:
        intake.add(answered(sent, wanted))
        blocks += 1
    rows = mx.random.normal((5, FORM.joined)).astype(mx.bfloat16).astype(mx.float32)
    stored = np.array(rows.astype(mx.bfloat16).view(mx.uint16)) if element == 2 else np.array(rows, element.numpy_name)
    assert intake.matrix is not None
    found = mx.array(projected(stored, element, intake.matrix))
    found = found.view(mx.bfloat16) if element == 2 else found

    assert blocks > 1
    expected = own(rows) - own.bias
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), np.array(expected), atol=0.02)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(5))
def test_what_is_lost_is_asked_for_again_and_what_comes_late_or_twice_is_dropped(seed: int):
    chance, sent = random.Random(seed), matrix()
    intake, under_way = ProjectionIntake(sent.form), list[ProjectionShipment]()
    for _ in range(400):
        wanted = intake.wanted
        if wanted is None:
            break
        under_way += [answered(sent, wanted)] * chance.choice([0, 1, 2])
        for _ in range(chance.randrange(3)):
            if under_way:
                intake.add(under_way.pop(chance.randrange(len(under_way))))

    assert intake.matrix is not None
    assert np.array_equal(np.array(intake.matrix), np.array(layer().weight))


@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_do_not_fit_are_dropped():
    sent = matrix()
    intake = ProjectionIntake(sent.form)
    block, payload = answered(sent, ProjectionWanted(key(sent), 0))
    strays = [
        ProjectionShipment(replace(block, key=block.key ^ 1), payload),
        ProjectionShipment(replace(block, first=1), payload),
        ProjectionShipment(replace(block, rows=block.rows + 1), payload),
        ProjectionShipment(replace(block, rows=1 << 15), payload),
        ProjectionShipment(replace(block, rows=33), bytes(33 * FORM.joined * 2)),
        ProjectionShipment(replace(block, element=3), payload),
        ProjectionShipment(block, payload[:-1]),
        ProjectionShipment(block, b""),
    ]
    for stray in strays:
        intake.add(stray)

    assert intake.wanted == ProjectionWanted(block.key, 0)


def test_another_matrix_and_one_that_is_too_large_are_given_up():
    other = FeatureForm(FORM.outputs, FORM.width, Projection(4, 7))
    wrong = ProjectionIntake(other)
    wrong.add(ProjectionShipment(ProjectionBlock(7, 0, 4, 1), bytes(4 * FORM.joined * 2)))
    wide = FeatureForm(tuple(range(32)), 1 << 15, Projection(1 << 15, 7))
    large = ProjectionIntake(wide)
    large.add(ProjectionShipment(ProjectionBlock(7, 0, 1, 1), bytes(2 << 20)))

    assert [each.wanted for each in (wrong, large)] == [None, None]
    assert [each.matrix for each in (wrong, large)] == [None, None]


def test_a_draft_answers_for_its_own_matrix_and_rows_that_exist():
    sent = matrix()

    assert sent.answer(ProjectionWanted(key(sent) ^ 1, 0)) is None
    assert sent.answer(ProjectionWanted(key(sent), 32)) is None
    assert sent.answer(ProjectionWanted(key(sent), 31)) is not None
    assert key(sent) == projection_key([np.array(layer().weight).tobytes()])


def test_what_would_not_be_smaller_is_not_projected(monkeypatch: pytest.MonkeyPatch):
    assert ProjectionMatrix.of(nn.Linear(128, 128), FORM) is None
    assert ProjectionMatrix.of(nn.Linear(128, 127), FORM) is not None
    # A row of the matrix has to fit a block.
    monkeypatch.setattr(drafts, "MAX_PAYLOAD", 100)
    assert ProjectionMatrix.of(nn.Linear(128, 32), FORM) is None
