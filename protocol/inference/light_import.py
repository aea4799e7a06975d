"""Imports mlx-lm's models without its tokenizers and its downloads. Imports nothing else of ours.

mlx-lm's package imports transformers and huggingface_hub, which is nine tenths of the time. A worker process never
uses them: its model is a folder, and text stays with the orchestrator.
"""

import importlib
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_PACKAGE = "mlx_lm"
_UNUSED = ("mlx_lm.tokenizer_utils", "huggingface_hub")


def import_models() -> None:
    """Makes `mlx_lm.utils` and `mlx_lm.models` importable quickly, for the rest of this process.

    `mlx_lm` itself then has no attributes. If its modules need more than expected, the ordinary import is made.
    """
    if _PACKAGE in sys.modules:
        return
    absent = {name: _Absent(name) for name in _UNUSED if name not in sys.modules}
    spec = find_spec(_PACKAGE)
    assert spec is not None, "mlx-lm is a dependency of ours"
    try:
        sys.modules.update({_PACKAGE: module_from_spec(spec), **absent})
        importlib.import_module(f"{_PACKAGE}.utils")
    except (ImportError, AttributeError, TypeError):
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
            del sys.modules[name]
    finally:
        # A model that does need one of them gets the true one.
        for name, module in absent.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    importlib.import_module(_PACKAGE)


class _Absent(ModuleType):
    """Has every public name. No use of them works."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object
