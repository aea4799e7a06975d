"""Laws of the budget: each setting changes its own part, and what is advised fits."""

import re

import msgspec
import pytest

from orchestrator.machine.memory.budget import (
    GIB,
    MemorySettings,
    ModelNeed,
    PackageNeed,
    PipelineNeeds,
    refusal,
    usable,
)
from orchestrator.machine.memory.kv_form import KvSizes

TARGET = ModelNeed("target", 4 * GIB, KvSizes(full=32 * 1024), heads=32, quantizes=True)
DRAFT = ModelNeed("draft", GIB, KvSizes(full=4 * 1024), heads=8)
NEEDS = PipelineNeeds(models=(TARGET, DRAFT), context=131_072, on_processor=False)
ASKED = MemorySettings(context=32_768, requests=4, arenas=2 * GIB, prefix_cache=GIB // 2)


def _with(**changes: object) -> MemorySettings:
    return msgspec.structs.replace(ASKED, **changes)


def told(settings: MemorySettings, available: int, memory: int, needs: PipelineNeeds = NEEDS) -> str:
    return refusal(needs, settings, available, memory) or ""


def test_the_total_is_the_sum_of_its_parts():
    budget = NEEDS.budget(ASKED)

    assert budget.parts["the target's weights"] == 4 * GIB
    assert budget.parts["the target's KV"] == 4 * 32_768 * 32 * 1024 * 2
    assert budget.parts["the draft's KV"] == budget.parts["the target's KV"] // 8
    assert budget.caches == {"arenas": 2 * GIB, "prefix caches": GIB}
    assert budget.total_bytes == sum(budget.parts.values()) + 3 * GIB


@pytest.mark.parametrize(
    ("change", "part", "factor"),
    [
        ({"context": 16_384}, "the target's KV", 0.5),
        ({"requests": 1}, "the draft's KV", 0.25),
        ({"kv_bits": 8}, "the target's KV", 0.53125),
        ({"kv_bits": 8}, "the draft's KV", 1.0),
    ],
)
def test_each_setting_changes_its_part(change: dict[str, object], part: str, factor: float):
    assert NEEDS.budget(_with(**change)).parts[part] == factor * NEEDS.budget(ASKED).parts[part]


def test_a_prefill_worker_holds_one_prompt_and_a_draft_with_a_shorter_context_so_many_tokens():
    worker = ModelNeed("prefill worker", 0, TARGET.kv, quantizes=True, requests=1)
    prefill = msgspec.structs.replace(NEEDS, models=(TARGET, worker)).budget(ASKED)
    short = msgspec.structs.replace(NEEDS, models=(TARGET, DRAFT._replace(context=8192)))

    assert prefill.parts["the prefill worker's KV"] == prefill.parts["the target's KV"] // 4
    assert short.budget(ASKED).parts["the draft's KV"] == NEEDS.budget(ASKED).parts["the draft's KV"] // 4
    assert short.budget(_with(context=4096)) == NEEDS.budget(_with(context=4096))


def test_rows_behind_windows_wait_for_arenas_in_the_target_alone():
    windows = KvSizes(full=0, windowed=1024, window=512)
    needs = msgspec.structs.replace(NEEDS, models=(TARGET._replace(kv=windows), DRAFT._replace(kv=windows)))
    parts = needs.budget(ASKED).parts

    assert parts["the target's KV"] == 4 * windows.bytes(32_768, 2.0, windows_whole=True)
    assert parts["the draft's KV"] == 4 * windows.bytes(32_768, 2.0)


def test_a_core_ml_draft_has_a_cache_for_each_request_and_one_for_joint_calls():
    package = PackageNeed(3 * GIB, GIB // 16)
    needs = msgspec.structs.replace(NEEDS, models=(TARGET,), package=package)
    budget = needs.budget(ASKED)

    assert budget.parts["Core ML's copies of the draft"] == 3 * GIB
    assert budget.parts["the KV of the draft in Core ML"] == 5 * GIB // 16
    assert budget.caches["prefix caches"] == GIB


def test_a_processor_holds_the_scores_of_a_chunk():
    budget = msgspec.structs.replace(NEEDS, on_processor=True).budget(ASKED)

    assert budget.parts["buffers of forwards"] == 4 * 512 * 32_768 * (32 + 8)


def test_what_waits_for_the_disk_counts():
    needs = msgspec.structs.replace(NEEDS, models=(TARGET._replace(kept=True), DRAFT))
    plain, kept_on_disk = needs.budget(ASKED), needs.budget(_with(disk=True))

    assert needs.budget(_with(disk=False)) == NEEDS.budget(ASKED) == NEEDS.budget(_with(disk=True))
    assert kept_on_disk.cache_bytes - plain.cache_bytes == ASKED.arenas
    assert kept_on_disk.required_bytes - plain.required_bytes == plain.parts["the target's KV"] // ASKED.requests


def test_a_refusal_advises_no_disk_cache_where_that_suffices():
    needs = msgspec.structs.replace(NEEDS, models=(TARGET._replace(kept=True), DRAFT))
    enough = needs.budget(ASKED).required_bytes
    text = told(_with(disk=True), enough, 64 * GIB, needs)

    assert "; --disk-cache 0" in text
    assert "--disk-cache" not in (told(_with(disk=True), enough - 1, 64 * GIB, needs))


def test_the_largest_context_fits_and_one_token_more_does_not():
    for gib in (10, 16, 24):
        largest = NEEDS.largest_context(ASKED, gib * GIB)

        assert NEEDS.budget(_with(context=largest)).required_bytes <= gib * GIB
        assert NEEDS.budget(_with(context=largest + 1)).required_bytes > gib * GIB
    assert NEEDS.largest_context(ASKED, 1000 * GIB) == NEEDS.context
    assert NEEDS.largest_context(ASKED, GIB) == 0


def test_a_refusal_states_the_arithmetic_and_settings_each_of_which_fits():
    text = told(ASKED, 11 * GIB, 20 * GIB)

    assert "needs 16.0 GiB, and may use 11.0 GiB of this machine's 20.0 GiB" in text
    assert "the target's KV (4 × 32,768 tokens) 8.0 GiB, the target's weights 4.0 GiB" in text
    assert "--memory-check off" in text
    context, fewer = (int(re.search(f"--{name} (\\d+)", text)[1]) for name in ("context", "concurrent"))  # type: ignore[index]
    for remedy in (_with(context=context), _with(requests=fewer)):
        assert NEEDS.budget(remedy).required_bytes <= 11 * GIB
    assert NEEDS.budget(_with(requests=fewer + 1)).required_bytes > 11 * GIB


def test_a_refusal_advises_fewer_bits_and_no_draft_where_these_suffice():
    text = told(ASKED, 15 * GIB, 20 * GIB)

    assert "; --kv-bits 8;" in text
    assert "a smaller draft" in text


@pytest.mark.parametrize(
    ("worker", "advice"),
    [("draft", "a smaller draft, or --draft-engine none"), ("prefill worker", "--prefill-engine none")],
)
def test_the_worker_that_is_too_much_is_the_one_that_is_named(worker: str, advice: str):
    needs = msgspec.structs.replace(NEEDS, models=(TARGET, ModelNeed(worker, 4 * GIB, None)))
    text = told(ASKED, 14 * GIB, 20 * GIB, needs)

    assert f"; {advice}." in text
    assert text.count("none") == 1


def test_a_target_that_is_too_large_by_itself_is_told_so():
    text = told(ASKED, 2 * GIB, 4 * GIB)

    assert "Choose a smaller target." in text
    assert "What fits" not in text


def test_a_mac_s_working_set_goes_before_the_share_of_memory():
    assert usable(16 * GIB) == 12 * GIB
    assert usable(16 * GIB, 11 * GIB) == 11 * GIB
