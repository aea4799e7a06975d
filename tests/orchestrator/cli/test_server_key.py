"""Laws of the key that clients of `serve` must show: every key that is accepted can be sent in a header."""

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from orchestrator.cli.commands.serve import server_key
from orchestrator.http.gates import shows_key
from protocol.errors import InputError


def key_of(given: str) -> str:
    key, made = server_key(given, None, False, "127.0.0.1")
    assert (key is None, made) == (False, False)
    return str(key)


@pytest.mark.parametrize("given", ["key-of-mine", " key-of-mine", "key-of-mine\n", "\tkey-of-mine "])
def test_blanks_around_a_key_are_no_part_of_it(given: str):
    # Servers of HTTP cut them off, so no client could send such a key.
    assert shows_key(Headers({"authorization": "Bearer key-of-mine"}), key_of(given))


LOOPBACK, HELD, NO_TEXT = "127.0.0.1", "key", "no-text"
WEAK = ["", " " * 9, "seven-7", "seven-7 ", "key\tof-mine", "key\nof-mine", "schlüssel-x"]


@pytest.mark.parametrize(
    ("given", "file", "none", "host", "words"),
    [
        *((key, None, False, LOOPBACK, "at least 8 printable ASCII") for key in WEAK),
        ("key-of-mine", HELD, False, LOOPBACK, "exclude each other"),
        ("key-of-mine", None, True, LOOPBACK, "exclude each other"),
        (None, "absent", False, LOOPBACK, "put the key alone into it"),
        (None, NO_TEXT, False, LOOPBACK, "put the key alone into it"),
        (None, None, True, "0.0.0.0", "can be reached from other machines"),
    ],
)
def test_what_no_header_can_carry_what_is_short_and_what_contradicts_itself_is_refused(
    tmp_path: Path, given: str | None, file: str | None, none: bool, host: str, words: str
):
    (tmp_path / HELD).write_text("key-of-mine")
    (tmp_path / NO_TEXT).write_bytes(b"\xff\xfe")

    with pytest.raises(InputError, match=words):
        server_key(given, None if file is None else tmp_path / file, none, host)


@pytest.mark.parametrize("content", [b"key-of-mine", b"key-of-mine\r\n", b"\xef\xbb\xbfkey-of-mine\n"])
def test_a_file_holds_the_key_as_editors_write_it(tmp_path: Path, content: bytes):
    (tmp_path / "key").write_bytes(content)

    assert server_key(None, tmp_path / "key", False, "127.0.0.1") == ("key-of-mine", False)


def test_a_key_that_is_made_is_another_one_each_time():
    (first, made), (second, _) = (server_key(None, None, False, "0.0.0.0") for _ in range(2))

    assert made
    assert first is not None
    assert len(first) > 20
    assert first != second
