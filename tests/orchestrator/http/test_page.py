"""Laws of the live page and its events that need no model and no browser."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request

from orchestrator.http.errors import ApiError
from orchestrator.http.monitoring.health import Health
from orchestrator.http.monitoring.live import MOST_WATCHERS, Live
from orchestrator.http.page import document
from orchestrator.http.run import bound, greet
from orchestrator.http.settings import ServerSettings
from protocol.errors import PipelineError
from protocol.messages.telemetry import TelemetryFrame
from tests.orchestrator.http.test_rules import get
from tests.support.fake_pipeline import READY, FakePipeline

SCENE = TelemetryFrame(serial=1, at=2.0, lost=0, drafts=True, workers=(), requests=(), shown=None, judged=(), spans=())
VOID = {"meta", "link", "input", "br", "img", "hr"}


class Reader(HTMLParser):
    """Elements as they open and close, with the ids and references among their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")
            if name in ("for", "aria-labelledby", "aria-describedby"):
                self.references += (value or "").split()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def test_every_element_is_closed_and_every_label_and_description_leads_somewhere():
    read = Reader(document())

    assert read.open == []
    assert len(set(read.ids)) == len(read.ids)
    assert set(read.references) <= set(read.ids)


def test_the_page_names_no_other_place():
    """What may look like an address is a namespace, which nothing fetches."""
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", document()))
    read = Reader(document())

    assert {address.split(":", 1)[-1] for address in addresses} == {"//www.w3.org/2000/svg"}
    assert [value for _, name, value in read.attributes if name == "src"] == []
    hrefs = [value for _, name, value in read.attributes if name == "href"]
    assert all(value.startswith(("#", "data:")) for value in hrefs)


def test_nothing_in_the_page_makes_markup_or_code_of_text():
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    read = Reader(document())

    assert [word for word in forbidden if word in document()] == []
    assert [name for _, name, _ in read.attributes if name.startswith("on") or name == "style"] == []


def test_the_policy_admits_the_pages_own_style_and_script_and_nothing_else():
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


def test_the_page_is_the_same_for_everybody():
    """It needs no key, so it must hold nothing that is anybody's."""
    assert get("/", headers={}).text == get("/", names=("another",), key=None).text == document()


# Events ------------------------------------------------------------------------------------------


def request(query: bytes = b"") -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": query})


def told(
    pipeline: FakePipeline,
    count: int,
    query: bytes = b"",
    then: Callable[[FakePipeline, Live], None] = lambda *_: None,
    more: int = 0,
) -> list[tuple[str, Any]]:
    """The first `count` events, and `more` after `then`; (name, content) each, without signs of life."""

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


def test_a_stream_says_who_speaks_then_how_it_is_then_what_happens():
    events = told(FakePipeline(scenes=[SCENE, replace(SCENE, serial=2)]), 4)

    assert [name for name, _ in events] == ["hello", "status", "scene", "scene"]
    assert events[0][1] == {"models": ["demo"], "chat": False}
    assert events[1][1]["status"] == "ok"
    assert [scene["serial"] for _, scene in events[2:]] == [1, 2]


def test_models_are_told_by_name_and_not_by_where_they_lie():
    state = replace(READY, target="/home/me/models/target", draft="some/draft")
    (_, (_, status)) = told(FakePipeline(condition=state), 2)

    assert (status["target"], status["draft"]) == ("target", "draft")


def test_a_stream_outlasts_loading_and_a_pipeline_that_does_not_answer():
    def answers(pipeline: FakePipeline, _: Live) -> None:
        pipeline.condition = READY
        pipeline.scenes = [SCENE]

    pipeline = FakePipeline(condition=None)
    events = told(pipeline, 2, then=answers, more=2)
    assert [content.get("status") for _, content in events[1:]] == ["loading", "ok", None]

    def recovers(pipeline: FakePipeline, _: Live) -> None:
        pipeline.scenes = [SCENE]

    pipeline = FakePipeline(scenes=[PipelineError("No pipeline answers.")])
    assert told(pipeline, 2, then=recovers, more=1)[-1][0] == "scene"


def test_a_wanted_request_is_asked_for_and_nonsense_is_named():
    pipeline = FakePipeline(scenes=[SCENE])
    told(pipeline, 3, b"request=12")
    assert pipeline.watched == [12]

    for query in (b"request=x", b"request=-1", b"request=", b"request=" + b"9" * 20):
        with pytest.raises(ApiError) as refused:
            told(pipeline, 1, query)
        assert refused.value.status == 400


def test_watchers_are_counted_and_their_places_given_back():
    async def watch() -> None:
        pipeline = FakePipeline(scenes=[SCENE])
        live = Live(pipeline, Health(pipeline), {})
        streams = [await live.events(request()) for _ in range(MOST_WATCHERS)]
        with pytest.raises(ApiError) as refused:
            await live.events(request())
        assert refused.value.status == 429

        await gone(streams[0])
        await live.events(request())

    async def gone(stream: Any) -> None:
        """The reader hangs up at once."""

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            raise OSError

        with pytest.raises(ClientDisconnect):
            await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    asyncio.run(watch())


def test_streams_end_with_the_server():
    async def watch() -> None:
        pipeline = FakePipeline(scenes=[SCENE])
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
def test_the_printed_address_holds_the_key_only_if_it_was_made_here(
    made: bool, fragment: str, capsys: pytest.CaptureFixture[str]
):
    """A key of the owner's own is known to him, and others may see his terminal."""
    settings = ServerSettings(names=("demo",), key="a-fresh-key")
    with bound("127.0.0.1", 0) as listener:
        greet(settings, listener, made)
        port = listener.getsockname()[1]

    assert f"Page at http://127.0.0.1:{port}/{fragment}\n" in capsys.readouterr().out
