"""Laws of the server that need no model: access, request validation, and the form of responses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace
from starlette.requests import Request
from starlette.routing import Route

from orchestrator.api.client import NoPipeline
from orchestrator.api.pipeline import OrchestratorEnded
from orchestrator.cli.commands.serve import page_origin
from orchestrator.http.app import application, server_of_one
from orchestrator.http.backend import PipelineThread, RunningPipeline
from orchestrator.http.errors import ApiError
from orchestrator.http.live import Condition
from orchestrator.http.metrics import Metrics
from orchestrator.http.openai.answer_content import LogprobTranscript
from orchestrator.http.request_bodies import MOST_LEVELS
from orchestrator.http.server import Invitations
from orchestrator.http.settings import ServerSettings
from orchestrator.http.work import AdmissionLimit
from protocol.errors import PipelineError
from protocol.messages.client import PipelineState
from protocol.messages.remote import Invitation
from tests.support.asked_server import (
    CHAT,
    CODEC,
    COMPLETIONS,
    HELLO,
    KEY,
    SCOPE,
    TEMPLATE,
    chunks,
    client_of,
    get,
    post,
    receiving,
    served,
    talk,
)
from tests.support.fake_pipeline import READY, FakePipeline


def sent(path: str, content: Any, pipeline: FakePipeline | None = None, **settings: Any) -> httpx.Response:
    """The answer to a body of these bytes."""
    headers = {"content-type": "application/json"}
    return talk(lambda client: client.post(path, content=content, headers=headers), pipeline, **settings)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


# Who gets in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [KEY.upper(), KEY[:-1], KEY[1:], KEY + "x", KEY * 2, f'"{KEY}"', "*", "None", ""])
def test_every_route_but_health_and_the_page_wants_the_key_letter_by_letter(wrong: str):
    routes = served(FakePipeline(), ServerSettings(names=("demo",), key=KEY)).routes
    asked = {
        (method, str(route.path)) for route in routes if isinstance(route, Route) for method in route.methods or ()
    }

    async def ask(client: httpx.AsyncClient) -> set[str]:
        basic = {"authorization": f"Basic {KEY}", "x-api-key": wrong}
        headers = ({"authorization": f"Bearer {wrong}"}, {"authorization": wrong}, {"x-api-key": wrong}, basic)
        answers = [
            (path, (await client.request(method, path, headers=header)).status_code)
            for method, path in sorted(asked)
            for header in headers
        ]
        return {path for path, status in answers if status != 401}

    assert talk(ask, headers={}) == {"/", "/health"}
    refused = get("/none", headers={"x-api-key": wrong})
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert refused.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "headers",
    [
        *({"authorization": f"{scheme} {KEY}"} for scheme in ("Bearer", "bearer", "BEARER", "Bearer ")),
        {"authorization": KEY},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": "Bearer another"},
        {"x-api-key": KEY, "authorization": "Basic dXNlcjpwYXNz"},
        {"x-api-key": "another", "authorization": f"Bearer {KEY}"},
    ],
)
def test_the_key_opens_either_way(headers: dict[str, str]):
    assert get("/v1/models", headers=headers).json()["data"][0]["id"] == "demo"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("192.168.1.20", 200),
        ("MAC.local", 200),
        ("mac.local.:80", 200),
        ("evil.example", 403),
        ("[::1].evil.example", 403),
        ("[::1]evil.example:8080", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_server_and_addresses_are_answered(host: str, status: int):
    response = talk(lambda client: client.get("/health", headers={"host": host}), hosts=("mac.local",))

    assert response.status_code == status


def test_a_web_page_may_ask_only_where_it_was_allowed_to():
    """Also a page of the internet that asks a server of the local network."""
    page = "https://chat.example"
    request = {"method": "POST", "headers": "x", "private-network": "true"}
    asking = {"origin": page, **{f"access-control-request-{name}": value for name, value in request.items()}}

    def allowed(**settings: Any) -> dict[str, str]:
        answer = talk(lambda client: client.options(CHAT, headers=asking), headers={}, **settings)
        return {name: answer.headers.get(f"access-control-allow-{name}") for name in ("origin", "private-network")}

    assert allowed()["origin"] is None
    assert allowed(origins=("https://other.example",))["origin"] is None
    assert allowed(origins=(page,)) == {"origin": page, "private-network": "true"}


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("*", "*"),
        ("HTTPS://Chat.Example/", "https://chat.example"),
        ("http://localhost:80", "http://localhost"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("https://m\u00fcnchen.example", "https://xn--mnchen-3ya.example"),
        ("tauri://localhost", "tauri://localhost"),
    ],
)
def test_an_allowed_page_is_compared_as_browsers_name_it(given: str, origin: str):
    assert page_origin(given) == origin


@pytest.mark.parametrize(
    ("headers", "origins", "answer"),
    [
        ({}, (), 200),
        ({"sec-fetch-site": "same-origin"}, (), 200),
        ({"sec-fetch-site": "none"}, (), 200),
        ({"sec-fetch-site": "cross-site"}, (), 403),
        ({"sec-fetch-site": "same-site"}, (), 403),
        ({"sec-fetch-site": "cross-site"}, ("https://chat.example",), 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, ("https://chat.example",), 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://chat.example"}, ("https://chat.example",), 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://chat.example"}, ("*",), 200),
    ],
)
def test_without_a_key_no_foreign_page_is_answered(headers: dict[str, str], origins: tuple[str, ...], answer: int):
    def ask(path: str, **settings: Any) -> int:
        return talk(lambda client: client.get(path, headers=headers), origins=origins, **settings).status_code

    assert ask("/v1/models", key=None) == answer
    assert ask("/v1/models") == 200
    assert ask("/", key=None) == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 415),
        ("Application/JSON; charset=utf-8", 200),
        ("application/json;charset=UTF-8", 200),
    ],
)
def test_a_body_that_a_form_could_have_sent_is_refused_and_the_case_of_its_type_means_nothing(kind: str, status: int):
    headers = {"content-type": kind}

    assert talk(lambda client: client.post(CHAT, content=json.dumps(HELLO), headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("key", "headers", "answer"),
    [
        (KEY, {}, 200),
        (KEY, {"content-type": "application/x-www-form-urlencoded"}, 200),
        (KEY, {"content-type": "application/x-www-form-urlencoded", "origin": "https://evil.example"}, 200),
        (None, {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.5.0"}, 200),
        (None, {}, 200),
        (None, {"origin": "null"}, 415),
        (None, {"sec-fetch-site": "same-origin"}, 415),
        (None, {"referer": "http://localhost/"}, 415),
        (None, {"user-agent": "Mozilla/5.0"}, 415),
        (None, {"content-type": "text/plain"}, 415),
        (None, {"content-type": "multipart/form-data"}, 415),
    ],
)
def test_a_body_without_a_type_is_read_where_no_page_can_be_its_sender(key: Any, headers: dict[str, str], answer: int):
    response = talk(lambda client: client.post(CHAT, content=json.dumps(HELLO), headers=headers), key=key)

    assert response.status_code == answer


@pytest.mark.parametrize("agent", ["ollama/0.6 (arm64 darwin) Go/go1.24", "ollama-python/0.6.3 (x86_64 linux)"])
def test_a_client_of_ollama_s_finds_its_server_at_the_root(agent: str):
    found = talk(lambda client: client.get("/", headers={"user-agent": agent}), headers={})

    assert (found.status_code, found.text) == (200, "Ollama is running")


@pytest.mark.parametrize("told", [True, False])
def test_a_long_body_is_refused_whether_its_length_is_told_or_not(told: bool):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 200

    assert sent(CHAT, b" " * 2000 if told else parts(), most_bytes=1000).status_code == 413


# What may be asked -------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(body: bytes):
    assert sent(CHAT, body).status_code == 400


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (rb"Hi \ud83d", "Hi \ufffd"),
        (rb"\ude00 \uD83D\uDE00 \\ud83d", "\ufffd \N{GRINNING FACE} \\ud83d"),
        (b"Hi \xf0\x9f", "Hi \ufffd"),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_half_a_character_is_a_replacement_and_a_byte_order_mark_is_skipped(text: bytes, read: str, mark: bytes):
    pipeline = FakePipeline()
    body = mark + b'{"prompt": "' + text + b'", "user": "\\\\"}'

    answer = sent(COMPLETIONS, body, pipeline)

    assert answer.status_code == 200
    assert list(pipeline.asked[0][0]) == CODEC.encode(read)
    assert ["U+FFFD" in warning for warning in answer.json()["warnings"]] == [True]


def deep_body(body: Any, field: str, levels: int) -> str:
    """`body` as JSON, with a field of `levels` levels, an object outside."""
    half = levels // 2
    return json.dumps({**body, field: 0}).replace(f'"{field}": 0', f'"{field}": ' + '{"a": [' * half + "]}" * half)


DEEP = [
    (COMPLETIONS, {"prompt": "a"}, "user"),
    (CHAT, HELLO, "user"),
    ("/v1/responses", {"input": "a"}, "metadata"),
    ("/v1/messages", {**HELLO, "max_tokens": 1}, "output_config"),
    ("/v1/messages/count_tokens", HELLO, "output_config"),
]


@pytest.mark.parametrize("levels", [MOST_LEVELS, 600, 960, 10_000])
@pytest.mark.parametrize(("path", "body", "field"), DEEP)
def test_a_body_that_is_nested_too_deeply_is_refused(path: str, body: Any, field: str, levels: int):
    response = sent(path, deep_body(body, field, levels))

    assert response.status_code == 400
    assert f"deeper than {MOST_LEVELS} levels" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_deepest_body_is_answered(stream: bool):
    body = deep_body({"input": "a", "stream": stream}, "metadata", MOST_LEVELS - 2)
    answer = sent("/v1/responses", body)

    last = answer.text.strip().rsplit("\n", 1)[-1].removeprefix("data: ")
    found = json.loads(last)["response"] if stream else answer.json()
    assert found["metadata"] == json.loads(body)["metadata"]
    flat, roomy = [{"role": "user", "content": "a"}] * (2 * MOST_LEVELS), replace(READY, context=1 << 14)
    assert post(CHAT, {"messages": flat}, FakePipeline(condition=roomy)).status_code == 200


@pytest.mark.parametrize(
    ("path", "allowed"),
    [(CHAT, {"POST"}), ("/v1/models", {"GET", "HEAD"}), ("/v1/responses/x", {"GET", "HEAD", "DELETE"})],
)
def test_a_wrong_method_is_told_the_right_ones(path: str, allowed: set[str]):
    response = talk(lambda client: client.put(path, json={}))

    assert (response.status_code, {*response.headers["allow"].split(", ")}) == (405, allowed)


@pytest.mark.parametrize("name", ["other", "../demo", "/etc/passwd", "Qwen/Qwen2.5-0.5B", ""])
def test_only_models_named_at_the_start_can_be_asked_for(name: str):
    for response in (post(CHAT, {**HELLO, "model": name}), get(f"/v1/models/{name or 'x'}")):
        assert response.status_code == 404
    assert post(CHAT, {**HELLO, "model": "b/c"}, names=("a", "b/c")).json()["model"] == "b/c"
    assert get("/v1/models/b/c", names=("a", "b/c")).json()["id"] == "b/c"


def test_each_prompt_has_its_choices_whose_seeds_follow_one_another():
    pipeline = FakePipeline()

    post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": (1 << 32) - 1}, pipeline)
    post(COMPLETIONS, {"prompt": [1, 2, 3]}, pipeline)

    assert [params.seed for _, params in pipeline.asked[:4]] == [(1 << 32) - 1, 0] * 2
    assert tuple(pipeline.asked[4][0]) == (1, 2, 3)


def test_an_omitted_limit_is_that_of_the_api():
    pipeline = FakePipeline()
    post(COMPLETIONS, {"prompt": [1, 2, 3]}, pipeline)
    post(CHAT, HELLO, pipeline)
    post(CHAT, {**HELLO, "max_tokens": 5, "max_completion_tokens": 4}, pipeline)
    post(CHAT, {**HELLO, "max_tokens": 100_000}, pipeline)

    completion, chat, limited, whole = pipeline.asked
    room = READY.context - len(chat[0])
    assert (completion[1].max_tokens, chat[1].max_tokens) == (16, room)
    assert (limited[1].max_tokens, whole[1].max_tokens) == (4, room)


def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_clients_know():
    response = post(COMPLETIONS, {"prompt": [1] * READY.context})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length" in response.json()["error"]["message"]


# What an answer looks like -----------------------------------------------------------------------


def test_a_chat_has_one_message_a_choice_and_counts_its_prompt_once():
    one, two = (post(CHAT, {**HELLO, "n": n}).json() for n in (1, 2))

    assert two["choices"] == [{**one["choices"][0], "index": index} for index in (0, 1)]
    assert two["usage"]["completion_tokens"] == 10
    assert two["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def test_a_streamed_chat_has_usage_only_if_asked_for_and_each_choice_begins_and_ends_once():
    plain = chunks(post(CHAT, {**HELLO, "n": 2, "stream": True}))

    assert all("usage" not in chunk for chunk in plain)
    for index in (0, 1):
        parts = [choice for chunk in plain for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == "Hello"
        assert [part["delta"].get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]


def test_a_place_is_free_when_the_end_of_a_stream_was_read():
    async def twice() -> int:
        app = served(FakePipeline(), ServerSettings(names=("demo",), most_open=1))
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message.get("body") == b"data: [DONE]\n\n":
                async with client_of(app) as client:
                    statuses.append((await client.post(CHAT, json=HELLO)).status_code)

        await app(SCOPE, receiving({**HELLO, "stream": True}, asyncio.Event()), send)
        return statuses.pop()

    assert asyncio.run(twice()) == 200


def test_a_failure_of_the_server_itself_in_mid_stream_is_an_error_event_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise ValueError("A mistake.")

    monkeypatch.setattr(LogprobTranscript, "push", broken)
    response = post(CHAT, {**HELLO, "stream": True, "logprobs": True})

    assert response.status_code == 200
    assert json.loads(response.text.strip().split("data: ")[-1])["error"]["type"] == "server_error"
    assert caplog.messages == ["a stream failed"]


# Full, loading, failing, gone --------------------------------------------------------------------


def test_a_request_beyond_the_limit_is_refused_and_places_are_released():
    pipeline = FakePipeline(lambda params: ["a", None] if params.seed == 1 else ["a"])

    async def many_at_once(client: httpx.AsyncClient) -> list[httpx.Response]:
        stuck = asyncio.create_task(client.post(CHAT, json={**HELLO, "n": 2, "seed": 1}))
        await pipeline.stuck.wait()
        full = await client.post(CHAT, json={**HELLO, "n": 2})
        fits = await client.post(CHAT, json=HELLO)
        stuck.cancel()
        await asyncio.wait([stuck])
        await pipeline.cancelled.wait()
        return [full, fits, await client.post(CHAT, json={**HELLO, "n": 3}), await client.get("/metrics")]

    full, fits, after, metrics = talk(many_at_once, pipeline, most_open=3)

    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert full.json()["error"]["code"] == "queue_full"
    assert (fits.status_code, after.status_code) == (200, 200)
    assert "launch_pipeline_open_generations 0.0" in metrics.text
    assert post(CHAT, {**HELLO, "n": 4}, most_open=3).status_code == 400


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (None, "loading"),
        (replace(READY, ready=False), "loading"),
        (replace(READY, failure="The target died three times."), "failed"),
    ],
)
def test_a_pipeline_that_does_not_serve_gives_the_reason(state: Any, status: str):
    pipeline = FakePipeline(condition=state)

    health, answer = get("/health", pipeline), post(CHAT, HELLO, pipeline)

    assert (health.status_code, health.json()["status"]) == (503, status)
    assert health.json()["reason"]
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, status)
    assert "retry-after" in answer.headers


def test_clients_of_a_pipeline_that_does_not_answer_learn_no_address():
    pipeline = FakePipeline()
    pipeline.state = raising(NoPipeline("ipc:///tmp/of-the-owner"))

    answer = post(CHAT, HELLO, pipeline)

    assert (answer.status_code, "send it again" in answer.text) == (503, True)
    assert "ipc:" not in answer.text


def test_who_has_no_key_learns_the_health_and_not_its_reason():
    pipeline = FakePipeline(condition=replace(READY, failure="The target died: /home/me/log says why."))

    assert get("/health", pipeline, headers={}).json() == {"status": "failed"}
    assert get("/health", pipeline, headers={}, key=None).json()["reason"]


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_pipeline_without_a_worker_is_degraded_and_serves(role: Any):
    pipeline = FakePipeline(condition=replace(READY, down=(role,), lost=1))

    health = get("/health", pipeline)

    assert (health.status_code, health.json()["status"]) == (503, "degraded")
    assert role in health.json()["reason"]
    assert post(CHAT, HELLO, pipeline).status_code == 200
    metrics = get("/metrics", pipeline).text
    assert 'launch_pipeline_status{status="degraded"} 1.0' in metrics
    assert "launch_pipeline_worker_restarts 1.0" in metrics


def test_kv_warnings_of_one_pipeline_after_another_are_counted():
    metrics = Metrics(AdmissionLimit(1))
    counts = [("a", 2), ("a", 3), ("b", 1), ("a", 3)]
    states = [replace(READY, session=session, kv_warnings=count) for session, count in counts]

    texts = [metrics.text(Condition("ok", state=state)).decode() for state in states]

    told = [next(line for line in text.splitlines() if line.startswith("launch_pipeline_kv_w")) for text in texts]
    assert told == [f"launch_pipeline_kv_warnings_total {count}.0" for count in (2, 3, 4, 4)]


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_when_the_client_disconnects(stream: bool):
    pipeline = FakePipeline(lambda _: ["a", None])

    async def go_away() -> bytes:
        app = served(pipeline, ServerSettings(names=("demo",), keep_alive=0.02))
        said: list[bytes] = []
        gone = asyncio.Event()

        async def send(message: Any) -> None:
            said.append(message.get("body", b""))
            if said[-1].startswith(b":"):
                gone.set()

        async def go() -> None:
            await pipeline.stuck.wait()
            gone.set()

        going = None if stream else asyncio.create_task(go())
        await app(SCOPE, receiving({**HELLO, "stream": stream}, gone), send)
        assert going is None or going.done()
        await pipeline.cancelled.wait()
        return b"".join(said)

    said = asyncio.run(go_away())

    assert pipeline.running == 0
    assert (b": keep-alive\n\n" in said) == stream


def stopped(pipeline: FakePipeline, begun: asyncio.Event, body: Any) -> httpx.Response:
    """The answer of a server that is stopped once `begun` is set."""

    async def ask() -> httpx.Response:
        server = server_of_one(pipeline, CODEC, TEMPLATE, ServerSettings(names=("demo",)))
        async with client_of(application(server)) as client:
            waiting = asyncio.create_task(client.post(CHAT, json=body))
            await begun.wait()
            server.stop()
            return await asyncio.wait_for(waiting, 10)

    return asyncio.run(ask())


@pytest.mark.parametrize("stream", [True, False])
def test_a_stopped_server_sends_waiting_clients_an_error(stream: bool):
    pipeline = FakePipeline(lambda _: ["a", None])

    response = stopped(pipeline, pipeline.stuck, {**HELLO, "stream": stream})

    assert response.status_code == (200 if stream else 503)
    assert "The server was stopped" in response.text
    assert "[DONE]" not in response.text
    assert pipeline.running == 0


def test_a_stop_reaches_requests_that_wait_for_a_pipeline_that_has_ended():
    pipeline, asked = FakePipeline(), asyncio.Event()

    async def state() -> None:
        asked.set()
        await asyncio.Event().wait()

    pipeline.state = state
    response = stopped(pipeline, asked, HELLO)

    assert response.status_code == 503
    assert "The server was stopped" in response.json()["error"]["message"]


def test_figures_of_what_was_generated_can_be_read():
    async def ask(client: httpx.AsyncClient) -> str:
        await client.post(CHAT, json=HELLO)
        await client.get("/nowhere")
        return (await client.get("/metrics")).text

    text = talk(ask)

    for line in (
        'launch_pipeline_http_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'launch_pipeline_http_requests_total{route="other",status="404"} 1.0',
        'launch_pipeline_tokens_total{kind="generated"} 5.0',
        "launch_pipeline_generation_seconds_count 1.0",
        "launch_pipeline_time_to_first_token_seconds_count 1.0",
        "launch_pipeline_hit_rate_sum 0.75",
        "launch_pipeline_acceptance_rate_sum 0.5",
        "launch_pipeline_target_busy_share_sum 0.9",
        "launch_pipeline_draft_busy_share_sum 0.8",
        "launch_pipeline_queue 0.0",
        'launch_pipeline_status{status="ok"} 1.0',
    ):
        assert line in text.splitlines()


# Join lines --------------------------------------------------------------------------------------


OWNER = "a-key-of-tests"
ALONE = replace(READY, context=0)


def invite() -> Invitation:
    return Invitation("lp1:LINE", 600.0)


def create(invitations: Invitations) -> Any:
    return json.loads(bytes(asyncio.run(invitations.create(Request({"type": "http"}))).body))


@pytest.mark.parametrize(("state", "role"), [(READY, "draft"), (ALONE, "target")])
def test_a_machine_is_asked_for_what_is_missing(state: PipelineState, role: str):
    told = create(Invitations(invite, FakePipeline(condition=state), OWNER))

    assert told["command"] == f"launch-pipeline attach {role} lp1:LINE"


@pytest.mark.parametrize(
    ("invitations", "status", "word"),
    [
        (Invitations(None, FakePipeline(), OWNER), 404, "--listen"),
        (Invitations(invite, FakePipeline(), None), 403, "workers invite"),
        (Invitations(invite, FakePipeline(condition=None), OWNER), 503, "still being loaded"),
        (
            Invitations(raising(PipelineError("The pipeline does not answer.")), FakePipeline(), OWNER),
            503,
            "does not answer",
        ),
    ],
)
def test_who_gets_no_line_is_told_why(invitations: Invitations, status: int, word: str):
    with pytest.raises(ApiError, match=word) as refused:
        create(invitations)

    assert refused.value.status == status


# Before another program's pipeline ---------------------------------------------------------------


class Scripted:
    """A pipeline, or the client of one, whose methods are given."""

    address = "ipc:///nowhere"

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.close = lambda: None
        vars(self).update(methods)


def told_by(pipeline: Any, act: Callable[[PipelineThread], None] = PipelineThread.run) -> tuple[list[Any], Any]:
    """What a pipeline's thread tells, "end" at its end, and why it failed."""
    told: list[Any] = []
    thread = PipelineThread(pipeline, told.append, lambda: told.append("end"), told.append)
    act(thread)
    return told, thread.failure


