"""Laws of the terminal chat: what is said, what is remembered, and what Ctrl-C stops."""

import codecs
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrator import Client, Pipeline, SamplingParams
from orchestrator.cli.chat_screen import LiveAnswer, Plain, PlainAnswer, prompt_session, screen
from orchestrator.cli.commands.chat import Answerer, ChatConversation, StreamedAnswer, converse
from orchestrator.text.chat_template import ChatTemplate
from protocol.errors import InputError, PipelineError
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
SECONDS = 60.0
LONG = "import os\n" * 500


class Script(Plain):
    """A screen that types what it is told; an exception in place of a line is raised."""

    def __init__(self, *lines: str | type[BaseException], lasting: bool = True) -> None:
        self.lasting = lasting
        self.told: list[str] = []
        self._lines = iter(lines)

    def ask(self) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line

    def note(self, words: str, wrong: bool = False) -> None:
        self.told.append(f"Error: {words}" if wrong else words)


class Echo(Answerer):
    """Answers with how many messages it has read, and the last one; stops or fails where a question says so."""

    def answer(self, conversation: ChatConversation, question: str, show) -> StreamedAnswer:
        messages = conversation.messages(question)
        if question == "fail":
            raise PipelineError("The pipeline is gone.")
        if question == "interrupted":
            raise KeyboardInterrupt
        if question == "silent":
            return StreamedAnswer("", "", note="Nothing fits.")
        return StreamedAnswer(f"{len(messages)} {messages[-1]['content']}", "", stopped=question == "stop")


def chat(*lines: str | type[BaseException], lasting: bool = True) -> tuple[ChatConversation, list[str], dict[str, str]]:
    saved: dict[str, str] = {}
    conversation = ChatConversation(SamplingParams(), saved.__setitem__)
    screen = Script(*lines, lasting=lasting)
    converse(screen, conversation, Echo.__new__(Echo))
    return conversation, screen.told, saved


def test_every_answer_reads_all_that_was_said():
    conversation, _, _ = chat("one", "//two", " ", "/system Be brief.", "three")

    assert [message["content"] for message in conversation.messages("four")] == [
        *("Be brief.", "one", "1 one", "/two", "3 /two", "three", "6 three", "four")
    ]


def test_commands_change_what_follows_and_say_so(capsys: pytest.CaptureFixture):
    conversation, told, saved = chat(
        "/system S", "/temperature 0.7", "/seed 3", "hello", "/save notes.md", "/clear", "/help", "/quit", "unheard"
    )

    assert conversation.params == SamplingParams(temperature=0.7, seed=3)
    assert [message["content"] for message in conversation.messages("x")] == ["S", "x"]
    assert saved == {"notes.md": "*System:* S\n\n**User:**\n\nhello\n\n**Assistant:**\n\n2 hello\n"}
    assert told[1:3] == ["The temperature is 0.7.", "The seed is 3."]
    assert "/quit" in told[-1]
    assert capsys.readouterr().out == "2 hello\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/clean", "did you mean /clear"),
        ("/sys", "did you mean /system"),
        ("/foo", "there are /help, /clear,"),
        ("/", "there are /help, /clear,"),
        ("/temperature hot", "needs a number"),
        ("/temperature -1", "temperature"),
        ("/seed x", "whole number"),
        ("/save", "name of a file"),
        ("fail", "gone"),
        ("silent", "Nothing fits"),
    ],
)
def test_a_mistake_is_a_sentence_and_loses_nothing(line: str, words: str):
    conversation, told, _ = chat("one", line, "two")

    assert len(told) == 1
    assert told[0].startswith("Error: ")
    assert words in told[0]
    assert len(conversation.messages("three")) == 5
    assert conversation.params == SamplingParams()

    if line != "silent":
        with pytest.raises(PipelineError, match=words):
            chat("one", line, lasting=False)


def test_ctrl_c_stops_an_answer_and_twice_on_an_empty_line_ends_the_chat():
    conversation, told, _ = chat("stop", KeyboardInterrupt, "interrupted", KeyboardInterrupt, "three")
    assert len(conversation.messages("four")) == 5
    assert told == ["Ctrl-C again, or Ctrl-D, ends the chat.", "Error: Stopped.", told[0]]

    for lines, lasting in (
        ((KeyboardInterrupt, KeyboardInterrupt), True),
        (("stop",), False),
        (("interrupted",), False),
    ):
        with pytest.raises(KeyboardInterrupt):
            chat(*lines, lasting=lasting)


