"""Laws of the live page and its event stream that need neither a model nor a browser."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request

from orchestrator.http.errors import ApiError
from orchestrator.http.live import MAX_SUBSCRIBERS, Health, Live
from orchestrator.http.page import document
from orchestrator.http.run import bound, greet
from orchestrator.http.settings import ServerSettings
from protocol.errors import PipelineError
from protocol.messages.base import Level
from protocol.messages.client import Statistics
from protocol.messages.telemetry import (
    RequestSnapshot,
    RequestSummary,
    TelemetryFrame,
    TreeSnapshot,
    VerifiedRound,
    WorkerSummary,
    WorkSpan,
)
from tests.support.asked_server import get, post
from tests.support.fake_pipeline import READY, FakePipeline

FRAME = TelemetryFrame(
    serial=1, at=2.0, dropped=0, uses_draft=True, workers=(), requests=(), selected=None, verified=(), spans=()
)

READ_AS = {
    "frame": TelemetryFrame,
    "round": VerifiedRound,
    "span": WorkSpan,
    "worker": WorkerSummary,
    "request": RequestSummary,
    "selected": RequestSnapshot,
    "live": RequestSnapshot,
    "snapshot": RequestSnapshot,
    "tree": TreeSnapshot,
    "statistics": Statistics,
}
"""The page's names for parts of a frame."""


def test_the_page_refers_to_no_other_server():
    """The only address is a namespace, which no browser fetches."""
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", document()))

    assert {address.split(":", 1)[-1] for address in addresses} == {"//www.w3.org/2000/svg"}
    assert re.findall(r"<[^>]*\ssrc=", document()) == []
    assert all(value.startswith(("#", "data:")) for value in re.findall(r'<[^>]*\shref="([^"]*)"', document()))


def test_the_page_never_turns_text_into_markup_or_code():
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")

    assert [word for word in forbidden if word in document()] == []
    assert re.findall(r"<[a-z][^>]*\s(?:on\w+|style)=", document()) == []


def test_the_policy_allows_only_the_pages_own_style_and_script():
    response = get("/", headers={})
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))

    def digest(kind: str) -> str:
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", response.text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["script-src"] == digest("script")
    assert rules["style-src"] == digest("style")
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_the_page_is_the_same_for_every_client():
    """It needs no key, so it must hold no private data."""
    assert get("/", headers={}).text == get("/", names=("another",), key=None).text == document()


@pytest.mark.parametrize("name", READ_AS)
def test_the_script_reads_only_fields_that_telemetry_has(name: str):
    """`round.hit`, and `{ keys, texts } = round.tree`."""
    accessed = set(re.findall(rf"\b{name}\??\.([a-z_]+)\b(?!\()", script()))
    unpacked = set()
    for pattern in re.findall(rf"\{{ ([^{{}}]+) \}} = [\w.]+\.{name}\b(?![.(])", script()):
        unpacked |= {re.split(r"[:=]", field)[0].strip() for field in pattern.split(",")}
    # `tree` is also the name of the object that draws it.
    fields = unpacked if name == "tree" else accessed | unpacked

    assert fields
    assert fields <= set(READ_AS[name].__struct_fields__)


def test_the_script_compares_fields_only_with_values_that_they_can_have():
    structs = "|".join(name for name in READ_AS if name != "tree")
    compared = re.findall(rf"\b({structs})\.(\w+) === \"(\w+)\"", script())

    assert ("span", "kind", "prefill") in compared
    for name, field, value in compared:
        assert value in get_args(get_type_hints(READ_AS[name])[field]), (name, field)


def script() -> str:
    (content,) = re.findall(r"<script>(.*?)</script>", document(), re.DOTALL)
    return content


# Events ------------------------------------------------------------------------------------------


def request(query: bytes = b"") -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": query})


def received(
    pipeline: FakePipeline,
    count: int,
    query: bytes = b"",
    then: Callable[[FakePipeline, Live], None] = lambda *_: None,
    more: int = 0,
) -> list[tuple[str, Any]]:
    """The first `count` events, then `more` after `then`, as (name, content); comments are left out."""

    async def read() -> list[tuple[str, Any]]:
        live = Live(pipeline, Health(pipeline), {"models": ["demo"], "chat": False})
        stream = await live.events(request(query))
        events = named(stream.body_iterator)
        found = [await anext(events) for _ in range(count)]
        then(pipeline, live)
        return [*found, *[await anext(events) for _ in range(more)]]

    return asyncio.run(read())


