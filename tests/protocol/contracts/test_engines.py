"""The module of a draft engine registers it, and no import is needed to list it."""

from pathlib import Path

import pytest

from protocol.contracts.engines import EngineDeclaration, declared_engines, draft_engine
from protocol.errors import InputError

PROPER = 'ENGINE = EngineDeclaration(help="guesses", model="none")\n'


def found(folder: Path, source: str) -> dict[str, EngineDeclaration]:
    (folder / "oracle.py").write_text(source)
    return dict(declared_engines(folder))


def test_a_new_module_is_a_new_engine(tmp_path: Path):
    source = "from protocol.contracts.engines import EngineDeclaration\nimport nothing_that_exists\n\n" + PROPER

    assert found(tmp_path, source) == {"oracle": EngineDeclaration(help="guesses", model="none")}


@pytest.mark.parametrize(
    "source",
    [
        "",
        "ENGINE = 3\n",
        "ENGINE = EngineDeclaration()\n",
        'ENGINE = EngineDeclaration("guesses", "none")\n',
        'ENGINE = EngineDeclaration(help="guesses", model="crystal")\n',
        'ENGINE = EngineDeclaration(help="guesses", model="none", colour="red")\n',
        'ENGINE = EngineDeclaration(help="guesses", model=MODEL)\n',
        "ENGINE = EngineDeclaration(**known)\n",
        f"def declared():\n    {PROPER}",
        f"this is no Python\n{PROPER}",
    ],
)
def test_a_module_without_a_literal_declaration_is_no_engine(tmp_path: Path, source: str):
    assert found(tmp_path, source) == {}


def test_a_name_that_no_engine_has_is_answered_with_the_choices():
    choices = "auto, block, coreml, eagle3, mlx, mtp, ngram or none"
    with pytest.raises(InputError, match=rf"no draft engine called 'crystal ball': choose {choices}\."):
        draft_engine("crystal ball")
