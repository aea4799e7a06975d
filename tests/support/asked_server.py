"""A server in this process with a scripted pipeline, and what is asked of it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import httpx
from msgspec.structs import replace
from starlette.applications import Starlette

from orchestrator.api.sampling import SamplingParams
from orchestrator.http.app import application, server_of_one
from orchestrator.http.settings import ServerSettings
from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.tokenizer import TextCodec
from tests.support.fake_pipeline import READY, FakePipeline
from tests.support.paths import DEMO_TARGET

DEMO = DEMO_TARGET
CODEC = TextCodec(DEMO)
TEMPLATE = ChatTemplate(DEMO, CODEC)
KEY = "a-key-of-tests"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, OLLAMA, GENERATE = "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello"},
    CHAT: HELLO,
    RESPONSES: {"input": "Hello"},
    MESSAGES: {**HELLO, "max_tokens": 9},
    OLLAMA: {**HELLO, "stream": False},
    GENERATE: {"prompt": "Hello", "stream": False},
}
"""A request of each route that generates."""

SCOPE = {
    "type": "http",
    "method": "POST",
    "path": CHAT,
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    "query_string": b"",
}

T = TypeVar("T")


def receiving(body: Any, gone: asyncio.Event) -> Callable[[], Awaitable[Any]]:
    """The messages of a client that disconnects when `gone` is set."""
    coming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if not coming:
            await gone.wait()
            return {"type": "http.disconnect"}
        return coming.pop()

    return receive


def served(pipeline: FakePipeline, settings: ServerSettings, template: ChatTemplate = TEMPLATE) -> Starlette:
    return application(server_of_one(pipeline, template.codec, template, settings))


@asynccontextmanager
async def client_of(app: Starlette, host: str = "localhost", **given: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process; its failures are answers."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}", **given) as client:
        yield client


def talk(
    conversation: Callable[[httpx.AsyncClient], Awaitable[T]],
    pipeline: FakePipeline | None = None,
    *,
    headers: dict[str, str] | None = None,
    host: str = "localhost",
    template: ChatTemplate = TEMPLATE,
    **settings: Any,
) -> T:
    """Send requests to a server in this process."""

    async def held() -> T:
        given = ServerSettings(**{"names": ("demo",), "key": KEY, "keep_alive": 0.02, **settings})
        app = served(pipeline or FakePipeline(), given, template)
        sent = {"authorization": f"Bearer {KEY}"} if headers is None else headers
        async with client_of(app, host, headers=sent) as client:
            return await conversation(client)

    return asyncio.run(held())


def post(path: str, body: Any, pipeline: FakePipeline | None = None, **settings: Any) -> httpx.Response:
    return talk(lambda client: client.post(path, json=body), pipeline, **settings)


def get(path: str, pipeline: FakePipeline | None = None, **settings: Any) -> httpx.Response:
    return talk(lambda client: client.get(path), pipeline, **settings)


class Gate:
    """Takes the place of a function: calls with a long argument wait until `go` is set."""

    def __init__(self, function: Callable[..., Any], long: int = 0) -> None:
        self._function = function
        self._long = long
        self.go = threading.Event()
        self.begun = threading.Event()
        self.threads: list[threading.Thread] = []
        """Those of all calls with a long argument."""
        self.calls = 0

    def __call__(self, content: Any, *others: Any, **named: Any) -> Any:
        self.calls += 1
        if len(content) >= self._long:
            self.threads.append(threading.current_thread())
            self.begun.set()
            self.go.wait()
        return self._function(content, *others, **named)


class Asked(NamedTuple):
    """What the pipeline was asked for a request, and the answer."""

    prompt: str
    tokens: list[int]
    params: SamplingParams
    answer: Any

    @property
    def warnings(self) -> list[str]:
        return self.answer.get("warnings", [])


def asked(path: str, body: Any, template: ChatTemplate = TEMPLATE, **settings: Any) -> Asked:
    """Of a request that is answered."""
    pipeline = FakePipeline(condition=replace(READY, context=8192))
    response = post(path, body, pipeline, template=template, **settings)
    assert response.status_code == 200, response.text
    ((tokens, params),) = pipeline.asked
    return Asked(template.codec.decode(tokens), list(tokens), params, response.json())


def chunks(response: httpx.Response) -> list[Any]:
    """Of an event stream that ended well."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def saying(said: Sequence[str | None], reason: Any = "stop") -> FakePipeline:
    return FakePipeline(lambda _: said, ends=(reason, None))
