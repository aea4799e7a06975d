"""Laws of the table of models: no more memory than there is, no model unloaded under a request, all get an answer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.http.model_table import (
    Admit,
    Command,
    Load,
    ModelEntry,
    ModelName,
    ModelPhase,
    ModelTable,
    Refuse,
    Ticket,
    Unload,
)

A, B, C = map(ModelName, "ABC")
PAUSE = 30.0


class Shell:
    """Performs nothing by itself: loads and unloads end when the test says so."""

    def __init__(self, *entries: ModelEntry, room: int = 10, keep: float | None = 60.0, most_waiting: int = 8) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.room = room
        self.table = ModelTable(entries, room=room, keep=keep, most_waiting=most_waiting, pause=PAUSE)
        self.now = 0.0
        self.loading: list[ModelName] = []
        self.loaded: list[ModelName] = []
        self.unloading: list[ModelName] = []
        self.dead: set[ModelName] = set()
        """Loaded, and their pipelines have ended by themselves."""
        self.open: dict[Ticket, ModelName] = {}
        self.running: dict[Ticket, ModelName] = {}
        self.refused: dict[Ticket, Refuse] = {}
        self.asked: list[ModelName] = []
        """By ticket."""
        self.admitted: list[Ticket] = []
        self.step(self.table.start(self.now))

    def step(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            self.perform(command)
        assert self.bytes <= self.room
        assert self.table.waiting == len(self.open) - len(self.running)
        return commands

    def perform(self, command: Command) -> None:
        match command:
            case Load(model):
                assert model not in (*self.loading, *self.loaded, *self.unloading)
                self.loading.append(model)
            case Unload(model):
                assert model in self.dead or model not in self.running.values()
                self.dead.discard(model)
                self.loaded.remove(model)
                self.unloading.append(model)
            case Admit(ticket):
                assert self.open[ticket] in self.loaded
                assert ticket not in self.running
                self.running[ticket] = self.open[ticket]
                self.admitted.append(ticket)
            case Refuse(ticket):
                assert ticket not in self.running
                del self.open[ticket]
                self.refused[ticket] = command

    @property
    def bytes(self) -> int:
        return sum(self.entries[name].bytes for name in (*self.loading, *self.loaded, *self.unloading))

    def ask(self, model: ModelName) -> Ticket:
        ticket = Ticket(len(self.asked))
        self.asked.append(model)
        self.open[ticket] = model
        self.step(self.table.request(ticket, model, self.now))
        return ticket

    def serve(self, model: ModelName) -> Ticket:
        """Ask for it and load it."""
        ticket = self.ask(model)
        self.finish_load(model)
        return ticket

    def swap(self, model: ModelName, other: ModelName) -> None:
        self.finish_unload(model)
        self.finish_load(other)

    def release(self, ticket: Ticket) -> None:
        self.running.pop(ticket, None)
        self.open.pop(ticket, None)
        self.step(self.table.release(ticket, self.now))

    def finish_load(self, model: ModelName) -> None:
        self.loading.remove(model)
        self.loaded.append(model)
        self.step(self.table.loaded(model, self.now))

    def fail(self, model: ModelName) -> None:
        self.loading.remove(model)
        self.step(self.table.failed(model, "no such file", self.now))

    def end(self, model: ModelName) -> None:
        self.dead.add(model)
        self.step(self.table.ended(model, "killed", self.now))

    def finish_unload(self, model: ModelName) -> None:
        self.unloading.remove(model)
        self.step(self.table.unloaded(model, self.now))

    def keep(self, model: ModelName, seconds: float | None) -> None:
        self.step(self.table.keep(model, seconds, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step(self.table.tick(self.now))


def entry(name: ModelName, size: int = 6, *, pinned: bool = False) -> ModelEntry:
    return ModelEntry(name, size, pinned)


def test_the_least_recently_used_idle_model_goes_for_another():
    shell = Shell(entry(A, 5), entry(B, 5), entry(C, 5))
    for model in (A, B):
        shell.serve(model)
        shell.now += 1
    shell.release(shell.admitted[1])
    shell.now += 1
    shell.release(shell.admitted[0])

    shell.ask(C)
    assert (shell.unloading, shell.loading) == ([B], [])
    shell.finish_unload(B)

    assert (shell.loaded, shell.loading) == ([A], [C])


def test_a_busy_model_ends_its_requests_first_and_admits_no_later_ones():
    shell = Shell(entry(A), entry(B))
    running = shell.serve(A)

    early, late = shell.ask(B), shell.ask(A)
    assert (shell.admitted, shell.unloading) == ([running], [])
    shell.release(running)
    shell.swap(A, B)
    shell.release(early)
    shell.swap(B, A)

    assert shell.admitted == [running, early, late]


def test_a_model_that_was_loaded_serves_all_who_waited_before_it_goes_again():
    shell = Shell(entry(A), entry(B))

    for model in (A, B, A):
        shell.ask(model)
    shell.finish_load(A)

    assert (shell.admitted, shell.unloading) == ([0, 2], [])


def test_who_waited_behind_a_client_that_has_gone_is_admitted():
    shell = Shell(entry(A), entry(B))
    shell.serve(A)

    gone, late = shell.ask(B), shell.ask(A)
    shell.release(gone)

    assert (shell.admitted[-1], shell.unloading) == (late, [])


def test_steady_requests_for_two_models_do_not_keep_a_third_waiting():
    shell = Shell(entry(A, 5), entry(B, 5), entry(C, 5), most_waiting=100)
    for model in (A, B):
        shell.serve(model)
        shell.ask(model)
        shell.now += 1

    shell.ask(C)
    for _ in range(3):
        # One request of each model comes, and one ends while another still runs.
        for model in (A, B):
            shell.ask(model)
            shell.now += 1
            shell.release(next(ticket for ticket, name in shell.running.items() if name == model))
        if shell.unloading:
            break

    assert shell.unloading == [A]


def test_an_idle_model_is_unloaded_after_its_time_and_a_pinned_one_is_not():
    shell = Shell(entry(A, 3, pinned=True), entry(B, 3), keep=60.0)
    shell.finish_load(A)
    ticket = shell.serve(B)
    shell.wait(100)
    shell.release(ticket)

    assert shell.table.deadline == 160
    shell.wait(59)
    assert shell.unloading == []
    shell.wait(1)
    assert (shell.loaded, shell.unloading) == ([A], [B])


def test_what_a_request_said_holds_until_the_model_is_unloaded():
    shell = Shell(entry(A), keep=60.0)
    shell.keep(A, 0.0)
    ticket = shell.serve(A)
    shell.release(ticket)
    assert shell.table.deadline == 60
    for seconds in (None, 0.0):
        ticket = shell.ask(A)
        shell.keep(A, seconds)
        shell.release(ticket)
        assert shell.table.deadline is None
    shell.finish_unload(A)

    shell.serve(A)
    shell.release(shell.admitted[-1])

    assert shell.table.deadline == 60


def test_a_model_that_can_never_fit_is_refused_with_the_arithmetic():
    large = ModelEntry(B, 7 << 30, kv_for="1 × 2,048 tokens")
    shell = Shell(entry(A, 4 << 30, pinned=True), large, room=10 << 30)

    refusal = shell.refused[shell.ask(B)]

    assert refusal.cause == "too_large"
    assert "needs 7.0 GiB with KV of 1 × 2,048 tokens, and 6.0 GiB are left" in refusal.reason
    assert shell.loading == [A]


def test_beyond_the_bound_of_waiting_requests_one_is_refused_unless_its_model_is_there():
    shell = Shell(entry(A, 5), entry(B, 5), most_waiting=2)
    shell.serve(A)

    refused = [shell.refused.get(shell.ask(B)) for _ in range(3)]
    shell.ask(A)

    assert [one and one.cause for one in refused] == [None, None, "full"]
    assert shell.refused[Ticket(3)].retry > 0
    assert shell.table.models[A].running == {0, 4}


def test_a_model_that_fails_refuses_who_waits_and_is_tried_again_after_a_pause():
    shell = Shell(entry(A, 5), entry(B, 5))
    first, other = shell.ask(A), shell.ask(B)
    shell.fail(A)
    shell.wait(10)
    early = shell.ask(A)
    shell.wait(PAUSE)
    shell.ask(A)
    shell.finish_load(B)

    assert [shell.refused[ticket].reason for ticket in (first, early)] == ["no such file"] * 2
    assert [shell.refused[ticket].retry for ticket in (first, early)] == [PAUSE, PAUSE - 10]
    assert (shell.loading, shell.admitted) == ([A], [other])


def test_a_pipeline_that_ends_by_itself_is_unloaded_and_waits_before_it_is_loaded_again():
    shell = Shell(entry(A), entry(B))
    running = shell.serve(A)
    shell.end(A)
    early, other = shell.ask(A), shell.ask(B)
    assert (shell.unloading, shell.loading, shell.refused[early].reason) == ([A], [], "killed")
    shell.swap(A, B)
    shell.release(running)
    shell.release(other)

    shell.wait(PAUSE)
    shell.ask(A)
    shell.finish_unload(B)

    assert shell.loading == [A]


ACTIONS = st.tuples(
    st.sampled_from(["ask", "ask", "release", "load", "fail", "end", "unload", "wait", "keep"]), st.integers(0, 7)
)
SIZES = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=5)


@settings(deadline=None)
@given(SIZES, st.lists(ACTIONS, max_size=60), st.sampled_from([None, 0.0, 5.0]), st.integers(1, 6))
def test_memory_is_never_exceeded_and_every_request_is_answered(
    sizes: list[tuple[int, bool]], actions: Iterable[tuple[str, int]], keep: float | None, most_waiting: int
):
    room, entries = 12, []
    for index, (size, pinned) in enumerate(sizes):
        # Pinned models must fit together.
        fits = sum(each.bytes for each in entries if each.pinned) + size <= room
        entries.append(ModelEntry(ModelName(f"m{index}"), size, pinned and fits))
    shell = Shell(*entries, room=room, keep=keep, most_waiting=most_waiting)
    for action, number in actions:
        act(shell, action, number)
        assert shell.table.waiting <= most_waiting

    for _ in range(1000):
        if not (shell.open or shell.loading or shell.unloading):
            break
        for ticket in list(shell.running):
            shell.release(ticket)
        for model in list(shell.unloading):
            shell.finish_unload(model)
        for model in list(shell.loading):
            shell.finish_load(model)

    assert not shell.open
    of_models = [[ticket for ticket in shell.admitted if shell.asked[ticket] == name] for name in shell.entries]
    assert of_models == [sorted(tickets) for tickets in of_models]
    phases = {name for name, status in shell.table.models.items() if status.phase is ModelPhase.LOADED}
    assert phases == set(shell.loaded)


def act(shell: Shell, action: str, number: int) -> None:
    names = list(shell.entries)
    acts: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "ask": (shell.ask, names),
        "release": (shell.release, list(shell.open)),
        "load": (shell.finish_load, shell.loading),
        "fail": (shell.fail, shell.loading),
        "end": (shell.end, shell.loaded),
        "unload": (shell.finish_unload, shell.unloading),
        "wait": (shell.wait, range(8)),
        "keep": (lambda name: shell.keep(name, float(number) if number else None), names),
    }
    act, choices = acts[action]
    shell.now += 1
    if choices:
        act(choices[number % len(choices)])
