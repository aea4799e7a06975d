"""Which device profile the drafts of a target are planned for. Pure."""

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from orchestrator.machine.pairs.expectations import in_proportion
from orchestrator.machine.pairs.recommended_pairs import Model
from orchestrator.machine.profiles.device_profiles import DeviceProfile, load_profile, mac_names

_CHIP = re.compile(r"m\d+(-pro|-max|-ultra)?")


class ProfileChoice(NamedTuple):
    profile: DeviceProfile
    of: Literal["this machine", "this chip", "another machine"]
    sentence: str


def profile_for(
    target: Model, calibrated: DeviceProfile | None, chip: str, *, on_processor: bool = False
) -> ProfileChoice:
    """What `calibrate` wrote if it can be held against a target of this size, else a shipped profile of the same chip,
    else one of another; of several the one with the target that is most like this one in size.

    `on_processor`: where this machine's own profile was measured.
    """
    if calibrated is not None and in_proportion(calibrated.target, target.read(on_processor)) is not None:
        words = f"Planned for this machine, by what `launch-pipeline calibrate` measured ({calibrated.name})."
        return ProfileChoice(calibrated, "this machine", words)
    shipped = {name: load_profile(name) for name in mac_names()}
    own = [profile for name, profile in shipped.items() if _chip_of(name) == _short(chip)]
    profile = _nearest(own or list(shipped.values()), target)
    state = "was not calibrated" if calibrated is None else "was calibrated with a target of quite another size"
    advice = f"This machine {state}: `launch-pipeline calibrate` measures it."
    if own:
        return ProfileChoice(profile, "this chip", f"Planned for {profile.name}, a profile of this chip. {advice}")
    return ProfileChoice(profile, "another machine", f"Planned for {profile.name}, not for this machine. {advice}")


def _short(chip: str) -> str:
    """As the names of shipped profiles have it."""
    return chip.removeprefix("Apple ").lower().replace(" ", "-")


def _chip_of(profile: str) -> str:
    found = _CHIP.match(profile)
    return found[0] if found else ""


def _nearest(profiles: Sequence[DeviceProfile], target: Model) -> DeviceProfile:
    def distance(profile: DeviceProfile) -> float:
        weights = profile.target.weights
        return math.inf if weights is None else abs(math.log(target.read(on_processor=False) / weights))

    return min(profiles, key=distance)
