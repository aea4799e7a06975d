"""The clients that people use, against a running server: `pip install -e '.[clients]'`, then
`bin/test -m slow tests/end_to_end/test_http_clients.py`. One that is not installed is skipped; npm's are fetched
by the test."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import SamplingParams
from orchestrator.text.chat_template import ChatTemplate
from tests.conftest import Reference
from tests.end_to_end.test_http_serve import DEMO, KEY, PROMPT, Serving, serving
from tests.support.paths import ROOT

__all__ = ["serving"]

pytestmark = pytest.mark.slow
MESSAGES: list[Any] = [{"role": "user", "content": "import"}]
SAMPLING: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 16}
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
NPM_CLIENT = ROOT / "tests" / "support" / "npm_client"


@pytest.fixture(scope="module")
def said(reference: Reference) -> str:
    """What the target alone says to MESSAGES."""
    template = ChatTemplate(DEMO)
    return reference(template.tokens(MESSAGES), SamplingParams(**SAMPLING, stop=template.stops)).text


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Clients that would fetch price lists or send statistics do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("LANGSMITH_TRACING", "false")
        yield


def _openai(server: Serving) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def _ollama(server: Serving) -> Any:
    return pytest.importorskip("ollama").Client(host=server.url, headers={"authorization": f"Bearer {KEY}"})


def _anthropic(server: Serving) -> Any:
    return pytest.importorskip("anthropic").Anthropic(base_url=server.url, api_key=KEY, max_retries=0)


def test_openai(serving: Serving, said: str, reference: Reference):
    client = _openai(serving)

    assert [model.id for model in client.models.list()] == ["demo"]
    chat = client.chat.completions.create(model="demo", messages=MESSAGES, **SAMPLING)
    assert chat.choices[0].message.content == said
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

    streamed = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SAMPLING
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed[:-1]) == said
    assert streamed[-1].usage == chat.usage

    plain = client.completions.create(model="demo", prompt=PROMPT, **SAMPLING)
    assert plain.choices[0].text == reference(PROMPT, SamplingParams(**SAMPLING)).text


def test_ollama(serving: Serving, said: str, reference: Reference):
    client = _ollama(serving)
    options = {"temperature": 0.7, "seed": 5, "num_predict": 16}

    chat = client.chat("demo", messages=MESSAGES, options=options)
    parts = list(client.chat("demo:latest", messages=MESSAGES, options=options, stream=True))
    raw = client.generate("demo", PROMPT, raw=True, options=options)

    assert chat.message.content == "".join(part.message.content for part in parts) == said
    assert (chat.eval_count, chat.done_reason) == (parts[-1].eval_count, parts[-1].done_reason)
    assert chat.total_duration >= chat.eval_duration > 0
    assert raw.response == reference(PROMPT, SamplingParams(**SAMPLING)).text


def test_ollama_lists_and_keeps_to_a_schema(serving: Serving):
    ollama = pytest.importorskip("ollama")
    client = _ollama(serving)

    assert [model.model for model in client.list().models] == [model.model for model in client.ps().models] == ["demo"]
    assert "completion" in client.show("demo").capabilities
    form = client.chat("demo", messages=MESSAGES, format=SCHEMA, options={"seed": 3, "num_predict": 400})
    assert isinstance(json.loads(form.message.content)["sure"], bool)
    with pytest.raises(ollama.ResponseError, match="no such model"):
        client.chat("llama3", messages=MESSAGES)
    with pytest.raises(ollama.ResponseError, match="no embedding model"):
        client.embed("demo", "a")


@pytest.fixture
def swapping(tmp_path: Path) -> Iterator[Serving]:
    """A server whose two models do not fit beside one another, so that each request here waits for a load."""
    file = tmp_path / "config.toml"
    file.write_text(
        "arena-memory = 64\nprefix-cache-memory = 16\n[models.one]\npair = 'demo'\n[models.two]\npair = 'demo'\n"
    )
    with Serving("--models-memory", "1.5", settings=file) as server:
        yield server


def test_clients_read_on_while_their_model_is_loaded(swapping: Serving, said: str):
    client, claude, host = _openai(swapping), _anthropic(swapping), _ollama(swapping)
    asked: dict[str, Any] = {"extra_body": {"seed": 5}, "temperature": 0.7}

    with client.chat.completions.stream(model="one", messages=MESSAGES, max_tokens=16, **asked) as chat:
        chat.until_done()
    (choice,) = chat.current_completion_snapshot.choices
    assert (choice.message.role, choice.message.content) == ("assistant", said)
    with client.responses.stream(model="two", input="import", max_output_tokens=16, **asked) as response:
        told = list(response)
    assert [event.type for event in told[:2]] == ["response.created", "response.queued"]
    assert told[-1].response.output_text == said
    body = {"seed": 5, "temperature": 0.7}
    with claude.messages.stream(model="one", messages=MESSAGES, max_tokens=16, extra_body=body) as message:
        assert message.get_final_text() == said
    options = {"temperature": 0.7, "seed": 5, "num_predict": 16}
    parts = list(host.chat("two", messages=MESSAGES, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == said
    assert parts[-1].load_duration > 0


def test_openai_parses_what_kept_to_a_schema_and_reads_its_probabilities(serving: Serving):
    client, pydantic = _openai(serving), pytest.importorskip("pydantic")
    field = pydantic.Field(max_length=8)
    person = pydantic.create_model("Person", name=(str, field), tags=(list[bool], field))
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 3, "max_tokens": 200}

    whole = client.chat.completions.parse(**asked, response_format=person, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(**asked, response_format=person, logprobs=True) as stream:
        streamed = stream.get_final_completion()
    response = client.responses.parse(
        model="demo", input=MESSAGES, text_format=person, max_output_tokens=200, extra_body={"seed": 3}
    )

    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, person)
    assert choice.message.parsed == streamed.choices[0].message.parsed == response.output_parsed
    assert b"".join(bytes(each.bytes) for each in choice.logprobs.content).decode() == choice.message.content
    assert len(streamed.choices[0].logprobs.content) == len(choice.logprobs.content)
    assert {len(each.top_logprobs) for each in choice.logprobs.content} == {2}


def test_openai_reads_our_errors(serving: Serving):
    openai = pytest.importorskip("openai")
    client = _openai(serving)

    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=MESSAGES, modalities=["audio"])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "modalities")


def _litellm(server: Serving, folder: Path) -> tuple[str, str]:
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/demo", "api_base": f"{server.url}/v1", "api_key": KEY, "messages": MESSAGES}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 5_000}]})
    streamed = litellm.completion(**asked, **SAMPLING, stream=True)
    whole = litellm.completion(**asked, **SAMPLING).choices[0].message.content
    return whole, "".join(chunk.choices[0].delta.content or "" for chunk in streamed)


def _langchain(server: Serving, folder: Path) -> tuple[str, str]:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(model="demo", base_url=f"{server.url}/v1", api_key=KEY, **SAMPLING)
    return model.invoke("import").content, "".join(str(chunk.content) for chunk in model.stream("import"))


def _llm(server: Serving, folder: Path) -> tuple[str, str]:
    """Without white space at the ends."""
    pytest.importorskip("llm")
    (folder / "extra-openai-models.yaml").write_text(
        f"- model_id: demo\n  model_name: demo\n  api_base: {server.url}/v1\n  api_key_name: demo\n"
    )
    options = [word for name, value in SAMPLING.items() for word in ("-o", name, str(value))]
    command = [sys.executable, "-m", "llm", "-m", "demo", "--key", KEY, *options, "import"]

    def ask(*more: str) -> str:
        told = {"env": {**os.environ, "LLM_USER_PATH": str(folder)}, "stdout": subprocess.PIPE}
        return subprocess.run([*command, *more], text=True, timeout=100, **told).stdout.strip()

    return ask("--no-stream"), ask()


@pytest.mark.parametrize("client", [_litellm, _langchain, _llm])
def test_what_wraps_openai_s_client(client: Any, serving: Serving, said: str, tmp_path: Path):
    assert [text.strip() for text in client(serving, tmp_path)] == [said.strip()] * 2


def test_openai_responses(serving: Serving, said: str):
    openai = pytest.importorskip("openai")
    client = _openai(serving)
    asked: dict[str, Any] = {"model": "demo", "input": "import", "temperature": 0.7, "max_output_tokens": 16}
    seeded = {"extra_body": {"seed": 5}}

    answer = client.responses.create(**asked, **seeded)
    assert (answer.output_text, answer.usage.output_tokens_details.reasoning_tokens) == (said, 0)
    told = list(client.responses.create(**asked, **seeded, stream=True))
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == said
    assert (told[-1].type, told[-1].response.output_text) == ("response.incomplete", said)
    assert told[-1].response.usage == answer.usage
    with client.responses.stream(**{**asked, "max_output_tokens": 64}, **seeded) as stream:
        assert stream.get_final_response().status == "completed"

    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    formed = client.responses.create(model="demo", input="Sure?", text={"format": form})
    assert set(json.loads(formed.output_text)) == {"sure"}
    told = client.responses.create(**asked, include=["message.output_text.logprobs"])
    assert sum(len(each.bytes) for each in told.output[0].content[0].logprobs) >= len(told.output_text.encode())

    again = client.responses.create(**{**asked, "input": "And?"}, previous_response_id=answer.id)
    assert again.usage.input_tokens > answer.usage.input_tokens
    assert client.responses.retrieve(answer.id) == answer
    client.responses.delete(answer.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked, previous_response_id=answer.id)
    assert refused.value.code == "previous_response_not_found"


def test_anthropic(serving: Serving, said: str):
    client = _anthropic(serving)
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 16}
    sampling = {"extra_body": {"temperature": 0.7, "seed": 5}}

    message = client.messages.create(**asked, **sampling)
    assert ([block.text for block in message.content], message.role) == ([said], "assistant")
    with client.messages.stream(**asked, **sampling) as stream:
        assert "".join(stream.text_stream) == said
        streamed = stream.get_final_message()
    counted = [(each.stop_reason, each.usage.output_tokens) for each in (message, streamed)]
    assert counted[0] == counted[1]

    form: dict[str, Any] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    formed = client.messages.create(**{**asked, "max_tokens": 400}, output_config=form)
    assert set(json.loads(formed.content[0].text)) == {"sure"}

    assert [model.id for model in client.models.list()] == ["demo"]
    tokens = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
    assert tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    first = said.split()[0]
    stopped = client.messages.create(**asked, **sampling, stop_sequences=[first])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", first)


def test_anthropic_reads_our_errors(serving: Serving):
    anthropic = pytest.importorskip("anthropic")
    client = _anthropic(serving)
    asked: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 16}

    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**asked)
    with pytest.raises(anthropic.NotFoundError, match="no such model"):
        client.messages.create(**{**asked, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="read only text"):
        client.messages.create(
            **{**asked, "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]}
        )


@pytest.fixture(scope="module")
def npm_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with npm's clients and what is asked through them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm") / "client"
    shutil.copytree(NPM_CLIENT, folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=100)
    if done.returncode:
        pytest.skip(f"npm could not fetch its clients: {done.stderr.strip()[-300:]}")
    return folder


def test_npm_ai(serving: Serving, reference: Reference, npm_client: Path):
    template = ChatTemplate(DEMO)
    params = SamplingParams(temperature=0.0, max_tokens=16, stop=template.stops)
    expected = reference(template.tokens(MESSAGES), params)

    asked = subprocess.run(
        ["node", "ask.mjs"],
        cwd=npm_client,
        env={**os.environ, "LAUNCH_PIPELINE_URL": serving.url, "LAUNCH_PIPELINE_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert asked.returncode == 0, asked.stderr
    answers = json.loads(asked.stdout)
    assert set(answers) == {"openai-compatible", "openai-responses", "anthropic"}
    figures = expected.statistics
    for provider, answer in answers.items():
        assert answer["whole"] == answer["streamed"] == expected.text, provider
        assert answer["finish"] == [expected.finish_reason] * 2, provider
        assert answer["usage"] == [[figures.prompt_tokens, figures.generated_tokens]] * 2, provider
        assert answer["refused"].startswith("404 This server has no such model"), provider
