"""Laws of embeddings over HTTP: a vector an input, in order, whatever its form; a process only while it is needed."""

import asyncio
import base64
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from orchestrator.http.app import answering
from orchestrator.http.embedding_process import EmbeddingProcess
from orchestrator.http.embeddings import EmbeddingModel, embedding_routes
from orchestrator.http.errors import ApiError
from orchestrator.http.ollama.routes import embed_routes
from orchestrator.http.settings import EmbeddingCommand, EmbeddingSettings, ServerSettings
from orchestrator.http.work import AdmissionLimit
from orchestrator.machine.checkpoints import demo_model
from protocol.processes import raise_descriptor_limit
from tests.support.asked_server import client_of, get, post
from tests.support.fake_embeddings import BROKEN, COMMAND, SILENT, vector

OPENAI, EMBED, OLDER = "/v1/embeddings", "/api/embed", "/api/embeddings"
DEMO = demo_model("target")
SETTINGS = EmbeddingSettings(name="vectors", folder=DEMO, command=COMMAND)
TEXTS = ["def f(x):", "import os", "x"]
T = TypeVar("T")


def tokens(text: str) -> list[int]:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids


def new_model(
    settings: EmbeddingSettings, start: Callable[[EmbeddingCommand], EmbeddingProcess] = EmbeddingProcess
) -> EmbeddingModel:
    return EmbeddingModel(settings, AdmissionLimit(64), start)


