"""A target divided among ranks by mlx-lm's tensor parallelism: their processes, loading, heartbeats and forwards.

A collective with a peer that was stopped, or whose cable was pulled, blocks for ever. So a thread on each side, which
no collective blocks, sends a byte a second and reads the other side's bytes.

Rank 0 is the target worker. Before it runs a method of one of its sequences, it commands the other ranks to run the
same method. Tokens, trees and accepted paths all come from rank 0: no other rank samples, so no rank can choose other
tokens. A command is named after the method of `TreeSequence` or `LanguageModel` that every rank runs with the same
arguments. Knows no messages of the pipeline.
"""

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import msgspec

from protocol.child_process import module_command
from protocol.contracts.model_folder import UNQUANTIZED, KvBits, kv_fingerprint
from protocol.contracts.target_hosts import RankSetup, TargetHosts, require_divisible
from protocol.errors import InputError, PipelineError, WireError
from protocol.inference.joint_forward import ForwardPart
from protocol.inference.language_model import LanguageModel
from protocol.inference.observed_modules import modules_of
from protocol.inference.path_sequence import PathSequence
from protocol.inference.quantized_kv import Encodings
from protocol.inference.tap import LayerTap
from protocol.inference.tree_sequence import Tokens, TreeSequence
from protocol.messages.base import Level
from protocol.messages.features import Outputs
from protocol.security.keys import ranks_key
from protocol.worker.failed_calls import Sparing, SurvivingWorker, is_shortage
from protocol.worker.interface import WorkerReply
from target_worker.tensor_parallel.rendezvous import Peer, join, meet

_LENGTH_BYTES = 4
_MOST_BYTES = 16 << 20


