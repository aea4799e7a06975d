"""The key in a hosts file: who may read it, and a sentence for each mistake."""

import json
from pathlib import Path

import pytest

from orchestrator.machine.target_hosts import checked_hosts
from protocol.errors import InputError
from protocol.security.ranks_key import ranks_key
from tests.support.paths import DEMO_TARGET


def _file(folder: Path, content: object, mode: int = 0o600) -> str:
    file = folder / "hosts.json"
    file.write_text(json.dumps(content))
    file.chmod(mode)
    return str(file)


def test_the_key_is_what_the_file_says(tmp_path: Path):
    assert ranks_key(_file(tmp_path, {"key": "0123456789abcdef" * 2})) == b"0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        ({"key": "k" * 32}, 0o644, "no other user may read it: run `chmod 600 "),
        ({"key": "k" * 31}, 0o600, "no text of 32 random characters"),
        ({"key": 7}, 0o600, "no text of 32 random characters"),
        ({"hosts": []}, 0o600, "has no key any more"),
        ([], 0o600, "has no key any more"),
    ],
)
def test_what_is_wrong_gets_a_sentence(content: object, mode: int, sentence: str, tmp_path: Path):
    with pytest.raises(InputError, match=rf"hosts file .*hosts\.json.* {sentence}"):
        ranks_key(_file(tmp_path, content, mode))


def test_a_file_that_others_can_read_is_refused_before_any_process_starts(tmp_path: Path):
    hosts = {"hosts": [["10.0.0.1:5711"], ["10.0.0.2:5711"]], "key": "k" * 32}

    with pytest.raises(InputError, match="chmod 600"):
        checked_hosts(_file(tmp_path, hosts, 0o640), DEMO_TARGET)
    assert not checked_hosts(_file(tmp_path, hosts), DEMO_TARGET).local
