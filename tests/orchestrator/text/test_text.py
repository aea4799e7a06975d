"""Laws of text: streaming equals decoding at once, and stop strings are found wherever borders fall."""

import itertools
import json
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from orchestrator.text.stop_scanner import AnswerStops, StopScanner
from orchestrator.text.tokenizer import MARK, TextCodec
from protocol.errors import InputError
from protocol.messages.client import ThoughtText
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40)
CUTS = st.lists(st.integers(0, 200), max_size=20)


def split(items: Any, cuts: list[int]) -> list:
    """Cut a string, bytes or list at the given places; pieces are not empty."""
    borders = sorted({0, len(items), *(cut for cut in cuts if cut < len(items))})
    return [items[start:end] for start, end in itertools.pairwise(borders)]


def stream(codec: TextCodec, batches: list[list[int]]) -> str:
    text = codec.stream()
    return "".join(text.push(batch) for batch in batches) + text.finish()


def byte_level_letter(byte: int) -> str:
    """The letter that stands for a byte in byte-level vocabularies: itself if it prints, else from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [other for other in range(256) if other not in plain]
    return chr(byte) if byte in plain else chr(256 + others.index(byte))


LETTERS = [byte_level_letter(byte) for byte in range(256)]
BYTES = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]


def of_bytes(data: bytes) -> list[int]:
    """A token a byte."""
    return [BYTES[LETTERS[byte]] for byte in data]


def codec_for(folder: Path, tokenizer: Tokenizer, **files: dict) -> TextCodec:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return TextCodec(folder)


@pytest.fixture(scope="module")
def demo() -> TextCodec:
    return TextCodec(DEMO)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@given(text=TEXT, cuts=CUTS, batches=CUTS)
def test_any_split_of_a_text_into_byte_level_tokens_streams_to_the_text(
    scratch: Path, text: str, cuts: list[int], batches: list[int]
):
    pieces = ["".join(LETTERS[byte] for byte in piece) for piece in split(text.encode(), cuts)]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    codec = codec_for(scratch, tokenizer)

    assert stream(codec, split([vocabulary[piece] for piece in pieces], batches)) == text


@given(text=TEXT, batches=CUTS)
def test_byte_fallback_streams_to_the_text(scratch: Path, text: str, batches: list[int]):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)])
    codec = codec_for(scratch, tokenizer)

    assert stream(codec, split(codec.encode(text), batches)) == codec.decode(codec.encode(text))


@given(tokens=st.lists(st.integers(0, 4095), max_size=60), batches=CUTS)
def test_tokens_that_make_no_text_stream_as_they_decode(demo: TextCodec, tokens: list[int], batches: list[int]):
    assert stream(demo, split(tokens, batches)) == demo.decode(tokens)


BROKEN = [b"\x80", b"\xe4", b"\xf0\x9f", b"\xad\xe4\xb8"]
"""Bytes that never are a character, alone or repeated, but for the last ones, of which no repetition ends with one."""


@given(data=st.binary(max_size=80), broken=st.sampled_from(BROKEN), runs=st.integers(0, 80))
def test_bytes_that_are_no_character_stream_as_they_decode(demo: TextCodec, data: bytes, broken: bytes, runs: int):
    tokens = of_bytes(broken * runs + data + "中".encode())

    assert stream(demo, [tokens]) == demo.decode(tokens)


@pytest.mark.parametrize("repeated", [*BROKEN, b"a", b""])
def test_a_stream_decodes_few_tokens_again_however_long_its_text_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bytes
):
    pieces = ["".join(LETTERS[byte] for byte in piece) for piece in (repeated or b"a", b"\x80", b"b")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(dict.fromkeys(pieces))}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"])
    codec = codec_for(tmp_path, tokenizer)
    token = 0 if repeated else codec.id_of("<pad>")
    assert token is not None
    tokens = [token] * 500
    expected, decode, seen = codec.decode(tokens), TextCodec.decode, []

    def counted(self: TextCodec, tokens: list[int], shown: frozenset[int] = frozenset()) -> str:
        seen.append(len(tokens))
        return decode(self, tokens, shown)

    monkeypatch.setattr(TextCodec, "decode", counted)
    assert stream(codec, [[token] for token in tokens]) == expected
    assert max(seen) < 50


@given(tokens=st.lists(st.integers(1, 4095), max_size=60))
def test_lengths_are_those_of_the_text_that_is_complete(demo: TextCodec, tokens: list[int]):
    ended = [*tokens, *demo.encode("a")]

    assert len(demo.lengths(ended)) == len(ended)
    assert sum(demo.lengths(ended)) == len(demo.decode(ended))
    assert demo.lengths(of_bytes("é!".encode())) == [0, 1, 1]
    assert demo.lengths(of_bytes(b"\x80" * 3)) == [1, 1, 1]


def test_no_piece_holds_half_a_character_and_text_before_it_does_not_wait(demo: TextCodec):
    smile = of_bytes("😀".encode())
    text = demo.stream()

    pieces = [text.push([token]) for token in [*demo.encode("a"), *smile, *demo.encode("b")]]

    assert pieces == ["a", "", "", "", "😀", "b"]
    assert text.push([*demo.encode("ab"), *of_bytes(b"\xc3")]) == "ab"
    assert text.finish() == "\N{REPLACEMENT CHARACTER}"


def test_end_tokens_are_the_union_of_all_three_files(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    assert codec_for(tmp_path, tokenizer, config={"eos_token_id": None}).eos == set()

    own = {"eos_token": {"content": "<end>"}}
    ends = {"generation_config": {"eos_token_id": [7, 8]}, "config": {"eos_token_id": 9}, "tokenizer_config": own}

    assert codec_for(tmp_path, tokenizer, **ends).eos == {1, 7, 8, 9}


def test_an_end_token_that_is_no_token_is_refused_with_a_sentence(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))

    with pytest.raises(InputError, match="eos_token_id"):
        codec_for(tmp_path, tokenizer, config={"eos_token_id": [10**30]})


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_broken_file_is_named_with_the_next_step(tmp_path: Path, name: str):
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{")

    with pytest.raises(InputError, match=rf"{name} is broken.*download the model again"):
        TextCodec(tmp_path)


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, one character at a time: cut where a stop string is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def scan(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner, out = StopScanner(stops), ""
    for piece in pieces:
        text, matched = scanner.push(piece)
        out += text
        if matched:
            return out, True
    return out + scanner.flush(), False


@given(text=st.text("abc\n", max_size=30), cuts=CUTS, stops=STOPS)
def test_stop_strings_are_found_wherever_the_borders_fall(text: str, cuts: list[int], stops: list[str]):
    assert scan(split(text, cuts), stops) == expected(text, stops)


@given(text=st.text("abc\n", max_size=30), stops=STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]):
    scanner = StopScanner(stops)
    emitted, matched = scanner.push(text)
    held = text[len(emitted) :]

    assert matched or not held or any(stop.startswith(held) for stop in stops)


def test_the_stop_string_that_was_complete_first_is_named():
    scanner = StopScanner(["cd", "abcd", "x"])

    assert (scanner.push("zabc"), scanner.found) == (("z", False), None)
    assert (scanner.push("dx"), scanner.found) == (("", True), "abcd")


def test_long_stop_strings_that_nearly_match_cost_little_a_piece():
    stops = ["a" * 1023 + "b", *("a" * (300 + place) + "b" * 700 + "c" for place in range(63))]
    scanner, began = StopScanner(stops), time.process_time()

    emitted = "".join(scanner.push("aaaa")[0] for _ in range(500))

    # Searching the held text again with each piece took five seconds.
    assert time.process_time() - began < 1
    assert emitted + scanner.flush() == "a" * 2000


@pytest.mark.parametrize("stop", ["aabaaab", "aabaaac", "abcabcabd", "aaaaab", "abacabadabacabae"])
def test_a_stop_string_that_repeats_itself_is_found_behind_its_own_beginnings(stop: str):
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(stop[: rng.randrange(len(stop))] for _ in range(8)) + stop
        pieces = split(text, [rng.randrange(len(text)) for _ in range(5)])
        assert scan(pieces, [stop, "aaaaaaab"]) == expected(text, [stop, "aaaaaaab"])


@pytest.mark.parametrize(
    "work",
    [
        lambda codec: codec.encode("def quicksort(items): " * 50_000),
        lambda codec: codec.decode([300] * 1_000_000),
    ],
    ids=["encoded", "decoded"],
)
def test_other_threads_run_while_a_long_text_is(work: Callable[[TextCodec], object]):
    codec = TextCodec(DEMO)
    began, ended = threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        work(codec)
        ended.set()

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    # The thread now keeps the interpreter's lock until it releases it by itself.
    sys.setswitchinterval(100)
    try:
        thread.start()
        began.wait()
        interrupted = not ended.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()

    assert interrupted


CODEC = TextCodec(DEMO_TARGET)


@pytest.mark.parametrize("text", ["", "def f():\n    return 1\n", "naïve 中文 \U0001f600 " * 40, "<|endoftext|>x"])
@pytest.mark.parametrize("special", [True, False])
def test_the_form_that_frees_the_interpreter_gives_the_same_tokens(text: str, special: bool):
    plain = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))

    assert CODEC.encode(text, special=special) == plain.encode(text, add_special_tokens=special).ids


# Stop strings beside thoughts ---------------------------------------------------------------------


THOUGHT = ThoughtText("<think>", "</think>")
OPENED = ThoughtText("<think>", "</think>", opened=True)
HARMONY = ThoughtText("", "<|channel|>final<|message|>", opened=True)
ANALYSIS = "<|channel|>analysis<|message|>Q?<|end|><|start|>assistant"


def scanned(stops: AnswerStops | StopScanner, pieces: list[str]) -> tuple[str, str | None]:
    """The text that is sent, and the stop string."""
    said = ""
    for piece in pieces:
        text, stopped = stops.push(piece)
        said += text
        if stopped:
            return said, stops.found
    return said + stops.flush(), None


@pytest.mark.parametrize(
    ("thought", "output", "said"),
    [
        (THOUGHT, "<think>Q? Hm.</think>Yes. Q? No.", "<think>Q? Hm.</think>Yes. "),
        (THOUGHT, "\n<think>Q?</think>Q?", "\n<think>Q?</think>"),
        (THOUGHT, "Yes. Q? No.", "Yes. "),
        (THOUGHT, "<thin", "<thin"),
        (THOUGHT, "Yes. <think>Q?", "Yes. <think>"),
        (THOUGHT, f"Yes. {MARK}<think>Q?</think>Q?", f"Yes. {MARK}<think>Q?</think>"),
        (THOUGHT, f"Yes. {MARK}Q?", f"Yes. {MARK}"),
        (OPENED, "Q? Hm.</think>Yes. Q?", "Q? Hm.</think>Yes. "),
        (OPENED, "Q? Hm.", "Q? Hm."),
        (HARMONY, f"{ANALYSIS}<|channel|>final<|message|>Yes. Q?", f"{ANALYSIS}<|channel|>final<|message|>Yes. "),
        (HARMONY, f"{HARMONY.end}Yes. {MARK}<Q?", f"{HARMONY.end}Yes. {MARK}<"),
        (None, "<think>Q?", "<think>"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_are_looked_for_in_the_answer(thought: ThoughtText | None, output: str, said: str, size: int):
    pieces = [output[start : start + size] for start in range(0, len(output), size)]

    assert scanned(AnswerStops(["Q?"], thought), pieces) == (said, "Q?" if said != output else None)


@given(pieces=st.lists(st.text('<think>/Qa \n"', max_size=9), max_size=9), opened=st.booleans())
def test_without_stop_strings_every_character_is_sent(pieces: list[str], opened: bool):
    thought = ThoughtText("<think>", "</think>", opened)

    assert scanned(AnswerStops([], thought), pieces) == ("".join(pieces), None)


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=9))
def test_without_a_thought_all_text_is_searched(pieces: list[str]):
    assert scanned(AnswerStops(["ab", "cc"]), pieces) == scanned(StopScanner(["ab", "cc"]), pieces)


def test_a_text_that_a_pattern_of_the_tokenizer_can_not_be_matched_with_is_refused(tmp_path: Path):
    folder = _with_pattern(tmp_path, "(a+)+$|.")

    with pytest.raises(InputError, match="can't read this text"):
        TextCodec(folder).encode("a" * 30 + "b")
    assert TextCodec(folder).encode("ab")


def _with_pattern(folder: Path, pattern: str) -> Path:
    shutil.copytree(DEMO_TARGET, folder, dirs_exist_ok=True)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder
