"""What is told of a target before it decodes: its level in words, and the hosts among which it is divided, which are
checked before any process starts. Opens no weights."""

from collections.abc import Mapping
from pathlib import Path

from protocol.contracts.engines import PrefillEngineName
from protocol.contracts.target_hosts import TargetHosts, read_hosts, require_divisible
from protocol.errors import InputError
from protocol.messages.base import Level
from protocol.security.keys import ranks_key

MEANINGS: Mapping[Level, str] = {
    "tree": "one forward verifies any tree of guesses",
    "chain": "one forward verifies one path of guesses, without alternatives beside it",
    "plain": "one forward evaluates one token, so nothing is guessed and no draft is used; all else works",
}


def level_note(level: Level) -> str:
    """A sentence about a target below the highest level; empty for that level."""
    return "" if level == "tree" else f"The target is a {level} model: {MEANINGS[level]}."


_PLAIN = (
    "The key in the hosts file tells who a rank is on this program's own connections alone: what MLX sends between the "
    "ranks is neither encrypted nor authenticated, so use a network that you trust."
)


def checked_hosts(file: str, target: Path, prefill_engine: PrefillEngineName = "none") -> TargetHosts:
    """The hosts among which `target` will be divided. Raises InputError if that can't work."""
    hosts = read_hosts(Path(file))
    if hosts.key_file:
        ranks_key(hosts.key_file)
    require_divisible(target, hosts.ranks)
    if prefill_engine != "none":
        raise InputError(
            "A prefill engine can't hand keys and values to a target that is divided among hosts: "
            "leave the prefill engine or the target hosts out."
        )
    return hosts


def traffic_note(hosts: TargetHosts | None) -> str:
    """What is to be told of a divided target when it starts; empty if all ranks are on this machine."""
    return "" if hosts is None or hosts.local else _PLAIN
