"""The hosts file of a divided target and its key, checked against the model before any process starts. Opens no
weights."""

from pathlib import Path

from protocol.contracts.engines import PrefillEngineName
from protocol.contracts.target_hosts import TargetHosts, read_hosts, require_divisible
from protocol.errors import InputError
from protocol.security.ranks_key import ranks_key


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
