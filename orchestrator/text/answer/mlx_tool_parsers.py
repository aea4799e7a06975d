"""Modules of mlx_lm.tool_parsers, loaded without mlx_lm itself, which imports MLX."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = "orchestrator_mlx_tool_parsers"
"""The name under which their package is loaded."""


def has_mlx_parser(name: str) -> bool:
    """Whether the installed mlx-lm has this parser."""
    return (_folder() / f"{name}.py").is_file()


def mlx_parser(name: str) -> ModuleType:
    """The module of a parser: `parse_tool_call`, `tool_call_start`, `tool_call_end`."""
    if _PACKAGE not in sys.modules:
        folder = _folder()
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _folder() -> Path:
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None
    return Path(next(iter(found.submodule_search_locations or ()))) / "tool_parsers"
