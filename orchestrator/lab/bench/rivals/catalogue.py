"""The rivals that the bench knows, and of those that it installs: packages, program and the settings that compete."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.lab.bench.names import LLAMA_CPP, contender_name
from orchestrator.machine.hardware import installed_version
from protocol.errors import InputError

_LOOKUP_DRAFT_TOKENS = (3, 6, 12)
"""6 is mlx-dspark's default."""
_LOOKUP_LONG_DRAFT = 32
"""mlx-dspark's default: so many tokens after a long match."""
_DRAFTER_TOKENS = {"dspark": (1, 2, 3, 4, 7), "dflash": (1, 2, 3, 4, 7)}
"""2 is mlx-dspark's default for DSpark, 7 a whole block."""
_SHARED = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "transformers")
"""The rival runs the versions that the bench runs, so that neither has the better library."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of a rival with one setting."""

    contender: str
    """Its name in the table."""
    name: str
    """Its name for the program."""
    options: Mapping[str, int]
    """Keywords of the loop."""


@dataclass(frozen=True, slots=True)
class Rival:
    """Software with decoding loops of its own."""

    name: str
    packages: Mapping[str, str]
    """Pinned packages of its own, and their versions."""
    program: Path
    """Runs in the rival's environment and speaks `messages`."""
    loops: tuple[Loop, ...]
    """Those that need no drafter."""
    drafter_loops: Callable[[str, str], Iterator[Loop]]
    """Those for a kind of drafter, and its name in the table."""

    def pins(self) -> dict[str, str]:
        """All packages of its environment that have a fixed version."""
        shared = {package: installed_version(package) for package in _SHARED}
        return {package: version for package, version in shared.items() if version} | dict(self.packages)


def parse_rivals(text: str | None) -> tuple[str, ...]:
    """Names separated by commas; None for none. Raises InputError naming the unknown ones."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    known = (*RIVALS, LLAMA_CPP)
    unknown = [name for name in names if name not in known]
    if unknown or (text is not None and not names):
        raise InputError(f"There is no rival {', '.join(unknown) or repr(text)}: choose from {', '.join(known)}.")
    return tuple(dict.fromkeys(names))


def _mlx_dspark_loops() -> Iterator[Loop]:
    yield Loop("mlx-dspark greedy", "greedy", {})
    # Its default needs a match of three tokens; two are its other sensible choice.
    for line, shortest in (("mlx-dspark lookup", 3), ("mlx-dspark lookup, bigrams", 2)):
        for count in _LOOKUP_DRAFT_TOKENS:
            options = {"max_draft_tokens": count, "long_draft_tokens": _LOOKUP_LONG_DRAFT, "ngram_min": shortest}
            yield Loop(contender_name(line, count), "lookup", options)


def _mlx_dspark_drafter_loops(kind: str, name: str) -> Iterator[Loop]:
    """Each with as many tokens a round as may compete; a drafter of another kind has no loop."""
    for count in _DRAFTER_TOKENS.get(kind, ()):
        yield Loop(contender_name(f"mlx-dspark {name}", count), kind, {"max_draft_tokens": count})


_MLX_DSPARK = Rival(
    name="mlx-dspark",
    packages={"mlx-dspark": "0.20.3", "mlx-vlm": "0.7.10"},
    program=Path(__file__).with_name("mlx_dspark_program.py"),
    loops=tuple(_mlx_dspark_loops()),
    drafter_loops=_mlx_dspark_drafter_loops,
)
RIVALS: dict[str, Rival] = {_MLX_DSPARK.name: _MLX_DSPARK}
"""Those with a program of ours, which runs in an environment of theirs."""
