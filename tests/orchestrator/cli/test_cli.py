"""The command line as a user sees it: real processes, one sentence when something is wrong, nothing left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import click
import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.cli.commands.generate import prompt_text
from protocol.errors import InputError
from tests.conftest import Reference
from tests.support.paths import DEMO_TARGET
from tests.support.processes import free_ports, members, remains, until

PROMPT = "def quicksort(items):"
USED = ("--target", "--draft", "--address")
"""Options whose value makes sense, and can't be used."""
DEMO = DEMO_TARGET


class Command:
    """A running `launch-pipeline`."""

    def __init__(self, *arguments: str, stdin: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli.app", *arguments],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.mark = f"lp-{self.process.pid}-"
        self._stdin = stdin

    @property
    def stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)

    def end(self, seconds: float = 60.0) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; checks that nothing is left."""
        try:
            output, errors = self.process.communicate(self._stdin, timeout=seconds)
        finally:
            self.process.kill()
        until(lambda: not remains(self.mark))
        return self.process.returncode, output, errors


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    return Command(*arguments, stdin=stdin).end()


def own_lines(errors: str) -> list[str]:
    """Lines of stderr without what the demo pair says of itself."""
    return [line for line in errors.strip().splitlines() if line and not line.startswith("This is a tiny demo model")]


def sentence(errors: str) -> str:
    """The one line that stderr holds, beside what the demo pair says of itself."""
    (line,) = own_lines(errors)
    assert line.startswith("Error: ")
    return line


@pytest.fixture(scope="module")
def other_architecture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model that says it is something mlx-lm has never heard of."""
    folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("strange") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))
    return folder


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def address(port: int) -> Iterator[str]:
    """A pipeline that `start` keeps running."""
    command = Command("start", "--address", f"tcp://127.0.0.1:{port}", "--strategy", "sd")
    assert command.stdout.readline() == f"Ready at tcp://127.0.0.1:{port}\n"
    yield f"tcp://127.0.0.1:{port}"
    command.interrupt()
    code, _, errors = command.end()
    assert (code, errors.strip()) == (130, "Interrupted.")


def test_generate_prints_the_text_and_then_figures(reference: Reference):
    code, output, errors = run("generate", PROMPT, "--max-tokens", "12")

    assert code == 0
    assert output == reference(PROMPT, SamplingParams(max_tokens=12)).text + "\n"
    assert "12 after a prompt of 9" in errors
    assert "ended at its limit of 12 tokens (--max-tokens)" in errors
    assert re.search(r"about [\d.]+ times plain decoding \(about [\d.]+ tokens/s, estimated\)", errors)
    assert "hit rate" not in errors
    assert errors.startswith("This is a tiny demo model, which writes text that looks like Python")


def test_json_is_one_object_with_documented_keys(reference: Reference):
    options = ("--json", "--max-tokens", "12", "--temperature", "0.9", "--seed", "21", "--stop", "zzz")
    code, output, errors = run("generate", PROMPT, *options)

    answer = json.loads(output)
    expected = reference(PROMPT, SamplingParams(max_tokens=12, temperature=0.9, seed=21))
    assert (code, errors) == (0, "")
    assert set(answer) == {"text", "tokens", "finish_reason", "seed", "stats", "chat", "level"}
    assert (answer["chat"], answer["level"]) == (False, "tree")
    assert (answer["text"], answer["tokens"]) == (expected.text, list(expected.tokens))
    assert (answer["finish_reason"], answer["seed"]) == ("length", 21)
    assert set(answer["stats"]) >= {
        *("prompt_tokens", "generated_tokens", "elapsed", "time_to_first_token", "tokens_per_second"),
        *("rounds", "tokens_per_round", "hit_rate", "acceptance_rate", "acceptance_by_depth"),
        *("target_busy", "draft_busy", "wasted_draft_share", "overhead_per_round"),
    }


@pytest.mark.thorough
def test_the_prompt_may_come_from_stdin_or_a_file(address: str, tmp_path: Path, reference: Reference):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    options = ("--address", address, "--quiet", "--max-tokens", "8")

    text = reference(PROMPT, SamplingParams(max_tokens=8)).text + "\n"
    assert run("generate", "--prompt-file", "-", *options, stdin=PROMPT) == (0, text, "")
    assert run("generate", "--prompt-file", str(file), *options) == (0, text, "")