class RankCommand(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What every rank does with the same arguments. "close": the sequence is not needed any more."""

    method: Literal["prefill", "evaluate", "keep", "truncate", "close", "record", "evaluate_together"]
    sequence: int = 0
    """0: of the model."""
    arguments: tuple[int | tuple[int, ...], ...] = ()
    parts: tuple["RankCommand", ...] = ()
    """All of one forward, each as its own "evaluate"."""


_DECODER = msgspec.msgpack.Decoder(RankCommand)
SendCommand = Callable[[RankCommand], None]


class LeadingModel(LanguageModel):
    """Rank 0's model. After `lead`, its sequences send commands; before, every rank runs the same forwards."""

    _send: SendCommand | None = None

    def lead(self, peers: Sequence[Peer]) -> None:
        self._send = lambda command: send_all(peers, command)
        # The other ranks do not compute the logits of a prefill, which may take collectives.
        self.prompt_logits = False
        # They need the tokens of a forward before it begins.
        self.chains = False
        self.numbers = itertools.count(1)

    def sequence(self) -> TreeSequence:
        if self._send is None:
            return super().sequence()
        return LeadingSequence(self.network, self.level, self._encodings, self.tap, self._send, next(self.numbers))

    def record(self, outputs: Outputs) -> None:
        # The other ranks record too: so all of them evaluate the same, and run the same collectives.
        if self._send is not None:
            self._send(RankCommand("record", arguments=(outputs,)))
        super().record(outputs)

    def evaluate_together(self, parts: Sequence[ForwardPart]) -> list[mx.array]:
        if self._send is None or len(parts) == 1 or not self.joins:
            return super().evaluate_together(parts)
        each = tuple(_evaluate(part.sequence, part.tokens, part.parents) for part in parts)
        self._send(RankCommand("evaluate_together", parts=each))
        logits = super().evaluate_together(parts)
        mx.eval(logits)
        return logits


class LeadingSequence(TreeSequence):
    """Every rank evaluates its share. Its KV is never exported, adopted or copied: each rank has a slice of it."""

    copyable = False

    def __init__(
        self,
        network: Any,
        level: Level,
        encodings: Encodings,
        tap: LayerTap | None,
        send: SendCommand,
        number: int,
    ) -> None:
        super().__init__(network, level, encodings, tap)
        # All ranks remember the same states.
        self.chooses_places = False
        self._send = send
        self.number = number
        """Number of this sequence on all ranks."""
        # The engine that drops a sequence does not know that other ranks hold it too.
        weakref.finalize(self, send, RankCommand("close", number)).atexit = False

    def prefill(self, tokens: Sequence[int], *, remember: bool = True) -> None:
        """Without logits: the other ranks do not compute them. Every rank remembers its state."""
        self._send(RankCommand("prefill", self.number, (tuple(tokens),)))
        super().prefill(tokens)

    def evaluate(self, tokens: Tokens, parents: Sequence[int], first: int | None = None) -> mx.array:
        assert first is None, "a target replaces no committed tokens"
        self._send(_evaluate(self, tokens, parents))
        logits = super().evaluate(tokens, parents)
        # The ranks stay in step only if all collectives of one forward run before those of the next.
        mx.eval(logits)
        return logits

    def keep(self, path: Sequence[int], surviving: Iterable[int]) -> None:
        assert not tuple(surviving), "a target keeps no rows beside the path"
        self._send(RankCommand("keep", self.number, (tuple(path), ())))
        super().keep(path, ())

    def truncate(self, length: int) -> None:
        self._send(RankCommand("truncate", self.number, (length,)))
        super().truncate(length)

    def shed(self) -> bool:
        return False


def follow(model: LanguageModel, commands: Iterable[RankCommand]) -> None:
    """For another rank: run the commands of rank 0 in their order."""
    sequences: dict[int, TreeSequence] = {}
    for command in commands:
        arguments: Any = command.arguments
        match command.method:
            case "close":
                sequences.pop(command.sequence, None)
            case "record":
                model.record(*arguments)
            case "evaluate_together":
                mx.eval(model.evaluate_together([_part(sequences, part) for part in command.parts]))
            case method:
                sequence = sequences.setdefault(command.sequence, model.sequence())
                logits = getattr(sequence, method)(*arguments)
                if method == "evaluate":
                    mx.eval(logits)


def _part(sequences: Mapping[int, TreeSequence], command: RankCommand) -> ForwardPart:
    arguments: Any = command.arguments
    return ForwardPart(sequences[command.sequence], *arguments)


def _evaluate(sequence: TreeSequence | PathSequence, tokens: Tokens, parents: Sequence[int]) -> RankCommand:
    assert isinstance(sequence, LeadingSequence)
    assert not isinstance(tokens, mx.array), "the other ranks need the tokens"
    return RankCommand("evaluate", sequence.number, (tuple(tokens), tuple(parents)))


def send_all(peers: Sequence[Peer], command: RankCommand) -> None:
    """Send a command to all other ranks."""
    frame = encoded(command)
    for peer in peers:
        peer.commands.sendall(frame)


def encoded(command: RankCommand) -> bytes:
    body = msgspec.msgpack.encode(command)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def received(connection: socket.socket) -> RankCommand:
    """The next command. Raises EOFError if the other end is closed, WireError for bytes that are no command."""
    length = int.from_bytes(_exactly(connection, _LENGTH_BYTES), "big")
    if length > _MOST_BYTES:
        raise WireError(f"Rank 0 announced a command of {length:,} bytes; at most {_MOST_BYTES:,} are allowed.")
    try:
        return _DECODER.decode(_exactly(connection, length))
    except msgspec.MsgspecError as error:
        raise WireError(f"Rank 0 sent bytes that are no command ({error}).") from error


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


_CONNECT_SECONDS = 30.0
_HEARTBEAT_SECONDS = 1.0
_KEY_VARIABLE = "LAUNCH_PIPELINE_RANKS_KEY"
_PARENT_SOCKETS: list[socket.socket] = []
"""This process's ends of the socket pairs with its children: open for as long as this process lives."""


def load_leading_model(
    folder: Path, hosts: TargetHosts, gpu_share: float = 1.0, kv_bits: KvBits = UNQUANTIZED
) -> LeadingModel:
    """Rank 0's share of the model, with connections to all other ranks. Starts the ranks of this machine.

    Raises InputError for a model that can't be divided and for hosts that can't meet. Ends the process if a rank
    is lost, now or later: MLX can't replace a rank, so all of them restart. `gpu_share`: of each rank on this machine.
    """
    require_divisible(folder, hosts.ranks)
    rank_setup = partial(RankSetup, hosts=hosts, model=str(folder), gpu_share=gpu_share, kv_bits=kv_bits)
    key = ranks_key(hosts.key_file) if hosts.key_file else secrets.token_hex(32).encode()
    children = [_start_rank(rank_setup(rank=n), key) for n in range(1, hosts.ranks if hosts.local else 1)]
    peers = meet(hosts, key, kv_fingerprint(folder, kv_bits), lambda: _require_alive(children))
    for peer in peers:
        start_heartbeat(
            peer.heartbeat, hosts.silence, _end_process(f"Rank {peer.rank} ({hosts.addresses[peer.rank][0]})")
        )
    with _rank_loss_ends_process():
        model = LeadingModel.load(folder, GroupDivision(connect(hosts, 0)), kv_bits)
    model.lead(peers)
    return model


def serve_rank(setup: RankSetup, ready: Callable[[], None], report: Callable[[str], None]) -> None:
    """Serve as another rank: wait for rank 0, load this rank's share, run its commands. Ends with rank 0, by EOFError.

    `ready` is called when the model is loaded. Raises InputError if the ranks don't belong together.
    """
    hosts, folder = setup.hosts, Path(setup.model)
    require_divisible(folder, hosts.ranks)
    report(f"waiting for rank 0 at {hosts.addresses[0][0]}; what the ranks send one another is not encrypted")
    key = ranks_key(hosts.key_file) if hosts.key_file else os.environ.get(_KEY_VARIABLE, "").encode()
    if not key:
        raise InputError(
            "A rank of this machine is started by rank 0, which gives it a key: start the pipeline instead."
        )
    peer = join(hosts, key, setup.rank, kv_fingerprint(folder, setup.kv_bits))
    start_heartbeat(peer.heartbeat, hosts.silence, _end_process("Rank 0"))
    report("loading")
    with _rank_loss_ends_process():
        model = LanguageModel.load(folder, GroupDivision(connect(hosts, setup.rank)), setup.kv_bits)
    ready()
    report("at work")
    follow(model, _commands(peer))


def _commands(peer: Peer) -> Iterator[RankCommand]:
    while True:
        yield received(peer.commands)


def _start_rank(setup: RankSetup, key: bytes) -> subprocess.Popen[bytes]:
    """A rank as a child in this process's group, on the same cores, with the same log. It ends with this process."""
    ours, theirs = socket.socketpair()
    _PARENT_SOCKETS.append(ours)
    with theirs:
        setup = msgspec.structs.replace(setup, parent_socket=theirs.fileno())
        return subprocess.Popen(
            [*module_command("target_worker.tensor_parallel.rank_process"), msgspec.json.encode(setup).decode()],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            # Other users see a process's arguments, and not its variables.
            env={**os.environ, _KEY_VARIABLE: key.decode()},
        )


def _require_alive(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank, child in enumerate(children, start=1):
        if child.poll() is not None:
            raise PipelineError(f"Rank {rank} of the target ended with exit code {child.returncode} before it began.")


@contextlib.contextmanager
def _rank_loss_ends_process() -> Iterator[None]:
    """A collective that fails while a model loads means that a rank was lost, and ends this process."""
    try:
        yield
    except RuntimeError as error:
        if is_shortage(error):
            raise
        _end_process("Another rank")(f"was lost ({error})")


def _end_process(subject: str) -> Callable[[str], None]:
    """A function that ends this process from any thread, even while other threads are blocked."""

    def end(event: str) -> None:
        sys.stderr.write(f"{subject} {event}: all ranks start anew.\n")
        sys.stderr.flush()
        os._exit(1)

    return end


def connect(hosts: TargetHosts, rank: int) -> mx.distributed.Group:
    """MLX's group of all ranks. All ranks must call this at the same time. Raises RuntimeError if it fails."""
    jaccl = bool(hosts.devices) and mx.distributed.is_available("jaccl")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(msgspec.json.encode(hosts.devices if jaccl else hosts.addresses))
        file.flush()
        os.environ["MLX_RANK"] = str(rank)
        os.environ["MLX_JACCL_COORDINATOR"] = hosts.addresses[0][0]
        os.environ["MLX_IBV_DEVICES" if jaccl else "MLX_HOSTFILE"] = file.name
        # This call holds the interpreter's lock: only the kernel can end it if a rank has died since the rendezvous.
        signal.setitimer(signal.ITIMER_REAL, _CONNECT_SECONDS)
        try:
            return mx.distributed.init(backend="jaccl" if jaccl else "ring", strict=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class GroupDivision:
    """mlx-lm's tensor parallelism among the ranks of a group."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group = group

    def divide(self, network: Any) -> None:
        """Raises InputError for an architecture that mlx-lm can't divide."""
        # mlx-lm would leave the scales of whole tensors out.
        if any("global_scale" in each for each in modules_of(network)) or not callable(getattr(network, "shard", None)):
            raise InputError(
                f"mlx-lm can't divide a model of type {network.args.model_type} among hosts: "
                "choose a Llama, Qwen2 or Qwen3 model in mlx-lm's format, or leave --target-hosts out."
            )
        network.shard(self._group)

    def await_loaded(self) -> None:
        """Sum on the processor, which may wait as long as it takes. macOS ends the work of a GPU that waits for a peer
        for about 5 s (ml-explore/mlx issues 3830 and 4475)."""
        mx.eval(mx.distributed.all_sum(mx.array(1), group=self._group, stream=mx.cpu))


def start_heartbeat(connection: socket.socket, silence: float, lost: Callable[[str], object]) -> None:
    """Exchange heartbeats from now on. `lost` is called once, when the other side ends or is silent."""
    threading.Thread(target=_exchange_heartbeats, args=(connection, silence, lost), daemon=True).start()


def _exchange_heartbeats(connection: socket.socket, silence: float, lost: Callable[[str], object]) -> None:
    last_heard = time.monotonic()
    due = last_heard
    connection.settimeout(_HEARTBEAT_SECONDS / 2)
    with contextlib.suppress(OSError):
        while (now := time.monotonic()) - last_heard < silence:
            if now >= due:
                connection.sendall(b".")
                due = now + _HEARTBEAT_SECONDS
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1024):
                    break
                last_heard = time.monotonic()
        else:
            lost(f"gave no sign of life for {silence:g} s")
            return
    lost("has ended")


_GIB = 1 << 30


class LeadingWorker(SurvivingWorker):
    """Rank 0's worker. Where memory runs out or the GPU gives up, it raises PipelineError, which ends the process: the
    ranks run the same forwards, so one that left a forward would be out of step with the others."""

    def __init__(self, worker: Sparing, ranks: int) -> None:
        super().__init__(worker)
        self._ranks = ranks

    def recovery(self, short: bool) -> Iterator[WorkerReply]:
        if not short:
            raise PipelineError("The GPU of rank 0 gave up a command: all ranks start again.")
        text = shortage(0, self._ranks)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        raise PipelineError(text)


def shortage(rank: int, ranks: int) -> str:
    """That a rank's memory does not suffice, as a sentence."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"Rank {rank} of {ranks} ran out of memory: it held {mx.get_active_memory() / _GIB:.1f} GiB on a machine with "
        f"{machine / _GIB:.1f} GiB. Start the target with a smaller --context or --kv-bits 8, or divide it among more "
        "ranks."
    )
