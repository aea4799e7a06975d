"""Training: the loss falls, and an interruption changes nothing."""

from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten

from draft_worker.training.held_out import Examiner
from draft_worker.training.loop import Shell, Stopped, TrainingLoop
from draft_worker.training.optimisers import Optimisers
from draft_worker.training.rows import HELD_OUT, Shards
from draft_worker.training.saved_state import head_tokens, kept_head_tokens, save
from draft_worker.training.target import Target
from protocol.contracts.training import TrainingChoices, TrainingProgress
from protocol.errors import InputError, PipelineError
from tests.support.models.training_work import HEAD, trainee, write_target


class Stage:
    """A training whose clock stands still, and which is stopped after so many rows."""

    def __init__(self, target: Target, work: Path, out: Path, **choices: int) -> None:
        self.losses: list[float] = []
        self._asked, self._last = 0, 10**9
        self.training = trainee(target, work)[0]
        examiner = Examiner(target, np.arange(0, 2 * HEAD, 2))
        shell = Shell(lambda: 0.0, self._stopping, self._report, lambda *_: None)
        asked = TrainingChoices(minutes=0, **choices)
        examined = examiner, Shards(work / HELD_OUT)
        self.loop = TrainingLoop(self.training, Shards(work), examined, asked, out, target.fingerprint, shell)

    def stop_after(self, rows: int) -> "Stage":
        self._last = rows
        return self

    def weights(self) -> dict[str, mx.array]:
        return dict(tree_flatten(self.training.network.trainable_parameters()))

    def _stopping(self) -> bool:
        self._asked += 1
        return self._asked > self._last

    def _report(self, progress: TrainingProgress) -> None:
        if progress.loss is not None:
            self.losses.append(progress.loss)


@pytest.mark.thorough
def test_the_loss_falls(target: Target, work: Path, tmp_path: Path):
    stage = Stage(target, work, tmp_path, steps=14, batch=3)
    row = Shards(work).row(1)
    before = float(stage.training.loss(row, np.random.default_rng(0)))

    stage.loop.run()

    assert float(stage.training.loss(row, np.random.default_rng(0))) < 0.97 * before


@pytest.mark.sampled(1)
def test_an_interrupted_training_equals_one_that_was_not(target: Target, work: Path, tmp_path: Path):
    whole = Stage(target, work, tmp_path / "whole", steps=5, batch=2)
    whole.loop.run()

    with pytest.raises(Stopped):
        # In the middle of the third step.
        Stage(target, work, tmp_path / "parts", steps=5, batch=2).stop_after(5).loop.run()
    resumed = Stage(target, work, tmp_path / "parts", steps=5, batch=2)
    assert resumed.loop.progressed.step == 2
    resumed.loop.run()

    for name, weights in whole.weights().items():
        assert mx.array_equal(weights, resumed.weights()[name]), name


def test_a_state_of_another_training_and_a_damaged_one_are_refused(target: Target, work: Path, tmp_path: Path):
    out = tmp_path / "out"
    Stage(target, work, out, steps=1).loop.run()
    with pytest.raises(InputError, match=r"--seed 0.*--seed 1.*another folder as --out"):
        Stage(target, work, out, steps=1, seed=1)
    with pytest.raises(InputError, match="a training for another target: pass the same as --target"):
        Stage(Target(write_target(tmp_path / "other", seed=1)), work, out, steps=1)
    (out / "training" / "state.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"is damaged.*delete it"):
        Stage(target, work, out, steps=1)


@pytest.mark.parametrize("lost", [{"shards": 2}, {"position": 99}])
def test_an_epoch_whose_shards_were_deleted_gives_way_to_a_new_one(
    lost: dict[str, int], target: Target, work: Path, tmp_path: Path
):
    stage = Stage(target, work, tmp_path, steps=1, batch=2)
    stage.loop.run()
    progressed = msgspec.structs.replace(stage.loop.progressed, **lost)
    network = stage.training.network
    save(tmp_path, progressed, network, Optimisers(network.trainable_parameters()))

    resumed = Stage(target, work, tmp_path, steps=3, batch=2)
    assert resumed.loop.progressed.epoch == 1
    resumed.loop.run()

    assert resumed.loop.progressed.step == 3


def test_a_state_that_can_t_be_written_names_its_file_and_leaves_no_part(
    target: Target, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(path: str, *_: object) -> None:
        Path(path).write_bytes(b"part")
        raise RuntimeError("[write] Unable to write 100 bytes to file.")

    stage = Stage(target, work, tmp_path, steps=1)
    stage.loop.run()
    before = (tmp_path / "training" / "state.safetensors").read_bytes()
    monkeypatch.setattr(mx, "save_safetensors", full)

    with pytest.raises(
        PipelineError, match=r"training/state\.safetensors could not be written.*start the same command"
    ):
        save(tmp_path, stage.loop.progressed, stage.training.network, Optimisers({}))

    assert [path.name for path in (tmp_path / "training").iterdir()] == ["state.safetensors"]
    assert (tmp_path / "training" / "state.safetensors").read_bytes() == before


_COUNTS = np.array([5, 0, 7, 1, 0, 9])


def test_the_tokens_written_most_are_kept_while_counts_grow(tmp_path: Path):
    assert head_tokens(tmp_path, 3, _COUNTS).tolist() == [0, 2, 5]

    assert head_tokens(tmp_path, 3, _COUNTS[::-1]).tolist() == [0, 2, 5]
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["head_tokens.npy"]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([0, 5, 2], "no ascending tokens below 6"),
        ([0.0, 2.0, 3.0], "no ascending tokens below 6"),
        ([0, 2], "holds 2 tokens instead of 3: pass the same --head"),
        (b"", "is damaged"),
        (b"\x93NUMPY\x01\x00v\x00", "is damaged"),
    ],
)
def test_other_tokens_than_a_training_s_are_refused(tokens: list[float] | bytes, words: str, tmp_path: Path):
    file = tmp_path / "training" / "head_tokens.npy"
    file.parent.mkdir()
    if isinstance(tokens, bytes):
        file.write_bytes(tokens)
    else:
        np.save(file, np.array(tokens))

    with pytest.raises(InputError, match=f"{words}.*another folder as --out"):
        kept_head_tokens(tmp_path, 3, 6)