def asked(model: EmbeddingModel, conversation: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Send requests to the routes of `model`, whose process then ends."""

    async def held() -> T:
        with closing(model):
            routes = [*embedding_routes(model), *embed_routes(model)]
            app = answering(routes, ServerSettings(names=("demo",)))
            async with client_of(app) as client:
                return await conversation(client)

    return asyncio.run(held())


def embed(path: str, body: Any, settings: EmbeddingSettings = SETTINGS) -> httpx.Response:
    return asked(new_model(settings), lambda client: client.post(path, json=body))


def message(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


@pytest.fixture
def short(tmp_path: Path) -> EmbeddingSettings:
    """Of a model for eight tokens."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    return replace(SETTINGS, folder=tmp_path)


# What is answered --------------------------------------------------------------------------------


def test_openai_gets_a_vector_an_input_in_order_and_the_tokens():
    answer = embed(OPENAI, {"model": "vectors", "input": TEXTS}).json()

    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    for text, each in zip(TEXTS, answer["data"], strict=True):
        assert each["embedding"] == pytest.approx(vector(tokens(text)), abs=1e-6)
    count = sum(len(tokens(text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (answer["object"], answer["model"]) == ("list", "vectors")


@pytest.mark.parametrize("given", [TEXTS[0], [TEXTS[0]], tokens(TEXTS[0]), [tokens(TEXTS[0])]])
def test_a_text_a_list_tokens_and_a_list_of_tokens_are_the_same_input(given: Any):
    (found,) = embed(OPENAI, {"input": given}).json()["data"]

    assert found["embedding"] == pytest.approx(vector(tokens(TEXTS[0])), abs=1e-6)


def test_base64_holds_the_numbers_as_float32_and_fewer_dimensions_are_the_first_ones_with_length_one():
    asked = {"input": "import os", "dimensions": 2}
    (plain,) = embed(OPENAI, asked).json()["data"]
    (encoded,) = embed(OPENAI, {**asked, "encoding_format": "base64"}).json()["data"]

    first = vector(tokens("import os"))[:2]
    expected = pytest.approx([each / np.linalg.norm(first) for each in first], abs=1e-6)
    assert plain["embedding"] == expected
    assert np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4").tolist() == expected


def test_ollama_gets_the_vectors_by_either_route():
    model = new_model(SETTINGS)

    async def both(client: httpx.AsyncClient) -> tuple[Any, Any]:
        new = await client.post(EMBED, json={"model": "vectors:latest", "input": TEXTS})
        old = await client.post(OLDER, json={"model": "vectors", "prompt": TEXTS[0]})
        return new.json(), old.json()

    new, old = asked(model, both)

    assert new["embeddings"][0] == old["embedding"] == pytest.approx(vector(tokens(TEXTS[0])), abs=1e-6)
    assert (len(new["embeddings"]), new["model"]) == (3, "vectors")
    assert new["prompt_eval_count"] == sum(len(tokens(text)) for text in TEXTS)


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [(OPENAI, {"input": "x"}), (EMBED, {"input": "x"}), (OLDER, {"prompt": "x"})]
)
def test_a_request_takes_one_of_the_server_s_places(path: str, body: Any):
    limit = AdmissionLimit(1)
    model = EmbeddingModel(SETTINGS, limit)

    async def full_then_free(client: httpx.AsyncClient) -> list[int]:
        with limit.take(1):
            refused = await client.post(path, json=body)
        return [refused.status_code, *[(await client.post(path, json=body)).status_code for _ in range(2)]]

    assert asked(model, full_then_free) == [429, 200, 200]
    assert limit.taken == 0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input": []}, "`input` holds 0 inputs"),
        ({"input": ["x"] * 2049}, "`input` holds 2049 inputs: give 1 to 2048."),
        ({"input": ["x", ""]}, "Input 1 is empty"),
        ({"input": ["x", 3]}, "mixes tokens with texts"),
        ({"input": [[1 << 40]]}, "Input 0 holds token 1099511627776"),
        ({"input": [-1]}, "input"),
        ({"input": "x", "dimensions": 4}, "`dimensions` is 4, and this model's vectors have 3."),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({}, "input"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(body: Any, sentence: str):
    response = embed(OPENAI, body)

    assert response.status_code == 400
    assert sentence in message(response)


@pytest.mark.parametrize("stated", [None, 512])
def test_an_input_beyond_the_models_positions_is_refused_by_openais_route_and_cut_by_ollamas(
    short: EmbeddingSettings, stated: int | None
):
    text = "import os\n" * 9
    if stated:
        (short.folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": stated}))

    refused = embed(OPENAI, {"input": text}, short)
    told = embed(EMBED, {"input": text, "truncate": False}, short)
    cut = embed(EMBED, {"input": text}, short)

    assert (refused.status_code, told.status_code) == (400, 400)
    assert f"8 tokens, and input 0 has {len(tokens(text))}" in message(refused)
    assert cut.json()["embeddings"][0] == pytest.approx(vector(tokens(text)[:8]), abs=1e-6)
    # So far beyond that it is not tokenized as a whole.
    assert "8 tokens, and input 0 has 990 characters" in message(embed(OPENAI, {"input": text * 11}, short))
    assert embed(EMBED, {"input": text * 11}, short).json() == cut.json()


def test_a_token_beyond_the_models_embeddings_is_refused_though_the_tokenizer_has_it(short: EmbeddingSettings):
    (short.folder / "config.json").write_text(json.dumps({"vocab_size": 300}))

    refused, served = embed(OPENAI, {"input": [300]}, short), embed(OPENAI, {"input": [299]}, short)

    assert (refused.status_code, served.status_code) == (400, 200)


@pytest.mark.parametrize("path", [OPENAI, EMBED, OLDER])
def test_a_server_without_an_embedding_model_says_how_to_get_one(path: str):
    response = post(path, {"model": "demo", "input": "a", "prompt": "a"})

    assert response.status_code == 501
    assert "--embedding-model" in response.text


# The process -------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[tuple[list[EmbeddingProcess], Callable[[EmbeddingCommand], EmbeddingProcess]]]:
    started: list[EmbeddingProcess] = []

    def start(command: EmbeddingCommand) -> EmbeddingProcess:
        started.append(EmbeddingProcess(command))
        return started[-1]

    yield started, start
    assert not any(process.running for process in started)


def test_it_starts_once_with_the_first_request_and_many_at_once_get_their_own_vectors():
    async def all_of(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(*(client.post(OPENAI, json={"input": f"x = {n}"}) for n in range(20)))

    with counted() as (started, start):
        model = new_model(SETTINGS, start)
        assert not model.loaded
        for number, response in enumerate(asked(model, all_of)):
            (found,) = response.json()["data"]
            assert found["embedding"] == pytest.approx(vector(tokens(f"x = {number}")), abs=1e-6)
        assert len(started) == 1


@pytest.mark.parametrize(("token", "reason"), [(1, "token 1"), (2, "it fell over"), (3, "not finite")])
def test_after_a_failure_the_next_request_gets_a_fresh_one(token: int, reason: str):
    with counted() as (started, start):

        async def failing(client: httpx.AsyncClient) -> Sequence[httpx.Response]:
            bodies = ({"input": [token]}, {"input": "x"})
            return [await client.post(OPENAI, json=body) for body in bodies]

        failed, served = asked(new_model(SETTINGS, start), failing)

        assert (failed.status_code, served.status_code) == (503, 200)
        assert reason in message(failed)
        assert failed.headers["retry-after"]
        assert len(started) == 2


@pytest.mark.parametrize(
    ("command", "reason"), [(BROKEN, "no such model"), (EmbeddingCommand(("/nowhere/python",)), "can't be started")]
)
def test_one_that_can_not_load_is_a_503_with_its_reason(command: EmbeddingCommand, reason: str):
    response = embed(OPENAI, {"input": "x"}, replace(SETTINGS, command=command))

    assert (response.status_code, reason in message(response)) == (503, True)


def test_it_answers_a_server_with_more_than_a_thousand_connections():
    raise_descriptor_limit()
    held = [os.dup(0) for _ in range(1024)]
    try:
        response = embed(OPENAI, {"input": "x"})
    finally:
        for descriptor in held:
            os.close(descriptor)

    assert response.status_code == 200


def test_a_server_that_ends_waits_for_no_model_and_starts_none():
    with counted() as (started, start):
        model = new_model(replace(SETTINGS, command=SILENT), start)

        async def ended() -> list[object]:
            requests = [asyncio.ensure_future(model.embed(["x"])) for _ in range(2)]
            while not started:
                await asyncio.sleep(0.01)
            model.close()
            return await asyncio.gather(*requests, return_exceptions=True)

        errors = asyncio.run(ended())

        assert [isinstance(error, ApiError) and error.status for error in errors] == [503, 503]
        assert len(started) == 1


def test_it_ends_when_nobody_has_asked_for_a_while_and_starts_again():
    with counted() as (started, start):
        model = new_model(replace(SETTINGS, keep=0.01), start)

        async def twice(client: httpx.AsyncClient) -> None:
            await client.post(OPENAI, json={"input": "x"})
            while model.loaded or started[0].running:
                await asyncio.sleep(0.01)
            assert (await client.post(OPENAI, json={"input": "x"})).status_code == 200

        asked(model, twice)
        assert len(started) == 2


def test_a_client_that_leaves_leaves_the_process_to_the_next_one():
    model = new_model(SETTINGS)

    async def left() -> None:
        with closing(model):
            leaving = asyncio.ensure_future(model.embed(["x"]))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            found = await model.embed(["import os"])
            assert list(found.vectors[0]) == pytest.approx(vector(tokens("import os")), abs=1e-6)

    asyncio.run(left())


# Where it is listed ------------------------------------------------------------------------------


def test_the_lists_of_models_have_it():
    listed = get("/v1/models", embedding=SETTINGS).json()["data"]
    shown = post("/api/show", {"model": "vectors"}, embedding=SETTINGS).json()
    tagged = get("/api/tags", embedding=SETTINGS).json()["models"]

    assert [card["id"] for card in listed] == ["demo", "vectors"]
    assert [card["name"] for card in tagged] == ["demo", "vectors"]
    assert shown["capabilities"] == ["embedding"]
    assert get("/v1/models/vectors", embedding=SETTINGS).json()["id"] == "vectors"


def test_another_models_name_is_not_found_and_it_generates_nothing():
    response = embed(OPENAI, {"input": "x", "model": "demo"})

    assert response.status_code == 404
    assert "ask for vectors" in message(response)
    generated = post("/v1/completions", {"model": "vectors", "prompt": "x"}, embedding=SETTINGS)
    assert generated.status_code == 404
