"""Laws of the disk cache: a sequence that is taken up goes on as if it had never ended, and whatever can't be
used costs a prefill."""

import errno
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.cache_files import CacheFiles, disk_cache_folder, touched
from protocol.security.private_files import read_private
from target_worker.disk_cache import cache as disk_cache
from target_worker.disk_cache import kept_prefixes
from target_worker.disk_cache.cache import DiskCache
from target_worker.disk_cache.kept_prefixes import DiskReading, KeptPrefixes
from target_worker.disk_cache.snapshot import CHUNK, CacheShape, FilePart, resume
from tests.support.models.architectures import IMPOSSIBLE, UNSTABLE, modules, tiny
from tests.support.processes import until

TOKENS = [(7 * place + place * place) % 50 + 1 for place in range(700)]
PROMPT = 600
STEP = 200
CHOSEN = {"mamba2", "qwen3_next", "jamba", "recurrent_gemma", "gemma3_text", "deepseek_v3", "qwen3"}
"""A recurrence alone, with attention, below trees, with windows; windows; latent keys; attention."""


@cache
def model(name: str) -> LanguageModel:
    return LanguageModel(tiny(name))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(disk_cache, "_LAST_SECONDS", 60.0)
    monkeypatch.setattr(disk_cache, "_LOOKING_SECONDS", 60.0)
    return tmp_path


def opened(
    name: str = "mamba2", fingerprint: str = "m", device: str = "cpu", limit: int = 1 << 30, waiting: int = 1 << 30
) -> DiskCache:
    return DiskCache(fingerprint, device, name, CacheShape.of(model(name).sequence()), limit, waiting)


def evaluated(name: str, tokens: Sequence[int], prompt: int = PROMPT) -> TreeSequence:
    """A sequence of these tokens: a prompt in several forwards, then token by token."""
    sequence = model(name).sequence()
    for begin in range(0, min(prompt, len(tokens)), STEP):
        sequence.prefill(tokens[begin : min(begin + STEP, prompt, len(tokens))])
    for token in tokens[prompt:]:
        sequence.evaluate([token], [-1])
        sequence.keep([sequence.next_row - 1], ())
    return sequence


def kept(name: str, tokens: Sequence[int], fingerprint: str = "m") -> TreeSequence:
    """A sequence that was kept, and has gone on since."""
    cache, sequence = opened(name, fingerprint), evaluated(name, tokens)
    cache.keep(sequence, tokens)
    mx.eval(sequence.evaluate([3], [-1]))
    cache.close()
    return sequence


class Resumed(NamedTuple):
    tokens: int
    warning: str = ""


def read(cache: DiskCache, tokens: Sequence[int], beyond: int = 0) -> DiskReading:
    reading = cache.read(tokens, beyond)
    assert reading is not None
    assert reading.wait(60.0)
    return reading


def resumed(tokens: Sequence[int], name: str = "mamba2", **options: Any) -> tuple[TreeSequence, Resumed]:
    cache, sequence = opened(name, **options), model(name).sequence()
    reading = read(cache, tokens)
    found = Resumed(cache.resume(sequence, reading), reading.warning)
    cache.close()
    return sequence, found


def prefixes(cache: DiskCache) -> KeptPrefixes:
    assert cache._kept is not None
    return cache._kept


def files(suffix: str) -> list[Path]:
    return sorted(disk_cache_folder().rglob(f"*{suffix}"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in CHOSEN else pytest.mark.slow)
        for name in sorted(set(modules()) - set(IMPOSSIBLE) - set(UNSTABLE))
    ],
)
def test_a_sequence_that_is_taken_up_goes_on_exactly(name: str):
    tokens = TOKENS[:620]
    kept(name, tokens)

    sequence, found = resumed(TOKENS, name)

    assert found == Resumed(620)
    # The forwards that computed what was kept: others, of other widths, differ in the last bits.
    other = evaluated(name, tokens)
    other.truncate(found.tokens)
    assert sequence.committed == other.committed
    for one, two in [
        (sequence.prefill([5, 6, 7]), other.prefill([5, 6, 7])),
        (sequence.evaluate([8], [-1]), other.evaluate([8], [-1])),
    ]:
        assert one is not None
        assert two is not None
        assert mx.array_equal(one, two)
    # What follows is undone, and another turn goes on from here.
    sequence.truncate(found.tokens)
    fresh = evaluated(name, tokens)
    fresh.truncate(found.tokens)
    assert mx.array_equal(sequence.evaluate([9], [-1]), fresh.evaluate([9], [-1]))


@pytest.mark.parametrize(("name", "alike", "taken"), [("qwen3_next", 500, 400), ("qwen3", 600, 2 * CHUNK)])
def test_another_conversation_with_the_same_beginning_takes_what_is_whole_of_it(name: str, alike: int, taken: int):
    """An earlier state, or whole chunks of rows."""
    kept(name, TOKENS[:620])

    _, found = resumed([*TOKENS[:alike], *[9] * 100], name)

    assert found == Resumed(taken)