def test_version_is_the_packages():
    code, output, _ = run("--version")

    assert code == 0
    assert output.startswith("launch-pipeline, version 0.")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(shell: str):
    code, output, errors = run("completion", shell)

    assert (code, errors) == (0, "")
    assert "_LAUNCH_PIPELINE_COMPLETE" in output


REFUSED: dict[tuple[str, ...], str] = {
    ("--temperature", "-1"): "'--temperature': -1.0 is not in the range 0.0<=x<=100.0.",
    ("--top-p", "0"): "'--top-p': 0.0 is not in the range 0.0<x<=1.0.",
    ("--top-k", "-1"): "'--top-k': -1 is not in the range x>=0.",
    ("--seed", "-1"): "'--seed': -1 is not in the range x>=0.",
    ("--max-tokens", "0"): "'--max-tokens': 0 is not in the range x>=1.",
    ("--max-tokens", "many"): "'--max-tokens': 'many' is not a valid integer range.",
    ("--draft-tokens", "0"): "'--draft-tokens': 0 is not in the range",
    ("--strategy", "warp"): "'warp' is not one of 'ar', 'sd', 'ssd', 'adaptive'.",
    ("--prompt-file", __file__): "Give either a prompt or --prompt-file",
    ("--prompt-file", "/nowhere"): "No such file or directory.",
    ("--bogus",): "No such option",
    ("--max-token", "3"): "--max-tokens",
    ("--context", "abc"): "'--context': 'abc' is not a valid whole number or auto.",
    ("--temperature",): "Option '--temperature' requires an argument.",
    ("--pair", "qwen2.5-3"): "there is no 'qwen2.5-3'. Did you mean 'qwen2.5-3b'? `launch-pipeline pairs` lists all.",
    ("--pair", "nosuch"): "there is no 'nosuch'. `launch-pipeline pairs` lists all.",
    ("--target", "/nowhere"): "There is no folder '/nowhere': check the path of the target",
    ("--target", "/tmp"): "/tmp has no config.json",
    ("--draft", "no such"): "'no such' is neither a folder nor a Hugging Face id",
    ("--address", "tcp://8.8.8.8:1"): "tcp://8.8.8.8:1 is not on this machine only, so it needs keys: use ipc:///path",
    ("--address", "tcp://127.0.0.1:0"): "has an invalid port: choose one",
    ("--address", "ipc:///tmp/nobody-listens-here"): "No pipeline answers at ipc:///tmp/nobody-listens-here: start one",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_what_cannot_be_is_named_with_the_next_step(options: tuple[str, ...]):
    code, output, errors = run("generate", "x", *options)

    assert (code, output) == (1 if "nobody" in options[-1] else 2, "")
    assert REFUSED[options] in sentence(errors)
    if options[0] not in USED or options[-1] == __file__:
        assert errors.strip().endswith(("See `launch-pipeline generate --help`.", "`launch-pipeline pairs` lists all."))


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Gives standard input these bytes."""

    def give(content: bytes) -> None:
        file = tmp_path / "pipe"
        file.write_bytes(content)
        monkeypatch.setattr("sys.stdin", file.open())

    return give


@pytest.mark.parametrize(
    ("prompt", "piped", "sent"),
    [
        (None, b"import os\n", "import os"),
        ("Sum up.", b"a\nb\n", "Sum up.\n\na\nb"),
        ("Sum up.", b"", "Sum up."),
        (None, b"  a\n\n", "  a\n"),
    ],
)
def test_a_pipe_is_the_prompt_or_a_document_behind_it(
    pipe: Callable[[bytes], None], prompt: str | None, piped: bytes, sent: str
):
    pipe(piped)

    assert prompt_text(prompt, None) == sent


@pytest.mark.parametrize(
    ("piped", "error", "words"),
    [
        (b"\n", click.UsageError, "Give a prompt, --prompt-file or a pipe"),
        (b"\xff\xfe", InputError, "is not UTF-8 text"),
    ],
)
def test_a_pipe_without_text_is_refused(pipe: Callable[[bytes], None], piped: bytes, error: type, words: str):
    pipe(piped)

    with pytest.raises(error, match=words):
        prompt_text(None, None)


def test_standard_input_that_is_no_pipe_is_not_read(monkeypatch: pytest.MonkeyPatch):
    theirs, ours = socket.socketpair()
    with theirs, ours, ours.makefile() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert prompt_text("x", None) == "x"
    monkeypatch.setattr("sys.stdin", None)
    assert prompt_text("x", None) == "x"


def test_a_prompt_longer_than_the_context_is_refused(address: str):
    code, output, errors = run("generate", "--prompt-file", "-", "--address", address, stdin="x = 1\n" * 2000)

    assert (code, output) == (2, "")
    assert "runs with a context of 2,048. Shorten the prompt" in sentence(errors)


@pytest.mark.thorough
def test_an_unknown_architecture_is_refused(other_architecture: Path):
    code, output, errors = run("generate", "x", "--target", str(other_architecture), "--draft-engine", "none")

    assert (code, output) == (2, "")
    assert "abacus" in sentence(errors)
    assert "choose an architecture that mlx-lm supports" in errors


@pytest.mark.sampled(1)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_generating_ends_everything(times: int):
    command = Command("generate", PROMPT, "--max-tokens", "1900", "--pace", "m4-16gb-qwen2.5-3b")
    assert command.stdout.read(4)
    for _ in range(times):
        command.interrupt()

    code, _, errors = command.end()
    assert code in (130, -signal.SIGINT)
    assert own_lines(errors) in (["Interrupted."], [])


@pytest.mark.thorough
def test_a_worker_that_keeps_dying_ends_the_command_with_a_sentence():
    command = Command("generate", PROMPT, "--max-tokens", "1900", "--draft-engine", "none")
    shot: set[int] = set()
    while command.process.poll() is None:
        pid = members(command.mark).get("target_worker")
        if pid is not None and pid not in shot:
            shot.add(pid)
            os.kill(pid, signal.SIGKILL)

    code, _, errors = command.end()
    assert (code, len(shot)) == (1, 3)
    assert "It died three times within a minute and is not started again. Run `launch-pipeline doctor`" in errors


# A target with a chat template -------------------------------------------------------------------


SHORT = "import os"
TEMPLATE = "# Question\n{{ messages[0]['content'] }}\n# Answer\n"
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo target with a chat template."""
    folder = tmp_path_factory.mktemp("instruct") / "model"
    shutil.copytree(DEMO_TARGET, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def asked(instruct: str, *options: str) -> tuple[dict[str, object], str]:
    """The answer as JSON, and what stderr says without --json."""
    arguments = ("generate", SHORT, "--target", instruct, "--max-tokens", "8", "--temperature", "0", *options)
    code, output, _ = run(*arguments, "--json")
    assert code == 0
    return json.loads(output), run(*arguments)[2]


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "read"), [((), f"# Question\n{SHORT}\n# Answer"), (("--raw",), SHORT)])
def test_a_bare_prompt_is_a_chat_message_and_raw_continues_it(
    options: tuple[str, ...], read: str, instruct: str, reference: Reference
):
    answer, told = asked(instruct, *options)

    assert answer["tokens"] == list(reference(read, PARAMS).tokens)
    assert answer["chat"] is not bool(options)
    assert ("The prompt is a chat message" in told) is not bool(options)


