"""`launch-pipeline serve` with the demo pair: real processes, texts equal to the target's own, nothing left behind."""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from click.testing import CliRunner

from orchestrator import SamplingParams
from orchestrator.cli.app import cli
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from protocol.messages.telemetry import MAX_ROUNDS
from tests.conftest import Reference
from tests.orchestrator.cli.test_cli import Command
from tests.support.paths import DEMO_TARGET
from tests.support.processes import members, until

DEMO = DEMO_TARGET
KEY = "a-key-of-tests"
PROMPT = "def quicksort(items):"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"messages": [{"role": "user", "content": "import"}], "temperature": 1.0, "seed": 1, "max_tokens": 1500}
"""With this seed the answer is as long as it may be: seconds."""
SECONDS = 100.0
"""Generous, because the machine may be busy with other things."""
_TOLD = ("The draft worker ", "The orchestrator ended unexpectedly: another one starts.", "Keeps about ")


class Serving:
    """A running `launch-pipeline serve`, and what a client asks it."""

    def __init__(self, *arguments: str, settings: Path | None = None) -> None:
        """`settings`: a configuration file."""
        configured = () if settings is None else ("--config", str(settings))
        self.command = Command(*configured, "serve", "--port", "0", "--api-key", KEY, *arguments)
        self.url = self.command.stdout.readline().split()[-1].removesuffix("/v1")
        headers = {"authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        """Ends it as Ctrl-C does, if the block was successful."""
        if failed is None:
            self.command.interrupt()
        self.client.close()
        self.code, self.output, self.errors = self.command.end()

    def health(self) -> str:
        return self.client.get("/health").json()["status"]

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body).raise_for_status().json()

    def streamed(self, path: str, **body: Any) -> str:
        """The texts of the only choice, put together."""
        said = ""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    said += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        return said


@contextmanager
def started(*arguments: str) -> Iterator[Serving]:
    """A server that is ready, and ends as it should."""
    with Serving(*arguments) as server:
        assert server.health() in ("loading", "ok")
        until(lambda: server.health() == "ok", SECONDS)
        yield server
    *told, last = server.errors.strip().splitlines()
    assert (server.code, last) == (130, "Interrupted.")
    assert all(line.startswith(_TOLD) or " answers with a warning " in line for line in told if line)
    assert KEY not in server.output


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with started() as server:
        yield server


def params(temperature: float, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=5, max_tokens=24, **others)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_completion_is_what_the_target_alone_would_say(serving: Serving, reference: Reference, temperature: float):
    expected = reference(PROMPT, params(temperature))
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": temperature, "seed": 5, "max_tokens": 24}

    answer = serving.post(COMPLETIONS, **asked, n=2)

    first, second = (choice["text"] for choice in answer["choices"])
    assert first == expected.text == serving.streamed(COMPLETIONS, **asked)
    assert (second == first) == (temperature == 0)
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert answer["usage"]["prompt_tokens"] == expected.statistics.prompt_tokens
    assert answer["usage"]["completion_tokens"] == 2 * expected.statistics.generated_tokens


def test_a_chat_is_what_the_target_says_to_the_template(serving: Serving, reference: Reference):
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "import"}]
    template = ChatTemplate(DEMO)
    tokens: Sequence[int] = template.tokens(messages)
    expected = reference(tokens, params(0.7, stop=(".", *template.stops)))
    asked: dict[str, Any] = {"messages": messages, "temperature": 0.7, "seed": 5, "stop": "."}

    answer = serving.post(CHAT, **asked, max_completion_tokens=24)

    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["choices"][0]["finish_reason"] == expected.finish_reason
    assert serving.streamed(CHAT, **asked, max_tokens=24) == expected.text


def test_a_chat_keeps_to_its_form_and_tells_how_probable_that_was(serving: Serving, reference: Reference):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    messages = [{"role": "user", "content": "import"}]
    template = ChatTemplate(DEMO)
    expected = reference(template.tokens(messages), params(1.0, json_schema=schema, logprobs=3, stop=template.stops))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    asked = {"messages": messages, "temperature": 1.0, "seed": 5, "max_tokens": 24, "response_format": form}

    (choice,) = serving.post(CHAT, **asked, logprobs=True, top_logprobs=3)["choices"]

    assert choice["message"]["content"] == expected.text == serving.streamed(CHAT, **asked)
    assert json.loads(expected.text)["n"] in (1, 22, 333)
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == expected.text
    known = [one.chosen for one in expected.token_logprobs][: len(content)]
    assert [entry["logprob"] for entry in content] == pytest.approx(known, abs=1e-3)
    assert serving.client.post(CHAT, json={**asked, "response_format": {"type": "verse"}}).status_code == 400


@pytest.mark.thorough
def test_an_echo_tells_how_probable_the_prompt_is_whether_or_not_its_kv_is_there(
    serving: Serving, reference: Reference
):
    tokens = TextCodec(DEMO).encode(PROMPT)
    asked: dict[str, Any] = {"prompt": [tokens, tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    known = [reference(tokens[:end], params(0.0, logprobs=1)).token_logprobs[0] for end in range(1, len(tokens))]

    for _ in range(2):
        for choice in serving.post(COMPLETIONS, **asked)["choices"]:
            told = choice["logprobs"]
            assert choice["text"].startswith(PROMPT)
            assert (len(told["tokens"]), told["token_logprobs"][0]) == (len(tokens) + 1, None)
            for best, one in zip(told["top_logprobs"][1:-1], known, strict=True):
                assert max(best.values()) == pytest.approx(one.best[0][1], abs=1e-3)
            assert all(
                chosen <= max(best.values())
                for chosen, best in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True)
            )


def test_the_other_apis_say_what_a_chat_says(serving: Serving):
    turn = {"messages": [{"role": "user", "content": "import"}]}
    asked: dict[str, Any] = {"temperature": 0.7, "seed": 5}
    said = serving.post(CHAT, **turn, **asked, max_tokens=24)["choices"][0]["message"]["content"]

    response = serving.post("/v1/responses", input="import", **asked, max_output_tokens=24)
    message = serving.post("/v1/messages", **turn, **asked, max_tokens=24)

    assert response["output"][0]["content"][0]["text"] == message["content"][0]["text"] == said
    cut = serving.post("/v1/messages", **turn, **asked, max_tokens=2)
    assert (response["status"], message["stop_reason"], cut["stop_reason"]) == ("completed", "end_turn", "max_tokens")
    first = said.split()[0]
    stopped = serving.post("/v1/messages", **turn, **asked, max_tokens=24, stop_sequences=[first])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", first)
    streamed = serving.client.post("/v1/messages", json={**turn, **asked, "max_tokens": 24, "stream": True}).text
    deltas = [json.loads(line[6:]).get("delta", {}) for line in streamed.splitlines() if line.startswith("data: ")]
    assert "".join(delta.get("text", "") for delta in deltas) == said


def test_a_client_that_goes_away_frees_its_place(serving: Serving):
    endless = {"temperature": 1.0, "logit_bias": {str(id): -100 for id in TextCodec(DEMO).eos}, "max_tokens": 2_000}
    asked = {"prompt": PROMPT, "stream": True, "n": 4, **endless}
    with serving.client.stream("POST", COMPLETIONS, json=asked) as response:
        lines = response.iter_lines()
        next(lines)
        figures = serving.client.get("/metrics").text.splitlines()
        assert "launch_pipeline_open_generations 4.0" in figures, [line for line in figures if "generations" in line]

    for line in ("launch_pipeline_open_generations 0.0", 'launch_pipeline_generations_total{reason="unfinished"} 4.0'):
        until(lambda line=line: line in serving.client.get("/metrics").text, SECONDS)


def test_who_watches_sees_each_round_of_a_text_as_it_comes(serving: Serving):
    told, said = [], ""
    with serving.client.stream("GET", "/v1/pipeline/events") as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        hello, status, _ = (json.loads(next(lines).removeprefix("data: ")) for _ in range(3))
        # A frame has room for so many rounds, if each commits one token.
        said = serving.post(COMPLETIONS, prompt=PROMPT, temperature=0.0, max_tokens=MAX_ROUNDS)["choices"][0]["text"]
        while sum(verified["committed"] for verified in told) < MAX_ROUNDS:
            told += json.loads(next(lines).removeprefix("data: ")).get("verified", [])

    texts = [
        [verified["tree"]["texts"][index] for index in verified["accepted"]] + [verified["bonus"]] for verified in told
    ]
    assert "".join("".join(text[: verified["committed"]]) for text, verified in zip(texts, told, strict=True)) == said
    assert (hello["models"], hello["chat"], status["status"]) == (["demo"], False, "ok")


def test_a_draft_that_dies_is_told_by_health_and_texts_go_on(serving: Serving, reference: Reference):
    expected = reference(PROMPT, params(1.0))

    def degraded_by_another_death() -> bool:
        # The first restarts take a quarter of a second, which two looks at a busy machine may miss; later ones wait.
        if (draft := members(serving.command.mark).get("draft_worker")) is not None:
            with suppress(ProcessLookupError):
                os.kill(draft, signal.SIGKILL)
        return serving.health() == "degraded"

    until(degraded_by_another_death, SECONDS)

    answer = serving.post(COMPLETIONS, prompt=PROMPT, temperature=1.0, seed=5, max_tokens=24)
    assert answer["choices"][0]["text"] == expected.text
    until(lambda: serving.health() == "ok", SECONDS)
    (restarts,) = re.findall(
        r"^launch_pipeline_worker_restarts (\d+)", serving.client.get("/metrics").text, re.MULTILINE
    )
    assert int(restarts) >= 1


def test_an_orchestrator_that_is_killed_is_followed_by_another(serving: Serving, reference: Reference):
    old = members(serving.command.mark)
    with serving.client.stream("POST", "/v1/messages", json={**MESSAGE, "stream": True}) as response:
        lines = response.iter_lines()
        next(line for line in lines if "content_block_delta" in line)
        os.kill(old["orchestrator"], signal.SIGKILL)
        *_, name, data, _ = lines

    assert (name, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "overloaded_error")

    def refused() -> httpx.Response | None:
        """By one that loads; if it was ready before it was asked, by the next one."""
        if serving.health() == "loading":
            answer = serving.client.post("/v1/messages", json=MESSAGE)
            return answer if answer.is_error else None
        other = members(serving.command.mark).get("orchestrator", old["orchestrator"])
        if other != old["orchestrator"] and serving.health() == "ok":
            os.kill(other, signal.SIGKILL)
        return None

    told = until(refused, SECONDS)
    assert (told.status_code, told.json()["error"]["type"]) == (503, "overloaded_error")
    assert int(told.headers["retry-after"]) > 0
    until(lambda: serving.health() == "ok", SECONDS)
    answer = serving.post(COMPLETIONS, prompt=PROMPT, temperature=1.0, seed=5, max_tokens=24)
    assert answer["choices"][0]["text"] == reference(PROMPT, params(1.0)).text
    assert not set(old.values()) & set(members(serving.command.mark).values())


# Before anything is started ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-api-key", "--host", "0.0.0.0"), "leave --no-api-key out"),
        (("--allow-origin", "null"), "names no web pages"),
        (("--allow-origin", "localhost:3000"), "names no web pages"),
        (("--allow-origin", "https://chat.example/page"), "names no web pages"),
        (("--host", "192.0.2.1"), "choose others with --host and --port"),
        (("--target", "./no-such-folder"), "There is no folder"),
    ],
)
def test_what_must_not_be_served_is_refused_at_once(arguments: tuple[str, ...], words: str):
    refused = CliRunner().invoke(cli, ["serve", "--port", "0", *arguments])

    assert isinstance(refused.exception, InputError)
    assert words in str(refused.exception)
