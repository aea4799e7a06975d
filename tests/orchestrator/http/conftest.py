"""The models behind the servers under test."""

import pytest

from orchestrator.text.chat_template import ChatTemplate
from tests.support.models.chat_models import FAMILIES, MODELS, model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return {name: model(tmp_path_factory.mktemp(name), *source) for name, source in MODELS.items()}


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return {name: model(tmp_path_factory.mktemp(name), source) for name, source in FAMILIES.items()}


@pytest.fixture(scope="session")
def hermes(models: dict[str, ChatTemplate]) -> ChatTemplate:
    """Of a model that knows tools."""
    return models["hermes"]
