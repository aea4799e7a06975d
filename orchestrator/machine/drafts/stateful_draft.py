"""The path of a draft that is a Core ML package of another's making. Reads no package."""

from pathlib import Path

from orchestrator.machine.models.checkpoints import hub_package
from protocol.errors import InputError

STATEFUL = "stateful"
"""The draft engine of such a package."""
PACKAGE = ".mlpackage"
_COMPILED = ".mlmodelc"


def is_package(name: str) -> bool:
    """Whether the name of a draft is that of a Core ML package or of a compiled one, not of a folder that has one."""
    return name.rstrip("/").endswith((PACKAGE, _COMPILED))


def stateful_draft(name: str) -> Path:
    """The package `name`: a folder, or owner/name:FILE.mlpackage on Hugging Face, which is fetched once.

    Raises InputError for a package that is not there, and for a compiled one.
    """
    name = name.rstrip("/")
    if name.endswith(_COMPILED):
        raise InputError(
            f"{name} is a compiled model, whose operations and shapes can't be checked: "
            f"pass the {PACKAGE} that it was compiled from, or convert the original model."
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    found = hub_package(name)
    if found is None:
        raise InputError(
            f"There is no package {name!r}: check the path, or pass owner/name:FILE{PACKAGE} for one on Hugging Face."
        )
    return found


def not_measurable(name: str | None) -> InputError:
    """The answer of commands that compare a draft with mlx-lm's own decoding."""
    return InputError(f"{name} can't be measured beside mlx-lm: pass a draft in mlx-lm's format.")
