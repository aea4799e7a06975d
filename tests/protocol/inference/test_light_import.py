"""What a process imports: mlx-lm's models without what only text and downloads need, and no engine to list them."""

import subprocess
import sys

import pytest

LIGHT = "import sys; from protocol.inference.light_import import import_models; import_models(); "


def output(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_a_model_is_loaded_without_transformers():
    program = LIGHT + (
        "from pathlib import Path; from protocol.inference.language_model import LanguageModel; "
        "from tests.support.paths import DEMO_DRAFT; "
        "print(LanguageModel.load(DEMO_DRAFT).architecture, 'transformers' in sys.modules)"
    )

    assert output(program) == "llama False\n"


@pytest.mark.parametrize("name", ["mlx_lm.tokenizer_utils", "huggingface_hub"])
def test_what_was_left_out_can_still_be_imported(name: str):
    assert output(LIGHT + f"import {name} as left_out; print(left_out.__file__ is not None)") == "True\n"


def test_a_package_that_needs_more_is_imported_as_usual():
    broken = (
        "import protocol.inference.light_import as light; "
        "light._Absent.__getattr__ = light.ModuleType.__getattribute__; "
    )

    assert output(broken + LIGHT + "import mlx_lm; print(callable(mlx_lm.load))") == "True\n"


def test_an_imported_package_stays_as_it_is():
    assert output("import mlx_lm; " + LIGHT + "print(callable(mlx_lm.load))") == "True\n"


def test_listing_the_engines_imports_none_of_them():
    listed = "import sys; from protocol.contracts.engines import draft_engines; print(len(draft_engines()) > 0, "

    assert output(listed + "any(name.startswith('draft_worker') for name in sys.modules))") == "True False\n"
