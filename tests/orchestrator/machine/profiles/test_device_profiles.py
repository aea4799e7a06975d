"""Device profiles in slow motion: the same device, every time so many times longer."""

import re
from pathlib import Path

import pytest

from orchestrator.machine.pairs.recommended_pairs import pairs
from orchestrator.machine.profiles.device_profiles import load_profile, mac_names, profile_names
from protocol.errors import InputError
from protocol.worker.pacing import PacedPart


@pytest.mark.parametrize("name", profile_names())
def test_slow_motion_multiplies_every_time(name: str):
    there, here = load_profile(name), load_profile(f"{name}@4")

    assert (there.slow_motion, here.slow_motion) == (1.0, 4.0)
    assert here.name == f"{there.name}@4"
    assert here.both_busy == there.both_busy
    for part in ("target", "draft", "draft_on_target_device"):
        device, slow = (getattr(profile, part).pace(profile.slow_motion) for profile in (there, here))
        for tokens in (1, 2, 7, 16, 40):
            assert slow.forward(tokens) == pytest.approx(4 * device.forward(tokens))
        assert slow.joint([PacedPart(2, 3000)] * 3) == pytest.approx(4 * device.joint([PacedPart(2, 3000)] * 3))
        assert slow.prefill(512) == pytest.approx(4 * device.prefill(512))


@pytest.mark.parametrize("factor", ["0.5", "x", "", "1e9", "-2", "nan"])
def test_a_profile_can_not_be_slower_by_any_factor(factor: str):
    with pytest.raises(InputError, match="times slower"):
        load_profile(f"{profile_names()[0]}@{factor}")


def test_the_path_of_a_file_may_have_the_sign(tmp_path: Path):
    path = tmp_path / "mine@2"
    path.write_text((Path("orchestrator/machine/profiles/devices") / f"{profile_names()[0]}.toml").read_text())

    assert load_profile(str(path)).slow_motion == 1.0
    assert load_profile(f"{path}@3").slow_motion == 3.0


@pytest.mark.parametrize("name", [name for name in mac_names() if "bf16" not in name])
def test_the_pair_of_a_mac_s_profile_is_one_that_is_recommended(name: str):
    """So that `--pair NAME` runs what the profile predicts."""
    pair = next(pair for key, pair in pairs().items() if name.endswith(key))
    target, draft = re.findall(r"([\w.-]+) on", load_profile(name).description)

    assert target in pair.target.id.lower().replace("llama-", "llama")
    assert pair.draft.kind is not None or draft in pair.draft.id.lower().replace("llama-", "llama")
