"""`attach draft` of a trained drafter: the worker gets the target's folder too, and the name must be given."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from orchestrator.cli import attachment
from orchestrator.cli.app import cli
from orchestrator.cli.attachment import Lending
from orchestrator.machine.servers import KnownServer
from protocol.errors import InputError
from protocol.security.addresses import Endpoint
from tests.support.models.drafter_files import LAYERS, VOCABULARY, WIDTH, safeailab, write
from tests.support.models.trained_drafters import write_target
from tests.support.paths import DEMO_DRAFT

LINE = "127.0.0.1:5571"
SERVER = KnownServer(Endpoint("127.0.0.1", 5571), b"k" * 40)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[Lending]:
    """What would be lent; nothing is connected."""
    lendings: list[Lending] = []

    class Recorded:
        def __init__(self, lending: Lending, *_: object) -> None:
            lendings.append(lending)

        def run(self) -> None: ...

    monkeypatch.setattr(attachment, "Attachment", Recorded)
    monkeypatch.setattr("orchestrator.cli.commands.attach.known_server", lambda *_: SERVER)
    return lendings


def attach(*arguments: str) -> None:
    CliRunner().invoke(cli, ["attach", "draft", LINE, *arguments], catch_exceptions=False)


def test_a_drafter_is_lent_with_its_target_and_an_ordinary_draft_without(lent: list[Lending], tmp_path: Path):
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    write_target(tmp_path / "target", **sizes)
    folder, target = write(tmp_path / "drafter", safeailab()), str(tmp_path / "target")
    attach("--draft", str(folder), "--target", target)
    attach("--draft", str(DEMO_DRAFT))

    assert [(lending.worker.engine, lending.worker.model, lending.worker.target) for lending in lent] == [
        ("eagle3", str(folder), target),
        ("mlx", str(DEMO_DRAFT), ""),
    ]


def test_without_the_target_s_name_a_sentence_asks_for_it(lent: list[Lending], tmp_path: Path):
    folder = write(tmp_path / "drafter", safeailab())

    with pytest.raises(InputError, match="name the target's folder or Hugging Face id too"):
        attach("--draft", str(folder))
    assert lent == []