@pytest.mark.parametrize(("most", "written"), [(1 << 30, 5), (1, 1)])
def test_a_turn_whose_sequence_goes_on_is_kept_as_it_was(monkeypatch: pytest.MonkeyPatch, most: int, written: int):
    """Rows and states, as far as they may be copied; the sequence's own arrays are not held."""
    monkeypatch.setattr(disk_cache, "_MOST_COPIED", most)
    cache, sequence = opened("qwen3_next"), evaluated("qwen3_next", TOKENS[:620])
    cache.keep(sequence, TOKENS[:620])
    cache.settle(sequence)
    mx.eval(sequence.evaluate([3], [-1]))
    cache.close()
    found = {file: file.read_bytes() for file in (*files(".rows"), *files(".state"))}
    for file in found:
        file.unlink()

    kept("qwen3_next", TOKENS[:620])

    assert len(found) == written
    assert all(file.read_bytes() == content for file, content in found.items())


def test_turns_share_the_rows_of_windows_in_whole_chunks():
    """A place whose rows are not all there is not taken up."""
    kept("gemma3_text", TOKENS[:520])
    (chunk,) = files(".window16")
    before = chunk.read_bytes()

    sequence, found = resumed(TOKENS, "gemma3_text")
    fresh = evaluated("gemma3_text", TOKENS[:520])
    assert found == Resumed(520)
    assert mx.array_equal(sequence.evaluate([9], [-1]), fresh.evaluate([9], [-1]))

    kept("gemma3_text", TOKENS[:526])
    assert [file.read_bytes() for file in files(".window16")] == [before]
    chunk.unlink()
    assert resumed(TOKENS, "gemma3_text")[1] == Resumed(0)


@pytest.mark.thorough
def test_the_next_turn_writes_only_what_is_new():
    kept("qwen3_next", TOKENS[:620])
    before = {file: file.read_bytes() for file in files(".rows")}
    cache, sequence = opened("qwen3_next"), evaluated("qwen3_next", TOKENS, 620)
    cache.keep(sequence, TOKENS)
    cache.close()

    assert len(before) == 620 // CHUNK == len(files(".rows"))
    assert {file: file.read_bytes() for file in files(".rows")} == before
    assert len(files(".state")) == len({400, 600, 620} | {700})


@pytest.mark.parametrize("options", [{"fingerprint": "another"}, {"device": "gpu"}], ids=["model", "device"])
def test_what_another_model_or_device_kept_is_not_used(options: dict[str, Any]):
    kept("mamba2", TOKENS[:620])
    for file in files(".state"):
        # Also not under a name that this model would look for.
        cache = opened(**options)
        (prefixes(cache).files.folder / file.name).write_bytes(file.read_bytes())
        cache.close()

    assert resumed(TOKENS, **options)[1] == Resumed(0)


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def of_another_prefix(file: Path) -> None:
    file.write_bytes(files("600-*.state")[0].read_bytes())


@pytest.mark.parametrize(
    ("name", "harm", "left"),
    [
        ("mamba2", of_another_prefix, 600),
        ("qwen3_next", torn, 600),
        ("qwen3_next", lambda file: file.chmod(0o644), 600),
        ("qwen3", torn, 2 * CHUNK),
    ],
)
def test_a_harmed_file_is_removed_and_told_once(name: str, harm: Callable[[Path], None], left: int):
    kept(name, TOKENS[:620])
    (file,) = files("620-*.state")
    harm(file)

    _, first = resumed(TOKENS, name)
    _, second = resumed(TOKENS, name)

    assert (first.tokens, file.name in first.warning) == (left, True)
    assert second == Resumed(left)


def test_rows_behind_whole_chunks_are_kept_until_a_whole_chunk_holds_them():
    """The end of a turn, for the next one; of a conversation that goes on, whole chunks and its last end."""
    ends = []
    for tokens in (TOKENS[:300], TOKENS[:400], TOKENS[:620], TOKENS[:640]):
        kept("qwen3", tokens)
        ends.append([file.name.split("-")[0] for file in files(".state")])

    assert ends == [["300"], ["300", "400"], ["300", "400", "620"], ["620", "640"]]
    assert resumed(TOKENS, "qwen3")[1] == Resumed(640)


def test_a_torn_chunk_costs_what_is_behind_it():
    kept("deepseek_v3", TOKENS[:620])
    cache = opened("deepseek_v3")
    second = prefixes(cache).chunks(TOKENS)[2 * CHUNK]
    cache.close()
    second.write_bytes(b"")

    _, found = resumed(TOKENS, "deepseek_v3")

    assert found.tokens == CHUNK
    assert second.name in found.warning


def test_what_a_killed_process_left_is_no_state():
    kept("mamba2", TOKENS[:620])
    for file in files(".state"):
        file.rename(file.with_name(f".{file.name}-0123456789abcdef"))

    assert resumed(TOKENS)[1] == Resumed(0)


