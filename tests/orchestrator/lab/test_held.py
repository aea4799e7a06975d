from orchestrator.lab.drill.processes import Sample, Usage, figures, growth, levels

MIB = 1 << 20


def samples(memories: list[int], descriptors: int = 9, later: int = 9) -> list[Sample]:
    half = len(memories) // 2
    return [
        {"worker": Usage(memory * MIB, later if number > half else descriptors, 3)}
        for number, memory in enumerate(memories)
    ]


def test_the_warm_up_may_grow():
    assert growth(["worker"], samples([10, 90, *[100] * 6])) == []


def test_memory_that_goes_on_growing_is_told():
    assert growth(["worker"], samples([100, 100, 200, 200, 300, 300, 400, 400])) == [
        "The memory of worker grew from 200 to 400 MiB."
    ]


def test_one_more_descriptor_is_a_request_and_two_are_a_leak():
    assert growth(["worker"], samples([100] * 8, later=10)) == []
    assert growth(["worker"], samples([100] * 8, later=11)) == ["The descriptors of worker grew from 9 to 11."]


def test_a_process_that_was_never_there_has_neither_growth_nor_figures():
    assert growth(["other"], samples([100] * 8)) == []
    assert figures(["other"], samples([100] * 8)) == {}


def test_levels_are_those_of_the_second_and_the_last_quarter():
    assert levels("worker", samples([1, 1, 20, 20, 30, 30, 40, 40])) == (
        "worker MiB / descriptors / threads 20 / 9 / 3 → 40 / 9 / 3"
    )
