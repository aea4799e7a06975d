"""A target divided among ranks says what the whole one says, whatever happens to a rank. Real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from orchestrator import Pipeline, Result, SamplingParams
from tests.conftest import Reference
from tests.support.processes import free_ports, generate_while, inject, mark, running, until

PROMPT = "def quicksort(items):"
SETTINGS = [SamplingParams(max_tokens=64), SamplingParams(temperature=1.0, seed=5, max_tokens=64)]
_SILENCE = 3.0
ONCE_SHORT = """
import pathlib
from protocol.inference.tree_sequence import TreeSequence

def evaluate(self, tokens, *others, real=TreeSequence.evaluate, marker=pathlib.Path("{marker}")):
    if self.committed > 20 and not marker.exists():
        marker.touch()
        raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
    return real(self, tokens, *others)

TreeSequence.evaluate = evaluate
"""
"""A rank whose memory runs out in the first life of its process."""
_CLI = f"{sys.executable} -m orchestrator.cli.app"


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A hosts file of two ranks on this machine."""
    path = tmp_path / "hosts.json"
    addresses = [[f"127.0.0.1:{port}"] for port in free_ports(2)]
    path.write_text(json.dumps({"hosts": addresses, "silence": _SILENCE}))
    return path


@pytest.fixture
def pipeline(hosts: Path) -> Iterator[Pipeline]:
    """A divided pipeline of the test's own; none of its ranks is left."""
    with Pipeline(target_hosts=str(hosts)) as pipeline:
        yield pipeline
    until(lambda: not ranks(hosts))


def ranks(hosts: Path) -> dict[int, int]:
    """Process ids of the live target ranks of a hosts file."""
    mine = [each for each in running() if json.loads(hosts.read_text())["hosts"][0][0] in each[2]]
    programs = {"-m target_worker {": 0, "-m target_worker.tensor_parallel.rank_process {": 1}
    return {rank: pid for program, rank in programs.items() for pid, _, command in mine if program in command}


@pytest.mark.thorough
def test_a_divided_target_says_what_the_whole_one_says_and_survives_its_ranks(
    pipeline: Pipeline, hosts: Path, reference: Reference
):
    def answer(params: SamplingParams) -> Result:
        return pipeline.generate(PROMPT, params)

    with ThreadPoolExecutor() as threads:
        results = list(threads.map(answer, SETTINGS))
    assert [result.tokens for result in results] == [reference(PROMPT, params).tokens for params in SETTINGS]
    assert any(result.statistics.hit_rate for result in results), "drafts work with a divided target"

    asked = tuple(range(1, 120))
    answered = (*asked, *pipeline.generate(asked, SETTINGS[1]).tokens, 7, 8)
    for turn in (answered, (*answered[:170], 9)):
        result = pipeline.generate(turn, SETTINGS[1])
        assert result.tokens == reference(turn, SETTINGS[1]).tokens
        assert result.statistics.adopted_tokens >= 99, "all ranks go on with what they have"

    for rank in (1, 0):
        before = until(lambda: found if len(found := ranks(hosts)) == 2 else None)
        result = generate_while(pipeline, PROMPT, SETTINGS[1], 3, partial(os.kill, before[rank], signal.SIGKILL))
        assert result.tokens == reference(PROMPT, SETTINGS[1]).tokens, rank
        assert set(before.values()).isdisjoint(ranks(hosts).values()), "all ranks start anew"


@pytest.mark.thorough
def test_a_stopped_rank_is_replaced_in_the_midst_of_a_request(pipeline: Pipeline, hosts: Path, reference: Reference):
    stopped = ranks(hosts)[1]
    result = generate_while(pipeline, PROMPT, SETTINGS[0], 2, partial(os.kill, stopped, signal.SIGSTOP))

    assert result.tokens == reference(PROMPT, SETTINGS[0]).tokens
    assert stopped not in ranks(hosts).values()


@pytest.mark.thorough
def test_a_rank_that_can_not_serve_says_why(hosts: Path):
    command = [*_CLI.split(), "target-rank", "--hosts", str(hosts), "--rank", "1"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=110)

    assert out.returncode == 2
    assert "A rank of this machine is started by rank 0" in out.stderr
    assert out.stderr.endswith("Rank 1 can't serve: see the reason above.\n")


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_ends_with_a_sentence_and_all_start_anew(
    rank: int, hosts: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = ("target_worker", "target_worker.tensor_parallel.rank_process")[rank]
    inject(monkeypatch, tmp_path, module, ONCE_SHORT.format(marker=tmp_path / "was-short"))
    with Pipeline(target_hosts=str(hosts)) as pipeline:
        before = until(lambda: found if len(found := ranks(hosts)) == 2 else None)
        result = pipeline.generate(PROMPT, SETTINGS[0])
        told = (Path(mark(pipeline)) / "orchestrator.log").read_text()

        assert result.tokens == reference(PROMPT, SETTINGS[0]).tokens
        assert set(before.values()).isdisjoint(ranks(hosts).values()), "all ranks start anew"
        assert f"Rank {rank} of 2 ran out of memory: it held" in told, told
    until(lambda: not ranks(hosts))


@pytest.mark.slow
def test_each_rank_quantizes_its_heads(tmp_path: Path):
    """The ranks' sums round otherwise than the whole target's products, so a divided target is its own reference."""
    file, tokens = tmp_path / "hosts.json", []
    for strategy in ("ar", "adaptive"):
        file.write_text(json.dumps({"hosts": [[f"127.0.0.1:{port}"] for port in free_ports(2)]}))
        with Pipeline(target_hosts=str(file), strategy=strategy, kv_bits=4) as pipeline:
            tokens.append(pipeline.generate(PROMPT, SETTINGS[1]).tokens)

    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_a_rank_on_a_host_of_its_own_serves_one_pipeline_after_another(hosts: Path, reference: Reference):
    """Two addresses of a network namespace of the test's own stand in for two hosts."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this system has no network namespaces for its users")
    hosts.write_text(json.dumps({"hosts": [["10.77.0.1:5711"], ["10.77.0.2:5711"]], "key": "k" * 32}))
    hosts.chmod(0o600)
    script = f"""
ip link set lo up && ip addr add 10.77.0.1/32 dev lo && ip addr add 10.77.0.2/32 dev lo || exit 1
{_CLI} target-rank --hosts {hosts} --rank 1 & rank=$!
for run in 1 2; do {_CLI} generate '{PROMPT}' --target-hosts {hosts} --max-tokens 32 --json || exit 1; done
kill -TERM $rank; wait $rank; test $? = 130
"""
    out = subprocess.run(["unshare", "-rn", "sh", "-c", script], capture_output=True, text=True, timeout=110)

    assert out.returncode == 0, out.stderr
    expected = reference(PROMPT, SamplingParams(max_tokens=32)).tokens
    assert [tuple(json.loads(line)["tokens"]) for line in out.stdout.splitlines()] == [expected, expected]
    assert out.stderr.count("Rank 1: at work.") == 2
