"""A server for a long time with eight clients, whose conversations grow to the context's end: nothing may grow.

The conversations are few, so that each is had again and again, and each answer is known from target-only decoding.
"""

import itertools
import os
import random
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from orchestrator.api.pipeline import Pipeline
from orchestrator.lab.drill.outcome import DrillOutcome, OnStep, left_behind
from orchestrator.lab.drill.processes import (
    Sample,
    at_work,
    every,
    figures,
    growth,
    levels,
    mark,
    members,
    own_registry,
    remains,
    until,
    usages,
)
from protocol.own_modules import module_command

PROMISE = "conversations, eight clients, contexts to their end: every answer exact; memory, descriptors, threads flat"
SAMPLE_SECONDS = 5.0
_CLIENTS = 8
_CONVERSATIONS = 5
"""Not a divisor of the clients' number: a conversation is had by several clients, at different times."""
_TURN_TOKENS = 48
_LEAST_SAMPLES = 24
"""Of processes that have had so many conversations as there are clients: until then they grow, as they may."""
_WATCHED = ("server", "orchestrator", "target_worker", "draft_worker", "client")
_KEY = "a-key-for-the-drill"
_WORDS = ("items", "count", "path", "name", "value", "stack", "queue", "walk", "parse", "total", "index", "result")


_START_SECONDS, _END_SECONDS = 120.0, 15.0


@dataclass(frozen=True, slots=True)
class _Server:
    """A running `serve`."""

    port: int
    pid: int

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {_KEY}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=300)

    def healthy(self) -> bool:
        try:
            with self.client() as client:
                return client.get("/health").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


@dataclass(slots=True)
class _Conversation:
    """What one user says; `seed` and `temperature` make each answer the only right one."""

    seed: int
    temperature: float

    def said(self, turn: int) -> str:
        source = random.Random(f"{self.seed} {turn}")
        name, *arguments = source.choices(_WORDS, k=source.randint(2, 6))
        return f"\n\n\ndef {name}_{turn}({', '.join(sorted(set(arguments)))}):\n    "

    def answers(self, client: httpx.Client) -> Iterator[str]:
        """Each turn's answer, until the context has no room for a further turn. Raises httpx.HTTPError."""
        text = ""
        for turn in itertools.count():
            text += self.said(turn)
            parameters = {"temperature": self.temperature, "seed": self.seed + turn, "max_tokens": _TURN_TOKENS}
            response = client.post("/v1/completions", json={"prompt": text, **parameters})
            if response.status_code == 400 and turn:
                return
            answer = response.raise_for_status().json()["choices"][0]["text"]
            yield answer
            text += answer


@dataclass(slots=True)
class _User:
    """A client that has one conversation after the other, on a thread of its own."""

    server: _Server
    conversations: Sequence[_Conversation]
    answers: Sequence[Sequence[str]]
    """The right ones."""
    first: int
    answered: int = 0
    finished: int = 0
    """Conversations that came to the context's end."""
    failures: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with self.server.client() as client:
            for number in itertools.count(self.first):
                place = number % len(self.conversations)
                try:
                    self._have(self.conversations[place], self.answers[place], client)
                except httpx.HTTPError as error:
                    self.failures.append(f"A request failed: {error!r}.")
                if self.ended.is_set():
                    return

    def _have(self, conversation: _Conversation, right: Sequence[str], client: httpx.Client) -> None:
        turns = 0
        for turn, answer in enumerate(conversation.answers(client)):
            self.answered += 1
            turns += 1
            if turn >= len(right) or answer != right[turn]:
                self.failures.append(f"Turn {turn} of the conversation with seed {conversation.seed} has another text.")
                return
            if self.ended.is_set():
                return
        self.finished += 1
        if turns != len(right):
            self.failures.append(f"The conversation with seed {conversation.seed} ended after {turns} turns.")


def run(count: int, seed: int, on_step: OnStep) -> DrillOutcome:
    """`count` looks at all processes, one every five seconds."""
    conversations = [_Conversation(1000 * (seed + number), (0.0, 1.0)[number % 2]) for number in range(_CONVERSATIONS)]
    with own_registry():
        with _served("ar", "none") as (server, _):
            answers = _answers(server, conversations)
        with _served("adaptive", "mlx") as (server, place):
            users = [_User(server, conversations, answers, first) for first in range(_CLIENTS)]
            with at_work(users):
                samples = _watched(server, place, users, count, on_step)
            failures = [text for user in users for text in user.failures]
        failures += left_behind("at the end", remains(place))
    answered, finished = sum(user.answered for user in users), _finished(users)
    measured = f"{answered} answers, {finished} conversations to the end, {len(failures)} failures; "
    if len(samples) < _LEAST_SAMPLES:
        measured += "too short to see growth: pass --minutes 20"
    else:
        measured += levels("orchestrator", samples)
        failures += growth(_WATCHED, samples)
    measures = {"answers": answered, "conversations": finished, **figures(_WATCHED, samples)}
    return DrillOutcome(PROMISE, measured, failures, (), measures)


@contextmanager
def _served(strategy: str, engine: str) -> Iterator[tuple[_Server, str]]:
    """A server of a pipeline of its own, and that pipeline's mark."""
    with Pipeline(strategy=strategy, draft_engine=engine) as pipeline:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        options = ("--address", pipeline.address, "--api-key", _KEY, "--port", str(port))
        command = [*module_command("orchestrator.cli.app"), "serve", *options]
        # In a session of its own: Ctrl-C must reach this program only, which then ends the server.
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            server = _Server(port, process.pid)
            until(server.healthy, _START_SECONDS)
            yield server, mark(pipeline.address)
        finally:
            process.terminate()
            process.wait(_END_SECONDS)


def _answers(server: _Server, conversations: Sequence[_Conversation]) -> list[list[str]]:
    with server.client() as client:
        return [list(conversation.answers(client)) for conversation in conversations]


def _watched(server: _Server, place: str, users: Sequence[_User], count: int, on_step: OnStep) -> list[Sample]:
    """What all processes hold, from the time on at which as many conversations as users have come to their end."""
    samples: list[Sample] = []
    for _ in every(SAMPLE_SECONDS, count):
        if _finished(users) >= len(users):
            samples.append(usages({**members(place), "server": server.pid, "client": os.getpid()}))
        on_step()
    return samples


def _finished(users: Sequence[_User]) -> int:
    return sum(user.finished for user in users)
