"""Laws of the division of memory among KV: nothing beyond what models leave, the target's conversation before all else.

Macs with 18 and 24 GB stand for all: what macOS recommends for their GPU, and models with the sizes that people run.
"""

import msgspec
import pytest

from orchestrator.machine.memory.budget import GIB, MemorySettings, ModelNeed, PackageNeed, PipelineNeeds, usable
from orchestrator.machine.memory.kv_form import attention_heads, kv_form
from orchestrator.machine.memory.kv_plan import KvPlan, kept_sentence, kv_plan, planned_bytes
from protocol.contracts.model_folder import stated_positions
from tests.support.models.shapes import SHAPES, WEIGHTS, configuration

MACS = {18: usable(18 * GIB, int(12.7 * GIB)), 24: usable(24 * GIB, int(17.8 * GIB)), 64: usable(64 * GIB, 48 * GIB)}
"""Bytes that a pipeline may use, by GB."""
UNASKED = MemorySettings(context=2048, requests=1)
SMALL = {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
DRAFT = ModelNeed("draft", GIB // 3, kv_form({**SMALL, "head_dim": 128}), heads=16)
"""Qwen3-0.6B, whose KV is nearly as large as that of Qwen3-8B."""


def needs(shape: str, *drafts: ModelNeed) -> PipelineNeeds:
    config = configuration(shape)
    target = ModelNeed(
        "target", int(WEIGHTS[shape] * GIB), kv_form(config), heads=attention_heads(config), quantizes=True
    )
    return PipelineNeeds(
        models=(target, *drafts),
        context=stated_positions(config) or 0,
        on_processor=False,
        processes=2 + len(drafts),
    )


def planned(shape: str, gb: int, *drafts: ModelNeed, shared: int | None = None) -> KvPlan:
    return kv_plan(needs(shape, *drafts), UNASKED, MACS[gb], concurrent=16, shared=shared)


@pytest.mark.parametrize("gb", MACS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafts", [(), (DRAFT,)], ids=["alone", "with a draft"])
def test_a_pipeline_takes_what_it_may_and_no_more(shape: str, gb: int, drafts: tuple[ModelNeed, ...]):
    pipeline = needs(shape, *drafts)
    plan = planned(shape, gb, *drafts)
    least = pipeline.budget(UNASKED).required_bytes

    assert planned_bytes(pipeline, UNASKED, plan) <= max(MACS[gb], least)
    # Of windows, memory is left for rows that wait until they are copied.
    if least <= MACS[gb] and not plan.whole and not needs(shape).models[0].kv.windowed:  # type: ignore[union-attr]
        assert planned_bytes(pipeline, UNASKED, plan) > MACS[gb] - GIB // 100


@pytest.mark.parametrize(
    ("shape", "gb", "least"),
    [
        ("qwen3-8b", 18, 48_000),
        ("qwen3-8b", 24, 75_000),
        ("gemma-3-12b", 24, 100_000),
        ("gpt-oss-20b", 24, 100_000),
        ("qwen3.8-27b", 24, 25_000),
    ],
)
def test_an_agent_s_conversation_is_kept_on_the_macs_that_people_have(shape: str, gb: int, least: int):
    assert least <= planned(shape, gb).tokens < 2 * least


def test_shared_memory_has_a_copy_only_beyond_two_conversations():
    small, large = planned("qwen3-8b", 18), planned("qwen3-8b", 64)
    two = 2 * needs("qwen3-8b").conversation("target", 32_768, UNASKED, states=2)

    assert (small.arenas, small.no_copy) == (0, "memory")
    assert large.arenas > 0
    assert large.target >= two
    assert "prompts again" in kept_sentence(small)
    assert kept_sentence(large).endswith("tokens of conversations.")


def test_a_container_with_little_shared_memory_keeps_as_much_in_the_worker():
    free, narrow = planned("qwen3-8b", 64), planned("qwen3-8b", 64, shared=32 << 20)

    assert narrow.arenas == 0
    assert narrow.target == free.target + free.arenas
    assert "--shm-size" in kept_sentence(narrow)


def test_recurrent_states_have_no_copy_and_it_is_said():
    plan = planned("qwen3.8-27b", 64)

    assert plan.arenas == 0
    assert "recurrent states" in kept_sentence(plan)


@pytest.mark.parametrize("spare", [0, GIB // 4, GIB])
def test_wherever_a_hybrid_fits_the_states_of_a_turn_and_of_the_next_one_fit(spare: int):
    """Behind the last token, where the next turn may branch off, and one that is being made."""
    pipeline = needs("qwen3.8-27b")
    least = pipeline.budget(UNASKED).required_bytes
    plan = kv_plan(pipeline, UNASKED, least + spare, concurrent=16)

    assert plan.target >= pipeline.conversation("target", 2048, UNASKED, states=3) + spare - 1


def test_draft_and_target_keep_as_many_tokens_and_the_target_s_come_first():
    roomy, narrow = planned("qwen3-8b", 64, DRAFT), planned("qwen3-8b", 18, DRAFT)
    pipeline = needs("qwen3-8b", DRAFT)
    target, draft = (pipeline.conversation(name, 32_768, UNASKED, states=2) for name in ("target", "draft"))
    short = kv_plan(pipeline, UNASKED, MACS[18] - 5 * GIB // 2, concurrent=16)

    assert roomy.target / roomy.draft == pytest.approx(target / draft, rel=0.01)
    assert narrow.tokens < roomy.tokens
    assert short.target * draft > short.draft * target


def test_the_caches_of_a_core_ml_draft_are_in_its_part():
    package = PackageNeed(GIB // 2, GIB // 8)
    pipeline = msgspec.structs.replace(needs("qwen3-8b"), package=package, processes=3)
    plan = kv_plan(pipeline, UNASKED, MACS[24], concurrent=16)

    assert plan.draft > 2 * package.cache
    assert MACS[24] - GIB // 100 < planned_bytes(pipeline, UNASKED, plan) <= MACS[24]


def test_a_draft_of_unknown_kv_keeps_some():
    unknown = kv_plan(needs("qwen3-8b", DRAFT._replace(kv=None)), UNASKED, MACS[24], concurrent=16)

    assert unknown.draft == GIB // 2
    assert unknown.target > 0


def test_what_is_stated_is_left_as_it_is():
    plan = kv_plan(needs("qwen3-8b"), UNASKED, MACS[24], concurrent=16, arenas=3 * GIB)

    assert plan.arenas == 3 * GIB
    assert plan.target == pytest.approx(
        planned("qwen3-8b", 24).target + planned("qwen3-8b", 24).arenas - 3 * GIB, abs=2
    )


def test_a_tiny_model_takes_no_more_than_it_can_use():
    tiny = ModelNeed("target", GIB // 64, kv_form({**SMALL, "head_dim": 8}), heads=16, quantizes=True)
    plan = kv_plan(
        PipelineNeeds(models=(tiny,), context=2048, on_processor=False), UNASKED, MACS[64], concurrent=16, shared=None
    )

    assert plan.whole
    assert plan.tokens == 2 * 16 * 2048


def test_a_context_that_is_asked_for_leaves_the_same_memory_for_ended_requests_once_they_have_ended():
    asked = msgspec.structs.replace(UNASKED, context=16_384, requests=2)

    assert kv_plan(needs("qwen3-8b"), asked, MACS[24], concurrent=2, arenas=0).target == pytest.approx(
        kv_plan(needs("qwen3-8b"), UNASKED, MACS[24], concurrent=2, arenas=0).target, rel=0.01
    )
