"""Removes what names a person or a machine, or what a person wrote, from text that others will read. Pure but for one.

It rather removes too much: a path keeps its last part, and a word that is also the user's name is lost.
"""

import getpass
import ipaddress
import os
import platform
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from msgspec.structs import fields

from orchestrator.machine.profiles.device_profiles import (
    ContextCost,
    DeviceProfile,
    DeviceTimes,
    ForwardTime,
    PrefillRate,
    SequenceCost,
    SlowDown,
)
from protocol.worker.pacing import StepShape

NAME, PROMPT, KEY, ADDRESS = "[name]", "[prompt]", "[key]", "[address]"
_PROFILE = (DeviceProfile, DeviceTimes, PrefillRate, ForwardTime, ContextCost, SequenceCost, SlowDown)
_ORDINARY = frozenset(
    (
        *("root", "user", "users", "admin", "runner", "guest", "local", "localhost", "home", "none"),
        *("mac", "macbook", "pro", "max", "ultra", "mini", "air"),
        *(word for part in _PROFILE for field in fields(part) for word in field.name.split("_")),
        *get_args(StepShape),
    )
)
"""Names that many machines and users have, and words of chips, of our own reports and of a device profile."""
_FEWEST = 2
"""Letters of a name."""
_OUR_WORDS = ("stage", "status", "origin", "question")
"""Fields with words of ours alone, which a user may be called too."""
_SHORTEST_PROMPT = 12
"""Characters: a shorter one says nothing of anybody."""
_BREAK = r"(?:\\+[nrt]|[\\\s\"'])+"
_PATH = re.compile(
    r"(?:\bfile://|(?<![\w./~]))(?:~[\w.-]*)?(?:/(?![/\s])[^/~\n\"'<>|:;,()\[\]]*[^/~\s\"'<>|:;,()\[\]](?=/))*"
    r"/(?![/\s])([^/\s\"'<>|:;,()\[\]]+)/?"
)
"""An absolute path, or one below the home folder; its last part is the group. Spaces are parts of a folder's name."""
_KEYS = re.compile(
    r"\b(?:sk|hf|pk|ghp|gho|xox[a-z])[-_][\w-]{8,}|\blp1:\S+|(?i:\bbearer )\S+|"
    r"\b[0-9a-fA-F]{32,}\b|(?<![\w/])(?=[\w+/-]*[A-Za-z0-9+/]{24})[A-Za-z0-9+/_-]{40,}={0,2}"
)
_ESCAPES = re.compile(r"(\\[nrt\"'])")
"""In JSON and in Python's own form of a text the letter of an escape is not the beginning of a word."""
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
_HARDWARE = re.compile(r"\b[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}\b")
_LOCAL_HOST = re.compile(r"\b[\w-]+\.(?:local|lan|home|internal|fritz\.box)\b")
_INTERNET = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])|(?<![\w:])[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*"
)


class Redactor:
    """Takes known names, known texts, and what looks like a path, a key or an address out of any text."""

    def __init__(self, names: Iterable[str] = (), homes: Iterable[str] = (), prompts: Iterable[str] = ()) -> None:
        """`names`: of users and hosts. `homes`: their folders. `prompts`: texts that nobody else should read."""
        wanted = {name for name in names if len(name) >= _FEWEST and name.lower() not in _ORDINARY}
        self._names = _any_name(wanted)
        self._homes = [home for home in sorted(set(homes), key=len, reverse=True) if len(home) > 1]
        self._prompts = _any_prompt(prompts)

    @classmethod
    def of_this_machine(cls, prompts: Iterable[str] = ()) -> "Redactor":
        """It knows this user, this host and the home folder."""
        return cls(_names_here(), {str(Path.home()), os.path.realpath(Path.home())}, prompts)

    def text(self, text: str) -> str:
        """The text without them."""
        text = self._prompts.sub(PROMPT, text) if self._prompts else text
        for home in self._homes:
            text = text.replace(home, "~")
        return "".join(map(self._piece, _ESCAPES.split(text)))

    def _piece(self, text: str) -> str:
        text = _MAIL.sub(ADDRESS, _KEYS.sub(KEY, _PATH.sub(r"\1", text)))
        text = _INTERNET.sub(_address, _HARDWARE.sub(ADDRESS, _LOCAL_HOST.sub(NAME, text)))
        return self._names.sub(NAME, text) if self._names else text

    def values(self, value: Any) -> Any:
        """Plain data with every text in it redacted; keys are our own field names and stay, as do words of ours."""
        match value:
            case str():
                return self.text(value)
            case dict():
                return {key: each if key in _OUR_WORDS else self.values(each) for key, each in value.items()}
            case list() | tuple():
                return [self.values(each) for each in value]
            case _:
                return value


def _any_name(names: Iterable[str]) -> re.Pattern[str] | None:
    """Any of these, the longest first, in any case, not inside of a longer word."""
    found = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![^\W_])(?:{found})(?![^\W_])", re.IGNORECASE) if found else None


def _any_prompt(prompts: Iterable[str]) -> re.Pattern[str] | None:
    """Any of these, also with its breaks and quotes escaped, once or more often."""
    found = "|".join(
        _BREAK.join(re.escape(part) for part in re.split(r"[\s\"'\\]+", prompt) if part)
        for prompt in sorted(prompts, key=len, reverse=True)
        if len(prompt) >= _SHORTEST_PROMPT
    )
    return re.compile(found) if found else None


def _address(found: re.Match[str]) -> str:
    """An address on this machine alone names nobody; what is no address, such as a time, stays."""
    with suppress(ValueError):
        return found[0] if ipaddress.ip_address(found[0].rstrip(":.")).is_loopback else ADDRESS
    return found[0]


def _names_here() -> set[str]:
    """The names of the user and of the host, in all their forms."""
    names = {platform.node(), socket.gethostname(), Path.home().name}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    with suppress(KeyError, ImportError, AttributeError):
        import pwd

        person = pwd.getpwuid(os.getuid())
        full = person.pw_gecos.split(",")[0].strip()
        names |= {person.pw_name, full, *(part for part in full.split() if len(part) > _FEWEST)}
    return {form for name in names if name for form in (name, name.split(".")[0])}
