"""Keys and join lines: created once, private, robust against copying, and refused with the reason."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import given
from zmq.utils import z85

from orchestrator.machine.target import checked_hosts
from protocol.errors import InputError
from protocol.security.keys import JoinLine, is_key, new_secret, one_time_keys, own_keys, ranks_key
from tests.support.paths import DEMO_TARGET

SERVER = one_time_keys(bytes(32))  # any will do, but the same in every process
LINE = JoinLine("192.168.1.4", 5570, SERVER.public, bytes(range(32)))
HOSTS = ["192.168.1.4", "mac-studio.local", "localhost", "fe80::1", "fe80::1%en0", "::1", "2001:db8::8:800:200c:417a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    return folder


def test_keys_are_made_once_and_kept(tmp_path: Path):
    folder = tmp_path / "not" / "there" / "yet"
    first = own_keys(folder)

    assert own_keys(folder) == first
    assert is_key(first.public)
    assert first.public == zmq.curve_public(first.secret)


def test_only_the_user_can_read_the_keys(tmp_path: Path):
    own_keys(tmp_path / "keys")

    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys" / "curve.key").stat().st_mode) == 0o600
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["curve.key"]


def _key(content: bytes, mode: int = 0o600) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "curve.key").write_bytes(content)
        (folder / "curve.key").chmod(mode)

    return write


def _linked(folder: Path) -> None:
    own_keys(elsewhere := folder.with_name("elsewhere"))
    (folder / "curve.key").symlink_to(elsewhere / "curve.key")


_UNUSABLE: list[tuple[str, Callable[[Path], object]]] = [
    *(
        (r"Other users can read .*remove it.*chmod 600", _key(SERVER.secret, mode))
        for mode in (0o640, 0o604, 0o620, 0o666)
    ),
    *(
        ("must be yours alone: run `chmod 700", lambda folder, mode=mode: folder.chmod(mode))
        for mode in (0o750, 0o705, 0o777)
    ),
    ("can't be read", _linked),
    # It is not waited for either.
    ("is not a regular file of yours", lambda folder: os.mkfifo(folder / "curve.key", 0o600)),
    *(
        ("holds no valid key: remove it", _key(content))
        for content in (b"", b"x" * 39, b"~" * 40, SERVER.secret + b"\n", b"#" * 40)
    ),
]


@pytest.mark.parametrize(("sentence", "harm"), _UNUSABLE)
def test_a_key_that_others_could_know_or_that_is_none_is_refused(
    folder: Path, sentence: str, harm: Callable[[Path], object]
):
    harm(folder)

    with pytest.raises(InputError, match=sentence):
        own_keys(folder)


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    another = folder.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: another)

    with pytest.raises(InputError, match="must be yours alone: run `chmod 700"):
        own_keys(folder)


def test_secrets_are_not_printed():
    assert SERVER.secret.decode() not in repr(SERVER)
    assert repr(LINE.secret) not in repr(LINE)


@pytest.mark.parametrize("host", HOSTS)
def test_a_join_line_contains_all_its_fields(host: str):
    line = JoinLine(host, 5570, SERVER.public, new_secret())

    assert JoinLine.parse(str(line)) == line


@given(
    server=st.binary(min_size=32, max_size=32), secret=st.binary(min_size=32, max_size=32), host=st.sampled_from(HOSTS)
)
def test_a_join_line_is_one_word_to_a_shell(server: bytes, secret: bytes, host: str):
    text = str(JoinLine(host, 65535, zmq.curve_public(SERVER.secret), secret))

    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:._%-")


def test_blanks_and_line_breaks_of_copying_do_no_harm():
    text = str(LINE)

    assert JoinLine.parse(f"  {text[:30]}\n   {text[30:70]}\r\n{text[70:]} ") == LINE


def test_brackets_around_an_ipv6_host_are_understood():
    line = JoinLine("fe80::1", 5570, SERVER.public, bytes(32))

    assert JoinLine.parse(str(line).replace("fe80::1", "[fe80::1]")) == line
    assert line.address == "tcp://[fe80::1]:5570"


TEXT = str(LINE)
_, HOST, PORT, KEY, SECRET = TEXT.split(":")
WRONG = {
    "nothing": ("", "begins with lp1:"),
    "something else": ("https://example.org", "begins with lp1:"),
    "another version": (TEXT.replace("lp1", "lp2"), "begins with lp1:"),
    "half of it": (TEXT[:40], "lacks a part"),
    "its end is missing": (TEXT[:-1], r"secret in this join line is incomplete"),
    "a letter too many": (TEXT + "A", r"secret in this join line is incomplete"),
    "a key cut short": (f"lp1:{HOST}:{PORT}:{KEY[:-1]}:{SECRET}", r"server's key in this join line is incomplete"),
    "a foreign character": (f"lp1:{HOST}:{PORT}:{KEY}:{SECRET[:-1]}*", r"secret in this join line is incomplete"),
    "a character beyond ASCII": (f"lp1:{HOST}:{PORT}:{KEY}:{SECRET[:-1]}ä", r"secret in this join line is incomplete"),
    "no host": (f"lp1::{PORT}:{KEY}:{SECRET}", "is not a host"),
    "a host that is a command": (f"lp1:a;b:{PORT}:{KEY}:{SECRET}", "is not a host"),
    "a host that is no IPv6 address": (f"lp1:127.:0.0.1:{PORT}:{KEY}:{SECRET}", "is not a host"),
    "any host": (f"lp1:*:{PORT}:{KEY}:{SECRET}", "is not a host"),
    "a port of letters": (f"lp1:{HOST}:http:{KEY}:{SECRET}", "has an invalid port"),
    "no port": (f"lp1:{HOST}:0:{KEY}:{SECRET}", "has an invalid port"),
    "a port beyond all": (f"lp1:{HOST}:65536:{KEY}:{SECRET}", "has an invalid port"),
    "a port of other digits": (f"lp1:{HOST}:٥٥:{KEY}:{SECRET}", "has an invalid port"),
}


@pytest.mark.parametrize(("text", "sentence"), WRONG.values(), ids=[*WRONG])
def test_an_invalid_join_line_is_refused_with_the_reason(text: str, sentence: str):
    with pytest.raises(InputError, match=sentence):
        JoinLine.parse(text)


@given(st.text(max_size=200))
def test_any_text_is_a_join_line_or_an_input_error(text: str):
    with pytest.raises(InputError):
        JoinLine.parse(text)
    with pytest.raises(InputError):
        JoinLine.parse(f"lp1:{text}")


def test_both_sides_derive_the_same_guest_from_a_secret():
    secret = new_secret()
    keys = JoinLine("localhost", 1, SERVER.public, secret).one_time_keys()

    assert keys == one_time_keys(secret)
    assert keys.public == zmq.curve_public(keys.secret)
    assert keys != one_time_keys(new_secret())


def test_the_secret_is_no_part_of_what_is_derived_from_it():
    """The one-time keys do not reveal the secret: the secret key differs from it."""
    secret = bytes(range(32))

    assert one_time_keys(secret).secret != z85.encode(secret)
    # Written down, since two releases must agree on it: the derivation is part of the protocol.
    assert one_time_keys(secret).public == b"P^<Zw[vknODH{V/ek^MC{J>&O[{$6Ba>JK0j&3Pq"


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