@pytest.mark.thorough
def test_python_continues_unless_a_chat_is_asked_for(instruct: str, reference: Reference):
    with Pipeline(target=instruct, strategy="ar") as pipeline:
        continued = pipeline.generate(SHORT, PARAMS)
        answered = pipeline.generate(pipeline.chat_prompt(SHORT), PARAMS)

    assert continued.tokens == reference(SHORT, PARAMS).tokens
    assert answered.tokens == reference(f"# Question\n{SHORT}\n# Answer", PARAMS).tokens


def test_a_target_without_a_template_has_no_chat_prompt():
    with Pipeline(strategy="ar") as pipeline, pytest.raises(InputError, match="has no chat template"):
        pipeline.chat_prompt(SHORT)


@pytest.mark.thorough
def test_an_answer_without_a_limit_goes_on_until_the_context_is_full_and_says_so(reference: Reference):
    code, said, told = run("generate", PROMPT, "--context", "300", "--temperature", "0")

    assert (code, said) == (0, reference(PROMPT, SamplingParams(temperature=0.0, max_tokens=291)).text + "\n")
    assert "the context of 300 tokens is full" in told


@pytest.mark.thorough
def test_json_that_the_limit_cuts_off_is_an_error_behind_its_text(tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}, "minItems": 50}')

    code, said, told = run("generate", PROMPT, "--json-schema", str(schema), "--max-tokens", "8", "--temperature", "0")

    assert (code, said.startswith("[")) == (1, True)
    assert "The JSON is incomplete. The answer ended at its limit of 8 tokens" in told
