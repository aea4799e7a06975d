"""Laws of the key that clients of `serve` must show: every key that is accepted can be sent in a header."""

from pathlib import Path

import pytest
from starlette.datastructures import Headers

from orchestrator.cli.commands.serve import server_key
from orchestrator.http.access.middleware import shows_key
from protocol.errors import InputError


def key_of(given: str) -> str:
    key, made = server_key(given, None, False, "127.0.0.1")
    assert (key is None, made) == (False, False)
    return str(key)


@pytest.mark.parametrize("given", ["key-of-mine", " key-of-mine", "key-of-mine\n", "\tkey-of-mine "])
def test_blanks_around_a_key_are_no_part_of_it(given: str):
    # Servers of HTTP cut them off, so no client could send such a key.
    assert shows_key(Headers({"authorization": "Bearer key-of-mine"}), key_of(given))


@pytest.mark.parametrize("given", ["", " " * 9, "seven-7", "seven-7 ", "key\tof-mine", "key\nof-mine", "schlüssel-x"])
def test_a_key_that_no_header_can_carry_or_that_is_short_is_refused(given: str):
    with pytest.raises(InputError, match="at least 8 printable ASCII"):
        key_of(given)


@pytest.mark.parametrize("content", [b"key-of-mine", b"key-of-mine\r\n", b"\xef\xbb\xbfkey-of-mine\n"])
def test_a_file_holds_the_key_as_editors_write_it(tmp_path: Path, content: bytes):
    (tmp_path / "key").write_bytes(content)

    assert server_key(None, tmp_path / "key", False, "127.0.0.1") == ("key-of-mine", False)


def test_only_one_option_says_what_the_key_is(tmp_path: Path):
    (tmp_path / "key").write_text("key-of-mine")

    for given, file, none in (("key-of-mine", tmp_path / "key", False), ("key-of-mine", None, True)):
        with pytest.raises(InputError, match="exclude each other"):
            server_key(given, file, none, "127.0.0.1")


def test_a_key_that_is_made_is_another_one_each_time():
    (first, made), (second, _) = (server_key(None, None, False, "0.0.0.0") for _ in range(2))

    assert made
    assert first is not None
    assert len(first) > 20
    assert first != second
