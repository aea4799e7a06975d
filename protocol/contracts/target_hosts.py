"""The hosts among which a target is divided, and whether a model can be divided. Pure but for reading two files."""

import json
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from protocol.contracts.model_folder import UNQUANTIZED, KvBits, ModelFolder
from protocol.errors import InputError
from protocol.json_values import is_list, is_object

EXAMPLE = '{"hosts": [["10.0.0.1:5711"], ["10.0.0.2:5711"]], "key": "..."}'
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*):(?P<port>[0-9]{1,5})")
_FIRST_PORT = 32_323
"""mlx.distributed_config writes no ports; mlx.launch counts up from this one, and so does this program."""
_LAST_PORT = (1 << 16) - 1
_MAX_HOSTS = 64
_MAX_BYTES = 1 << 20
_DIVIDED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "rows in its feed-forward layers",
    "moe_intermediate_size": "rows in its experts",
}
"""What tensor parallelism divides, by its name in config.json."""


class TargetHosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses by rank ("host:port", one for each cable). The ranks meet at the first address of rank 0."""

    addresses: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[str | tuple[str, ...] | None, ...], ...] = ()
    """RDMA devices from each rank to each other one, if the file names them: for JACCL."""
    silence: float = 10.0
    """Seconds without a heartbeat after which a rank counts as lost."""
    key_file: str = ""
    """The hosts file that holds the key by which the ranks know one another. Empty: the ranks are processes of one
    machine, and rank 0 gives the others a key when it starts them."""

    @property
    def ranks(self) -> int:
        return len(self.addresses)

    @property
    def local(self) -> bool:
        """All ranks are processes of one machine."""
        return all(_is_local(address) for addresses in self.addresses for address in addresses)


class RankSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last argument of a process of rank 1 or more, in JSON."""

    hosts: TargetHosts
    rank: int
    model: str
    """Folder of the model."""
    gpu_share: float = 1.0
    """As in `WorkerSetup`."""
    kv_bits: KvBits = UNQUANTIZED
    """As in `WorkerSetup`, and the same of all ranks."""
    parent_socket: int | None = None
    """A socket shared with the parent process. Its end of file means that the parent has ended."""

    @classmethod
    def from_arguments(cls) -> "RankSetup":
        return msgspec.json.decode(sys.argv[-1], type=cls)


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def read_hosts(path: Path) -> TargetHosts:
    """What a hosts file says: a list as MLX's ring reads it, or the object that mlx.distributed_config writes,
    in which "silence" may be given too. Raises InputError saying what is wrong with it."""
    try:
        with path.open("rb") as file:
            data: Any = json.loads(file.read(_MAX_BYTES))
    except OSError as error:
        raise InputError(f"The hosts file {path} can't be read ({error.strerror}): write {EXAMPLE} to it.") from error
    except ValueError as error:
        raise _wrong(path, f"is no JSON ({error})") from error
    settings: dict[str, Any] = data if is_object(data) else {"hosts": data}
    listed = settings.get("hosts")
    if not is_list(listed) or not 2 <= len(listed) <= _MAX_HOSTS:
        raise _wrong(path, f"must list 2 to {_MAX_HOSTS} hosts")
    silence = settings.get("silence", 10.0)
    if not isinstance(silence, int | float) or not 2.0 <= silence <= 600.0:
        raise _wrong(path, "must have from 2 to 600 seconds as its silence")
    ports = iter(range(_FIRST_PORT, _LAST_PORT + 1))
    addresses = tuple(tuple(_addresses(path, host, ports)) for host in listed)
    _require_sound(path, addresses)
    key_file = str(path.resolve()) if "key" in settings else ""
    hosts = TargetHosts(addresses, _devices(path, listed), float(silence), key_file)
    if not hosts.local and not key_file:
        raise InputError(
            f"The hosts file {path} has no key, by which the ranks know one another: write it like {EXAMPLE}, for "
            f'instance with "key": "{secrets.token_urlsafe(32)}", and give every host the same file, which only its '
            f"user may read (chmod 600)."
        )
    return hosts


def require_divisible(folder: Path, ranks: int) -> None:
    """Raises InputError if the model in `folder` can't be divided among so many ranks. Reads config.json alone."""
    config = ModelFolder(folder).config
    counts = {words: config.get(name) for name, words in _DIVIDED.items()}
    whole = {words: count for words, count in counts.items() if isinstance(count, int) and count > 0}
    for words, count in whole.items():
        if count % ranks:
            fitting = [str(n) for n in range(2, _MAX_HOSTS + 1) if not any(each % n for each in whole.values())]
            advice = f"use {' or '.join(fitting)}" if fitting else "it has to stay on one"
            raise InputError(f"The target in {folder} has {count} {words}, which {ranks} hosts can't share: {advice}.")


def _addresses(path: Path, host: object, ports: Iterator[int]) -> Iterator[str]:
    entries: object = host.get("ips") if is_object(host) else [host] if isinstance(host, str) else host
    if not is_list(entries) or not entries:
        raise _wrong(path, "must have a list of addresses for each host")
    for entry in entries:
        text = f"{entry}:{next(ports)}" if is_object(host) and ":" not in str(entry) else str(entry)
        parts = _ADDRESS.fullmatch(text)
        if parts is None or not 1 <= int(parts["port"]) <= _LAST_PORT:
            raise _wrong(path, f"has {text[:80]!r}, which is no HOST:PORT")
        yield text


def _require_sound(path: Path, addresses: tuple[tuple[str, ...], ...]) -> None:
    flat = [address for each in addresses for address in each]
    twice = next((address for address in flat if flat.count(address) > 1), None)
    if twice is not None:
        raise _wrong(path, f"lists {twice} twice; each rank needs a port of its own")
    if len({len(each) for each in addresses}) > 1:
        raise _wrong(path, "must list as many addresses for one host as for another")
    if len({_is_local(address) for address in flat}) > 1:
        raise _wrong(path, "mixes this machine's own addresses (127.0.0.1) with others, which can't reach them")


def _devices(path: Path, listed: list[Any]) -> tuple[tuple[str | tuple[str, ...] | None, ...], ...]:
    named = [host["rdma"] for host in listed if is_object(host) and host.get("rdma")]
    try:
        devices = msgspec.convert(named, tuple[tuple[str | tuple[str, ...] | None, ...], ...])
    except msgspec.ValidationError as error:
        raise _wrong(path, f"names RDMA devices in another form ({error})") from error
    if devices and {len(devices), *map(len, devices)} != {len(listed)}:
        raise _wrong(path, "must name an RDMA device from each host to each, or none at all")
    return devices


def _is_local(address: str) -> bool:
    return address.startswith(("127.", "localhost:"))


def _wrong(path: Path, what: str) -> InputError:
    return InputError(f"The hosts file {path} {what}: write it like {EXAMPLE}, rank 0 first.")
