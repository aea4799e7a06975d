"""What processes held at times of a long drill, and whether it grew. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.lab.drill.processes import Usage

_QUARTER = 0.25
_GROWTH = 1.1
_GROWTH_BYTES = 16 << 20
"""Memory is flat if the last quarter's median is at most a tenth and 16 MiB above the second quarter's."""

Sample = Mapping[str, Usage]
"""What each process held, by its name."""


def growth(names: Iterable[str], samples: Sequence[Sample]) -> list[str]:
    """A sentence for everything that grew from the second quarter to the last; the first quarter is the warm-up."""
    return [sentence for name in names for sentence in _growth(name, samples)]


def figures(names: Iterable[str], samples: Sequence[Sample]) -> dict[str, float]:
    """Median MiB, fewest descriptors and fewest threads of each process in the second and in the last quarter."""
    found: dict[str, float] = {}
    for name in names:
        for label, last in (("early", False), ("late", True)):
            part = _quarter(name, samples, last)
            if part:
                found[f"{name}_{label}_mib"] = round(_median([held.memory for held in part]) / (1 << 20), 1)
                found[f"{name}_{label}_descriptors"] = min(held.descriptors or 0 for held in part)
                found[f"{name}_{label}_threads"] = min(held.threads or 0 for held in part)
    return found


def levels(name: str, samples: Sequence[Sample]) -> str:
    """Memory, descriptors and threads of a process in the second and in the last quarter."""
    found = figures([name], samples)
    early, late = (
        " / ".join(f"{found.get(f'{name}_{label}_{what}', 0):.0f}" for what in ("mib", "descriptors", "threads"))
        for label in ("early", "late")
    )
    return f"{name} MiB / descriptors / threads {early} → {late}"


def _quarter(name: str, samples: Sequence[Sample], last: bool) -> list[Usage]:
    size = max(1, int(len(samples) * _QUARTER))
    part = samples[-size:] if last else samples[size : 2 * size]
    return [sample[name] for sample in part if name in sample]


def _growth(name: str, samples: Sequence[Sample]) -> list[str]:
    early, late = _quarter(name, samples, last=False), _quarter(name, samples, last=True)
    if not early or not late:
        return []
    before, after = _median([held.memory for held in early]), _median([held.memory for held in late])
    sentences: list[str] = []
    if after > _GROWTH * before + _GROWTH_BYTES:
        sentences.append(f"The memory of {name} grew from {before >> 20} to {after >> 20} MiB.")
    for what in ("descriptors", "threads"):
        first, final = ([getattr(held, what) or 0 for held in part] for part in (early, late))
        # Requests in progress hold some too, so the minimum of each quarter is compared.
        if min(final) > min(first) + 1:
            sentences.append(f"The {what} of {name} grew from {min(first)} to {min(final)}.")
    return sentences


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]
