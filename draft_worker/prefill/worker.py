"""Prefills prompts for the target, with its model in another process, and offers their KV; knows no sockets."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from protocol.errors import InputError
from protocol.inference.language_model import LanguageModel
from protocol.inference.tree_sequence import TreeSequence
from protocol.kv.arena import LayerRows
from protocol.kv.arena_header import ArenaLayout
from protocol.kv.exchange import KvExchange, kv_form, shipments
from protocol.kv.segments import SegmentError
from protocol.messages.base import RequestId, plain
from protocol.messages.kv import KvOffer
from protocol.messages.remote import Shipment
from protocol.messages.worker import Fault, Hello, Prefill, Stop, ToWorker
from protocol.worker.interface import WorkerReply


class ArenaSink:
    """Writes to an arena. From the offer on, the orchestrator must unlink it."""

    def __init__(self, exchange: KvExchange, prefill: Prefill) -> None:
        self._prefill = prefill
        self._arena = exchange.create(len(prefill.tokens))

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        self._arena.write_rows(begin, keys, values)
        self._arena.commit(begin + keys[0].shape[1])
        return ()

    def finish(self, seconds: float) -> Iterable[KvOffer]:
        name, size = self._arena.name, self._arena.layout.segment_bytes
        self._arena.close()
        yield KvOffer(self._prefill.request, name, len(self._prefill.tokens), size, seconds)

    def drop(self) -> None:
        self._arena.close()
        self._arena.unlink()


class RemoteSink:
    """Sends blocks for an arena that the orchestrator creates. The last block completes it."""

    def __init__(self, prefill: Prefill) -> None:
        self._prefill = prefill

    def put(self, begin: int, keys: LayerRows, values: LayerRows) -> Iterable[Shipment]:
        return shipments(self._prefill.request, self._prefill.attempt, begin, keys, values)

    def finish(self, seconds: float) -> Iterable[KvOffer]:
        return ()

    def drop(self) -> None:
        return


KvSink: TypeAlias = ArenaSink | RemoteSink
"""Takes the rows of one prompt, in order: `put` those from token `begin` on, and `finish` when it is complete
after a prefill of `seconds`. Both return the messages to send. `drop`: its KV is no longer needed."""
OpenSink: TypeAlias = Callable[[Prefill], KvSink]
"""Raises SegmentError if there is no shared memory left."""


def layout_of(model: LanguageModel) -> ArenaLayout:
    """Raises InputError if no arena can hold the model's KV."""
    if model.layout is None:
        raise InputError(
            f"The KV of {model.folder} can't be shared, because its layers differ: use --prefill-engine none."
        )
    return model.layout


@dataclass(slots=True)
class _Prompt:
    prefill: Prefill
    rows: TreeSequence
    sink: KvSink
    seconds: float = 0.0


class PrefillWorker:
    """Prefills one prompt after the other in chunks, and handles messages between chunks."""

    def __init__(
        self,
        model: LanguageModel,
        open_sink: OpenSink,
        clock: Callable[[], float],
        chunk: int,
        fingerprint: str = "",
        tokenizer: str = "",
    ) -> None:
        """`clock`: monotonic seconds. `chunk`: most tokens of one forward. `fingerprint`: of the target's model;
        `tokenizer`: of its tokenizer. Raises InputError if no arena can hold the KV."""
        self._hello = Hello(
            role="prefill",
            engine="mlx",
            model=plain(str(model.folder)),
            architecture=model.architecture,
            vocabulary=model.vocabulary,
            context=model.context,
            tokenizer_fingerprint=tokenizer,
            device=str(mx.default_device()),
            pid=os.getpid(),
            kv=kv_form(layout_of(model)),
            model_fingerprint=fingerprint,
        )
        self._model = model
        self._open_sink = open_sink
        self._clock = clock
        self._chunk = chunk
        self._prompts: dict[RequestId, _Prompt] = {}
        self._at_work: RequestId | None = None
        """The prompt that the present call works for."""

    def hello(self) -> Hello:
        return self._hello

    def handle(self, message: ToWorker) -> Iterable[WorkerReply]:
        match message:
            case Prefill():
                self._at_work = message.request
                return self._begin(message)
            case Stop(sequence):
                self._forget(sequence)
        return ()

    @property
    def has_work(self) -> bool:
        return bool(self._prompts)

    def work(self) -> Iterator[WorkerReply]:
        """Evaluate one chunk of the oldest prompt; offer its KV when the prompt is complete."""
        prompt = next(iter(self._prompts.values()))
        self._at_work = prompt.prefill.request
        began = self._clock()
        begin = prompt.rows.committed
        prompt.rows.prefill(prompt.prefill.tokens[begin : begin + self._chunk])
        yield from prompt.sink.put(begin, *prompt.rows.export(begin, prompt.rows.committed))
        prompt.seconds += self._clock() - began
        if prompt.rows.committed == len(prompt.prefill.tokens):
            del self._prompts[prompt.prefill.request]
            yield from prompt.sink.finish(prompt.seconds)

    def run_short(self) -> Iterator[Fault]:
        """Give up the prompt at work: the target prefills it."""
        id, self._at_work = self._at_work, None
        if id is None:
            return
        self._forget(id)
        gc.collect()
        yield Fault("refused", "The prefill worker's memory does not suffice for this prompt.", id)

    def run_interrupted(self) -> Iterator[Fault]:
        """Give up all prompts: the target prefills them."""
        for id in list(self._prompts):
            self._forget(id)
            yield Fault("refused", "The GPU gave up a command of the prefill worker.", id)

    def _begin(self, prefill: Prefill) -> Iterator[WorkerReply]:
        held = self._prompts.get(prefill.request)
        if held is not None and held.prefill == prefill:
            return
        self._forget(prefill.request)
        if len(prefill.tokens) > self._model.context or max(prefill.tokens) >= self._model.vocabulary:
            yield Fault("refused", "The prompt exceeds the prefill engine's context or vocabulary.", prefill.request)
            return
        try:
            sink = self._open_sink(prefill)
        except SegmentError as error:
            yield Fault("refused", plain(str(error)), prefill.request)
            return
        with ExitStack() as undone:
            undone.callback(sink.drop)
            self._prompts[prefill.request] = _Prompt(prefill, self._model.sequence(), sink)
            undone.pop_all()

    def _forget(self, sequence: RequestId) -> None:
        prompt = self._prompts.pop(sequence, None)
        if prompt is not None:
            prompt.sink.drop()