def test_a_full_disk_turns_it_off_and_is_told_once(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CacheFiles, "write", full)
    cache, sequence = opened(), evaluated("mamba2", TOKENS[:620])
    cache.keep(sequence, TOKENS[:620])
    cache.close()

    assert "No space left" in cache.turned_off()
    assert cache.turned_off() == ""
    assert cache.read(TOKENS, 0) is None


def test_few_tokens_are_neither_kept_nor_looked_for():
    kept("mamba2", TOKENS[:255])
    assert not files(".state")

    kept("mamba2", TOKENS[:620])
    cache = opened()
    assert read(cache, TOKENS, 620 - 255).contents is None
    assert cache.read(TOKENS, len(TOKENS) - 255) is None
    cache.close()


@pytest.mark.parametrize("most", [0, 3])
def test_few_turns_wait_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch, most: int):
    go_on, sequence = slow_disk(monkeypatch), evaluated("mamba2", TOKENS[:620])
    cache = opened(waiting=most * sequence.memory)
    for first in range(1, 9):
        cache.keep(sequence, [first, *TOKENS[1:620]])
    waiting = len(cache._turns)
    go_on.set()
    cache.close()

    assert waiting == max(most, 1)


def test_a_disk_that_hangs_holds_nobody_up_and_is_not_asked_again(monkeypatch: pytest.MonkeyPatch):
    kept("qwen3_next", TOKENS[:620])
    go_on, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(kept_prefixes, "read_private", partial(_hang, begun, go_on))
    cache = opened("qwen3_next")
    first = cache.read(TOKENS, 0)
    assert first is not None
    assert begun.wait(60.0)

    first.give_up()
    assert cache.read(TOKENS, 0) is None
    go_on.set()
    assert first.wait(60.0)
    assert first.contents is None
    assert read(cache, TOKENS).contents is not None
    cache.close()


def test_a_disk_that_does_not_tell_what_is_there_holds_nobody_up(monkeypatch: pytest.MonkeyPatch):
    go_on, asked = threading.Event(), list[Path]()

    def hanging(file: Path) -> bool:
        asked.append(file)
        assert go_on.wait(60.0)
        return touched(file)

    monkeypatch.setattr(disk_cache, "touched", hanging)
    monkeypatch.setattr(disk_cache, "_LOOKING_SECONDS", 0.01)
    cache, sequence = opened(), evaluated("mamba2", TOKENS[:620])
    for _ in range(2):
        cache.keep(sequence, TOKENS[:620])
    until(lambda: asked)
    assert (len(asked), cache.waits) == (1, False)

    go_on.set()
    looking = cache._looking
    assert looking is not None
    looking.join(60.0)
    monkeypatch.setattr(disk_cache, "_LOOKING_SECONDS", 60.0)
    cache.keep(sequence, TOKENS[:620])
    cache.close()
    assert len(files(".state")) == 3


def test_a_disk_that_fails_costs_a_prefill_and_turns_it_off(monkeypatch: pytest.MonkeyPatch):
    kept("mamba2", TOKENS[:620])

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(KeptPrefixes, "longest", failing)
    cache = opened()

    assert read(cache, TOKENS).contents is None
    assert cache.turned_off() == "Input/output error"
    assert cache.read(TOKENS, 0) is None
    cache.close()


def test_turns_are_kept_after_the_cache_was_cleared():
    cache, sequence = opened(), evaluated("mamba2", TOKENS[:620])
    shutil.rmtree(disk_cache_folder())
    assert read(cache, TOKENS).contents is None
    cache.keep(sequence, TOKENS[:620])
    cache.close()

    assert cache.turned_off() == ""
    assert resumed(TOKENS)[1] == Resumed(620)


def _hang(begun: threading.Event, go_on: threading.Event, file: Path) -> bytes | None:
    begun.set()
    assert go_on.wait(60.0)
    return read_private(file)


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until it is set, and one file may wait."""
    go_on, write = threading.Event(), CacheFiles.write

    def slow(*arguments: Any) -> None:
        assert go_on.wait(60.0)
        write(*arguments)

    monkeypatch.setattr(CacheFiles, "write", slow)
    monkeypatch.setattr(disk_cache, "_MOST_WAITING", 1)
    return go_on


def process_memory(name: str) -> int:
    """Bytes: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone forgets a process's peak")
def test_a_conversation_that_is_read_again_is_in_memory_once():
    sequence = model("qwen3").sequence()
    layers, chunks = len(sequence.caches), 8
    rows = {f"{layer}.{half}": mx.ones((1, 8, CHUNK, 1024)) for layer in range(layers) for half in ("keys", "values")}
    contents = [b"".join(FilePart(rows, {}).encoded()) for _ in range(chunks)]
    whole = sum(map(len, contents))
    Path("/proc/self/clear_refs").write_text("5")
    before = process_memory("VmRSS")

    parts = disk_cache._decoded(contents)
    resume(sequence, [1] * (chunks * CHUNK), parts, [], FilePart({}, {}))

    assert sequence.memory >= whole * 0.99
    assert process_memory("VmHWM") - before < whole / 2