def test_what_is_typed_before_the_chat_listens_is_kept_whole_and_not_echoed(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with os.fdopen(theirs) as stdin, os.fdopen(theirs, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        with screen(None) as shown:
            os.write(ours, b"x" * 4200 + b"\\\rand\ry")
            print("drawn", flush=True)
            assert b"x" not in os.read(ours, 4096)

            assert shown.ask() == "x" * 4200 + "\nand"
            assert shown.confirm("Overwrite it?")
        assert termios.tcgetattr(theirs) == before
    os.close(ours)


def test_plain_text_comes_as_it_is_sure_and_only_once(capsys: pytest.CaptureFixture):
    answer = PlainAnswer()
    for text in ("a", "a b\n", "a b\n\nc  "):
        answer.show(text, "")
    answer.finish("a b\n\nc", "")

    assert capsys.readouterr().out == "a b\n\nc\n"


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as running:
        yield running


def test_the_status_tells_how_far_a_long_message_was_read(pipeline: Pipeline):
    shown: list[tuple[str, str]] = []
    conversation = ChatConversation(SamplingParams(max_tokens=2), {}.__setitem__)
    template = ChatTemplate(DEMO)
    tokens = len(template.tokens(conversation.messages(LONG)))

    Answerer(Client(pipeline.address), template).answer(conversation, LONG, lambda *now: shown.append(now))

    text, status = shown[0]
    read = re.fullmatch(r"Reading the prompt: (\d+) of ([\d,]+) tokens", status)
    assert text == ""
    assert read, status
    assert 0 < int(read[1]) < int(read[2].replace(",", "")) == tokens - 1


def command(pipeline: Pipeline, *options: str) -> list[str]:
    return [sys.executable, "-m", "orchestrator.cli.app", "chat", "--address", pipeline.address, *options]


@pytest.mark.thorough
def test_without_a_terminal_lines_go_in_and_text_comes_out(pipeline: Pipeline):
    template = ChatTemplate(DEMO)
    stdin = "import os\\\nimport sys\n/system Python\nmore\n"
    out = subprocess.run(
        command(pipeline, "--max-tokens", "12", "--temperature", "0.8", "--seed", "5"),
        input=stdin, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip

    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, stop=template.stops)
    said = [{"role": "user", "content": "import os\nimport sys"}]
    first = pipeline.generate(template.tokens(said), params).text.strip()
    said = [{"role": "system", "content": "Python"}, *said, {"role": "assistant", "content": first}]
    second = pipeline.generate(template.tokens([*said, {"role": "user", "content": "more"}]), params).text.strip()
    assert (out.returncode, out.stdout) == (0, f"{first}\n{second}\n")
    limit = "The answer ended at its limit of 12 tokens (--max-tokens): a larger one lets it go on.\n"
    assert out.stderr == f"{limit}It holds from the next message on.\n{limit}"


class Typist:
    """Types into a chat on a terminal of its own, and reads what it shows."""

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "XDG_CACHE_HOME": str(home), "HOME": str(home), "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=home
        )
        os.close(theirs)
        self._decoded = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read(self, *words: str) -> None:
        """Until one of `words` comes behind what was read before. What follows it is read next."""
        any_word = re.compile("|".join(map(re.escape, words)))
        while not (found := any_word.search(self._seen)):
            self._seen += self._decoded.decode(os.read(self._ours, 4096))
        self._seen = self._seen[found.end() :]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def typist(pipeline: Pipeline, tmp_path: Path) -> Iterator[Typist]:
    typist = Typist(command(pipeline, "--max-tokens", "2000", "--temperature", "1", "--seed", "5"), tmp_path)
    yield typist
    typist.close()


def test_on_a_terminal_ctrl_c_stops_the_answer_and_then_the_chat(typist: Typist, tmp_path: Path):
    theirs = tmp_path / "theirs.md"
    theirs.write_text("theirs")
    typist.read("›")
    typist.type("first\x1b\rsecond\\\rthird\r")
    typist.read("tokens/s")
    typist.process.send_signal(signal.SIGINT)
    # The answer may just have ended by itself; then the signal meets an empty line.
    typist.read("stopped", "again")
    # Until the line editor waits, nobody takes a signal.
    typist.read("›")
    typist.type("/save theirs.md\r")
    typist.read("Overwrite it?")
    typist.type("n/save theirs.md\r")
    typist.read("choose another file")
    typist.read("Overwrite it?")
    assert theirs.read_text() == "theirs"
    typist.type("y")
    typist.read("Written to")
    typist.read("›")
    typist.process.send_signal(signal.SIGINT)
    typist.read("again")
    typist.read("›")
    typist.process.send_signal(signal.SIGINT)
    assert typist.process.wait(SECONDS) == 0

    assert theirs.read_text().startswith("**User:**\n\nfirst\nsecond\nthird\n")
    history = next(tmp_path.rglob("chat")) / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().splitlines()[2:5] == ["+first", "+second", "+third"]


def test_a_history_that_others_can_read_is_refused(tmp_path: Path):
    (history := tmp_path / "history").touch()
    history.chmod(0o644)

    with pytest.raises(InputError, match="Other users can read"):
        prompt_session(history)


PICTURES = ("👋🏽", "👨‍👩‍👧", "🇩🇪", "❤️", "漢字", "word", "a", "\n\n", "`code`", "- item\n")


@given(st.lists(st.sampled_from(PICTURES), max_size=60), st.integers(24, 100))
def test_no_line_that_is_drawn_again_is_wider_than_any_terminal_counts(words: list[str], width: int):
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True)
    live = LiveAnswer(console)

    live.show(" ".join(words), "status")

    lines = console.render_lines(live.shown, console.options, pad=False)
    for line in lines:
        text = "".join(segment.text for segment in line)
        parts = [2 if ord(each) > 0x2E7F and each != "\ufe0f" else each not in "\u200d" for each in text]
        assert sum(parts) <= width, text
