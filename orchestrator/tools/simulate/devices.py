"""What a simulated pipeline runs on: two devices' paces, and wires with delay, jitter and loss. Pure."""

from dataclasses import dataclass, field

import msgspec

from orchestrator.machine.device_profiles import DeviceProfile
from protocol.worker.pacing import DevicePace


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """A target and a draft on the hardware that they run on, each as fast as when it is alone."""

    target: DevicePace
    draft: DevicePace
    """On a device of its own."""
    baseline_draft: DevicePace
    """The draft on the target's own device, as turn-taking decoders use it."""
    slow_down: float = 1.0
    """Factor on everything under a strategy whose draft works while the target verifies."""

    @classmethod
    def of(cls, profile: DeviceProfile) -> "Devices":
        return cls(
            target=profile.target.pace(),
            draft=profile.draft.pace(),
            baseline_draft=profile.draft_on_target_device.pace(),
            slow_down=profile.both_busy.factor,
        )

    def shared(self) -> "Devices":
        """Both at work at once."""
        return Devices(
            target=stretched(self.target, self.slow_down),
            draft=stretched(self.draft, self.slow_down),
            baseline_draft=self.baseline_draft,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The way between the orchestrator and one worker, each direction. Order is kept unless `overtaking` says so."""

    delay: float = 0.00015
    """Seconds a message travels, its encoding, reading and the decision about it included."""
    jitter: float = 0.0
    """Most additional seconds; what is added is uniform."""
    loss: float = 0.0
    """Share of messages that don't get through at first."""
    resend: float | None = 0.2
    """Seconds until a lost one is sent again, as TCP does; None: it is lost for good."""
    doubled: float = 0.0
    """Share of messages that come twice, the second time late."""
    overtaking: float = 0.0
    """Share of messages that nothing holds back, as across a reconnection."""


@dataclass(frozen=True, slots=True)
class Wires:
    """Of one pipeline."""

    target: Wire = field(default_factory=Wire)
    draft: Wire = field(default_factory=Wire)


def stretched(pace: DevicePace, factor: float) -> DevicePace:
    """A device that takes so many times as long for everything."""
    return msgspec.structs.replace(pace, slow_down=pace.slow_down * factor)
