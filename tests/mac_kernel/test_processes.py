"""A pipeline on an imitated Mac: it starts, adopts, restarts, attaches and is killed, exactly as elsewhere."""

import json
from pathlib import Path

import pytest

from tests.support.mac_kernel.imitation import Mac

PYTEST = ("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider")
PROCESS_TESTS = (
    "tests/protocol/kv/test_arena.py",
    "tests/end_to_end/test_kv_pipeline.py::test_a_target_that_is_killed_goes_on_from_what_it_had_saved",
    "tests/end_to_end/test_kv_pipeline.py::test_corrupted_memory_costs_a_prefill_and_a_warning",
    "tests/end_to_end/test_kv_pipeline.py::test_a_prompt_may_be_read_by_another_process",
    "tests/end_to_end/test_kv_pipeline.py::test_what_a_killed_orchestrator_leaves_is_gone_at_the_next_start",
    "tests/end_to_end/test_coreml_pipeline.py::test_a_draft_that_is_killed_goes_on_without_reading_again",
    "tests/end_to_end/test_attach.py::test_a_target_of_another_machine_serves_and_its_death_is_survived",
    "tests/end_to_end/test_kills.py::test_without_its_orchestrator_a_pipeline_says_so_and_its_workers_end",
    "tests/end_to_end/test_faults_at_any_moment.py::test_no_shared_memory_leaks_when_all_who_share_it_are_killed",
)
"""What notices the kernel most, and takes half a minute; the slow test runs the rest."""
NEEDS_A_SCREEN = "tests/end_to_end/test_page_browser.py"
THREE_DAYS = """
import json, os, signal, sys
from orchestrator import Pipeline, SamplingParams
from tests.support.processes import mark, members, remains
from protocol.paths import segments_folder

prompt, params = tuple(range(1, 400)), SamplingParams(temperature=0.8, seed=4, max_tokens=24)
with Pipeline() as pipeline:
    name = mark(pipeline)
    first = pipeline.generate(prompt, params)
    print("ready", flush=True)
    sys.stdin.readline()
    os.kill(members(name)["target_worker"], signal.SIGKILL)
    again = pipeline.generate(prompt, params)
    listed = [entry.name for entry in segments_folder().glob("lp-*")]
print(json.dumps([first.tokens == again.tokens, again.statistics.adopted_tokens, listed, remains(name)]))
"""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_processes_keep_their_promises(mac: Mac):
    run = mac.run([*PYTEST, *PROCESS_TESTS])

    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.thorough
def test_a_pipeline_outlives_what_is_removed_from_the_temporary_folder(mac: Mac):
    with mac.start(["-c", THREE_DAYS]) as pipeline:
        assert pipeline.stdout is not None
        assert pipeline.stdin is not None
        assert pipeline.stdout.readline() == "ready\n"
        mac.let_days_pass(4)
        mac.clean_temporary_folder()
        output, errors = pipeline.communicate("go on\n", timeout=60)
        assert pipeline.returncode == 0, errors
    same, adopted, listed, left = json.loads(output)

    assert same
    # On a busy machine the target may not have saved all of the prompt before it was killed.
    assert adopted >= 128
    assert listed
    assert not [name for name in listed if (Path("/dev/shm") / name).exists()]
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_suite_passes(mac: Mac):
    apart = [f"--ignore={path}" for path in (NEEDS_A_SCREEN, "tests/mac_kernel")]
    run = mac.run([*PYTEST, "-n", "2", "--dist", "loadfile", *apart, "tests"])

    assert run.returncode == 0, run.stdout + run.stderr
