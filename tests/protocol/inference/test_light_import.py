"""What a process imports: mlx-lm's models without what only text and downloads need, and no engine to list them."""

import subprocess
import sys

import pytest

LIGHT = "import sys; from protocol.inference.light_import import import_models; import_models(); "


LISTED = "import sys; from protocol.contracts.engines import draft_engines; print(len(draft_engines()) > 0, "
BROKEN = (
    "import protocol.inference.light_import as light; light._Absent.__getattr__ = light.ModuleType.__getattribute__; "
)
PROGRAMS = {
    "a model is loaded without transformers": LIGHT
    + "from pathlib import Path; from protocol.inference.language_model import LanguageModel; "
    "from tests.support.paths import DEMO_DRAFT; "
    "print(LanguageModel.load(DEMO_DRAFT).architecture == 'llama', 'transformers' not in sys.modules)",
    **{
        f"{name} can still be imported": LIGHT + f"import {name} as there; print(True, there.__file__ is not None)"
        for name in ("mlx_lm.tokenizer_utils", "huggingface_hub")
    },
    "a package that needs more is imported as usual": BROKEN
    + LIGHT
    + "import mlx_lm; print(True, callable(mlx_lm.load))",
    "an imported package stays as it is": "import mlx_lm; " + LIGHT + "print(True, callable(mlx_lm.load))",
    "listing the engines imports none": LISTED + "not any(name.startswith('draft_worker') for name in sys.modules))",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=[*PROGRAMS])
def test_a_process_imports_what_it_needs(program: str):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "True True\n"
