"""The clients that people use, against a running server: `pip install -e '.[clients]'`, then
`bin/test -m slow tests/test_http_clients.py`. One that is not installed is skipped."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import SamplingParams
from orchestrator.chat_template import ChatTemplate
from tests.conftest import Reference
from tests.test_http_serve import DEMO, KEY, PROMPT, Serving, serving

__all__ = ["serving"]

pytestmark = pytest.mark.slow
MESSAGES: list[Any] = [{"role": "user", "content": "import"}]
SAMPLING: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 16}


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


def test_openai(serving: Serving, said: str, reference: Reference):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)

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


def test_openai_reads_our_errors(serving: Serving):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0)

    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=MESSAGES, response_format={"type": "json_object"})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "response_format")


def test_litellm(serving: Serving, said: str):
    litellm = pytest.importorskip("litellm")
    asked = {"model": "openai/demo", "api_base": f"{serving.url}/v1", "api_key": KEY, "messages": MESSAGES}

    assert litellm.completion(**asked, **SAMPLING).choices[0].message.content == said
    streamed = litellm.completion(**asked, **SAMPLING, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == said
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 5_000}]})


def test_langchain(serving: Serving, said: str):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model="demo", base_url=f"{serving.url}/v1", api_key=KEY, **SAMPLING)

    answer = model.invoke("import")
    assert answer.content == said
    streamed = list(model.stream("import"))
    assert "".join(str(chunk.content) for chunk in streamed) == said


def test_llm(serving: Serving, said: str, tmp_path: Path):
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: demo\n  model_name: demo\n  api_base: {serving.url}/v1\n  api_key_name: demo\n"
    )
    options = [word for name, value in SAMPLING.items() for word in ("-o", name, str(value))]
    for streaming in ([], ["--no-stream"]):
        answer = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "demo", "--key", KEY, *options, *streaming, "import"],
            env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert answer.stdout.strip() == said.strip(), answer.stderr
