"""The devices of a simulated pipeline, and the delays of its wires. Pure."""

from dataclasses import dataclass, field

from orchestrator.machine.profiles.device_profiles import DeviceProfile
from protocol.worker.pacing import DevicePace


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The forward times of target and draft, each without overlap."""

    target: DevicePace
    draft: DevicePace
    """On a device of its own."""
    baseline_draft: DevicePace
    """The draft on the target's device, as the baseline runs it."""
    block: int = 1
    """Tokens in a row that one forward of the draft guesses."""
    slow_down: float = 1.0
    """Factor on the time of a forward while the other device computes too."""

    @classmethod
    def of(cls, profile: DeviceProfile) -> "Devices":
        return cls(
            target=profile.target.pace(profile.slow_motion),
            draft=profile.draft.pace(profile.slow_motion),
            baseline_draft=profile.draft_on_target_device.pace(profile.slow_motion),
            block=profile.draft.block,
            slow_down=profile.both_busy.factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The connection between the orchestrator and one worker. It keeps the order."""

    delay: float = 0.00015
    """Seconds from sending a message to the receiver's reaction, encoding and decoding included."""


@dataclass(frozen=True, slots=True)
class Wires:
    """The wires of one pipeline."""

    target: Wire = field(default_factory=Wire)
    draft: Wire = field(default_factory=Wire)