def test_a_pipeline_that_is_left_while_it_loads_is_not_called_ready():
    pipeline = RunningPipeline(cast(Any, Scripted(state=lambda _: replace(READY, ready=False))))

    def leave(thread: PipelineThread) -> None:
        pipeline.close()
        thread.start()
        thread.join()

    assert told_by(pipeline, leave) == (["end"], None)


def test_a_pipeline_that_fails_in_a_way_nobody_foresaw_has_failed():
    _, failure = told_by(Scripted(start=raising(OSError(28, "No space left on device"))))

    assert "No space left on device" in str(failure)


def test_an_orchestrator_that_ends_again_and_again_ends_the_pipeline_and_a_server_that_ends_starts_no_other():
    dying = Scripted(start=lambda: READY, wait=raising(OrchestratorEnded("none")))

    def leave(thread: PipelineThread) -> None:
        thread.leave()
        thread.run()

    told, failure = told_by(dying)
    assert told == [READY, "none", READY, "none", READY, "end"]
    assert isinstance(failure, OrchestratorEnded)
    assert told_by(dying, leave)[0] == [READY, "end"]


@pytest.mark.parametrize("waiting", ["start", "wait"])
def test_a_pipeline_that_answers_late_is_not_gone_and_may_say_why_it_failed(
    waiting: str, monkeypatch: pytest.MonkeyPatch
):
    def paused(wait: float = 3.0) -> PipelineState:
        if wait < 5.0:
            raise NoPipeline("ipc:///nowhere")
        return replace(READY, failure="The target is gone.")

    monkeypatch.setattr("orchestrator.http.backend._CHECK_SECONDS", 0.0)

    with pytest.raises(PipelineError, match="The target is gone"):
        getattr(RunningPipeline(cast(Any, Scripted(state=paused))), waiting)()
