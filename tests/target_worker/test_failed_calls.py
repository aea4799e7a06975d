"""Laws of calls that fail though nothing is broken: where memory runs out, the sequence at work begins again or ends
and the others go on; where the GPU gives up a command, all begin again. Tokens stay the same."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.inference.tree_sequence import TreeSequence
from protocol.messages.base import RequestId
from protocol.messages.worker import Fault, Prefilled, Stop, Verdict, Verify
from protocol.worker.failed_calls import SurvivingWorker, is_shortage, passes
from tests.support.target_requests import ROOT, answers, start, target

SHORT, LONG = tuple(range(1, 41)), tuple(token % 60 for token in range(200))
MLX_ERRORS = (
    RuntimeError("[malloc] Unable to allocate 1073741824 bytes."),
    RuntimeError(
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed buffer size"
    ),
    RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBuffer...)"),
    MemoryError(),
)
GIVEN_UP = [
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout).",
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity).",
    "[METAL] Command buffer execution failed: Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
    "[METAL] Command buffer execution failed: Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
]
"""As in reports of users (ollama 17902, omlx 2029 and 3706) with the format of mlx/backend/metal/device.cpp."""
IGNORED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], None]:
    """Lets forwards fail whose sequence would have more tokens."""

    def so_many(tokens: int, error: Exception = MLX_ERRORS[0]) -> None:
        for name in ("prefill", "evaluate"):
            monkeypatch.setattr(TreeSequence, name, _failing(getattr(TreeSequence, name), tokens, error))

    return so_many


def _failing(method: Callable[..., Any], tokens: int, error: Exception) -> Callable[..., Any]:
    def call(self: TreeSequence, new: tuple[int, ...], *others: Any, **named: Any) -> Any:
        result = method(self, new, *others, **named)
        # Behind the call, as an evaluation would: rows are written by then.
        if self.committed + len(new) > tokens:
            raise error
        return result

    return call


def _worker(prefix_cache: int = 0) -> SurvivingWorker:
    return SurvivingWorker(target(chunk=32, prefix_cache=prefix_cache))


def _next_token(worker: SurvivingWorker, id: int, tokens: tuple[int, ...]) -> int:
    verify = Verify(RequestId(id), 0, ROOT, len(tokens) - 1, tokens[-1:], (-1,))
    (verdict,) = answers(worker, verify)
    assert isinstance(verdict, Verdict)
    return verdict.bonus


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", MLX_ERRORS, ids=str)
def test_a_prompt_that_is_too_large_ends_with_a_sentence_and_the_next_one_is_served(limit, error: Exception):
    expected = _worker()
    answers(expected, start(SHORT, request=2))
    limit(100, error)
    worker = _worker()

    (fault,) = answers(worker, start(LONG))
    assert isinstance(fault, Fault)
    assert (fault.kind, fault.request, fault.nodes) == ("refused", 1, None)
    assert "does not suffice for this request, with 200 tokens so far: shorten it, or start" in fault.text
    assert isinstance(answers(worker, start(SHORT, request=2))[-1], Prefilled)
    assert _next_token(worker, 2, SHORT) == _next_token(expected, 2, SHORT)


def test_other_sequences_keep_their_kv(limit):
    worker, undisturbed = _worker(), _worker()
    for each in (worker, undisturbed):
        answers(each, start(SHORT, request=2))
    limit(100)
    (fault,) = answers(worker, start(LONG))

    assert "beside 1 other:" in fault.text
    assert _next_token(worker, 2, SHORT) == _next_token(undisturbed, 2, SHORT)


def test_a_sequence_begins_again_once_where_the_prefix_cache_had_memory_to_spare(limit):
    worker = _worker(prefix_cache=1 << 24)
    answers(worker, start(SHORT, request=3))
    list(worker.handle(Stop(RequestId(3))))
    limit(100)

    assert [fault.kind for fault in answers(worker, start(LONG))] == ["lost"]
    assert [fault.kind for fault in answers(worker, start(LONG))] == ["refused"]


def test_another_error_is_no_shortage(limit):
    limit(100, RuntimeError("shapes differ"))
    worker = _worker()

    with pytest.raises(RuntimeError, match="shapes differ"):
        answers(worker, start(LONG))
    assert all(map(is_shortage, MLX_ERRORS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", GIVEN_UP)
def test_all_sequences_begin_again_at_the_same_level_where_the_gpu_gives_up(text: str, monkeypatch: pytest.MonkeyPatch):
    falling = target(chunk=32, prefix_cache=1 << 24)
    worker, expected = SurvivingWorker(falling, falling.lower), _worker()
    for each in (worker, expected):
        answers(each, start(SHORT, request=2))
    with monkeypatch.context() as patch:
        patch.setattr(TreeSequence, "prefill", _failing(TreeSequence.prefill, 100, RuntimeError(text)))
        lost = answers(worker, start(LONG))

    assert [(fault.kind, fault.request) for fault in lost] == [("lost", 1), ("lost", 2)]
    assert answers(worker, start(LONG))[-1].request == 1
    answers(worker, start(SHORT, request=2))
    assert _next_token(worker, 2, SHORT) == _next_token(expected, 2, SHORT)


def test_a_sequence_ends_at_the_third_time_in_succession(monkeypatch: pytest.MonkeyPatch):
    worker = _worker()

    def faults() -> list[str]:
        answers(worker, start(SHORT, request=2))
        with monkeypatch.context() as patch:
            patch.setattr(TreeSequence, "evaluate", _failing(TreeSequence.evaluate, 0, RuntimeError(GIVEN_UP[0])))
            return [fault.kind for fault in answers(worker, Verify(RequestId(2), 0, ROOT, 39, SHORT[-1:], (-1,)))]

    twice = [faults(), faults()]
    answers(worker, start(SHORT, request=2))
    _next_token(worker, 2, SHORT)

    assert [*twice, faults(), faults(), faults()] == [["lost"]] * 4 + [["refused"]]


def test_a_process_that_the_gpu_ignores_has_to_end():
    assert all(passes(RuntimeError(text)) for text in GIVEN_UP)
    assert not passes(RuntimeError(IGNORED))