async def named(frames: AsyncIterable[Any]) -> AsyncIterator[tuple[str, Any]]:
    async for frame in frames:
        head, _, data = frame.decode().rstrip("\n").partition("\n")
        if head.startswith("event: "):
            yield head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_stream_begins_with_hello_and_status_and_continues_with_frames():
    events = received(FakePipeline(frames=[FRAME, replace(FRAME, serial=2)]), 4)

    assert [name for name, _ in events] == ["hello", "status", "frame", "frame"]
    assert events[0][1] == {"models": ["demo"], "chat": False}
    assert events[1][1]["status"] == "ok"
    assert [frame["serial"] for _, frame in events[2:]] == [1, 2]


@pytest.mark.parametrize("level", get_args(Level))
def test_status_holds_names_of_models_not_their_paths_and_a_level_for_which_the_page_has_words(level: Level):
    state = replace(READY, target="/home/me/models/target", draft="some/draft", level=level)
    (_, (_, status)) = received(FakePipeline(condition=state), 2)

    assert (status["target"], status["draft"], status["level"]) == ("target", "draft", level)
    assert re.search(rf"LEVELS = {{[^}}]*\b{level}: \"verifies ", document())


def test_a_stream_survives_loading_and_a_pipeline_that_does_not_answer():
    def answers(pipeline: FakePipeline, _: Live) -> None:
        pipeline.condition = READY
        pipeline.frames = [FRAME]

    pipeline = FakePipeline(condition=None)
    events = received(pipeline, 2, then=answers, more=2)
    assert [content.get("status") for _, content in events[1:]] == ["loading", "ok", None]

    def recovers(pipeline: FakePipeline, _: Live) -> None:
        pipeline.frames = [FRAME]

    pipeline = FakePipeline(frames=[PipelineError("No pipeline answers.")])
    assert received(pipeline, 2, then=recovers, more=1)[-1][0] == "frame"


def test_a_request_can_be_selected_and_a_malformed_number_is_refused():
    pipeline = FakePipeline(frames=[FRAME])
    received(pipeline, 3, b"request=12")
    assert pipeline.watched == [12]

    for query in (b"request=x", b"request=-1", b"request=", b"request=" + b"9" * 20):
        with pytest.raises(ApiError) as refused:
            received(pipeline, 1, query)
        assert refused.value.status == 400


def test_a_streamed_answer_has_the_name_by_which_telemetry_knows_its_request():
    response = post("/v1/completions", {"prompt": "a", "stream": True})

    assert response.headers["x-request"] == "request 1"


def test_the_number_of_streams_is_limited_and_a_closed_one_frees_its_place():
    async def watch() -> None:
        pipeline = FakePipeline(frames=[FRAME])
        live = Live(pipeline, Health(pipeline), {})
        streams = [await live.events(request()) for _ in range(MAX_SUBSCRIBERS)]
        with pytest.raises(ApiError) as refused:
            await live.events(request())
        assert refused.value.status == 429

        await gone(streams[0])
        await live.events(request())

    async def gone(stream: Any) -> None:
        """The client disconnects at once."""

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            raise OSError

        with pytest.raises(ClientDisconnect):
            await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    asyncio.run(watch())


def test_streams_end_with_the_server():
    async def watch() -> None:
        pipeline = FakePipeline(frames=[FRAME])
        live = Live(pipeline, Health(pipeline), {})
        events = named((await live.events(request())).body_iterator)
        for _ in range(3):
            await anext(events)
        ended = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)

        live.stop()

        assert await asyncio.wait_for(ended, 5) is None

    asyncio.run(watch())


@pytest.mark.parametrize(("made", "fragment"), [(True, "#key=a-fresh-key"), (False, "")])
def test_the_printed_address_holds_the_key_only_if_the_server_made_it(
    made: bool, fragment: str, capsys: pytest.CaptureFixture[str]
):
    """The user knows a key of their own, and others may see the terminal."""
    settings = ServerSettings(names=("demo",), key="a-fresh-key")
    told: list[str] = []

    def say(text: str, *, err: bool = False) -> None:
        told.append(text)

    with bound("127.0.0.1", 0) as listener:
        greet(settings, listener, made, say)
        port = listener.getsockname()[1]

    assert f"Page at http://127.0.0.1:{port}/{fragment}" in told
    assert ("API key, until the server ends: a-fresh-key" in told) == made
    # What the command line prints breaks between words.
    assert capsys.readouterr() == ("", "")
