"""The draft on a converted model, end to end: the target's tokens, MLX's acceptance, and a life after death."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from draft_worker.coreml.converted import Converted
from draft_worker.coreml.runtime.backends.runtimes import ExecutorRuntime
from draft_worker.engine import Engine
from draft_worker.engines.coreml import CoreMlEngine
from draft_worker.engines.mlx import MlxEngine
from draft_worker.worker import DraftWorker
from orchestrator import Pipeline, PipelineError, SamplingParams
from orchestrator.core.events import Arrived
from orchestrator.runtime.recording import replay
from orchestrator.text.tokenizer import TextCodec
from protocol.kv.arena import Arena
from protocol.kv.arena_header import ArenaError
from protocol.kv.segments import SegmentError
from protocol.messages.base import NodeId, SequenceId
from protocol.messages.plans import BestFirst
from protocol.messages.sampling import Sampling
from protocol.messages.worker import Grow, Prefilled, Reroot, Start
from protocol.paths import segments_folder
from protocol.speculation.token_tree import TokenTree, node_id
from tests.conftest import Reference
from tests.support.models.coreml_programs import DEMO_CONTEXT, converted_demo
from tests.support.paths import DEMO_DRAFT
from tests.support.processes import mark, members, remains, until

TEXTS = (
    "def quicksort(items):",
    "import os\nimport sys\n\n",
    "class Stack:\n    def push(self, item):\n",
    "for i in range(10):\n    print(",
)
CODEC = TextCodec(DEMO_DRAFT)
ONE, ROOT = SequenceId(1), NodeId(7)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(draft=str(converted_demo()), draft_engine="coreml") as pipeline:
        name = mark(pipeline)
        yield pipeline
    assert remains(name) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_targets_own(pipeline: Pipeline, reference: Reference, temperature: float):
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=120)
    results = [pipeline.generate(text, params) for text in TEXTS[:2]]

    assert [result.tokens for result in results] == [reference(text, params).tokens for text in TEXTS[:2]]
    # The target decodes alone until the draft is up, and on a busy machine both texts may be over before.
    if not any(result.statistics.draft_busy for result in results):
        assert until(lambda: pipeline.generate(TEXTS[0], params).statistics.draft_busy)


def shared_steps(journal: Path) -> int:
    """Growth steps that grew several requests' trees."""
    said = [event.message for event, _ in replay(journal) if isinstance(event, Arrived) and event.role == "draft"]
    return sum(isinstance(message, Grow) and message.forward_nodes > 0 for message in said)


@pytest.mark.thorough
def test_requests_at_the_same_time_share_calls_and_get_the_targets_own_tokens(tmp_path: Path, reference: Reference):
    journal, params = tmp_path / "journal", SamplingParams(temperature=0.7, seed=2, max_tokens=60)
    own = [reference(text, params).tokens for text in TEXTS]
    with Pipeline(draft=str(converted_demo()), draft_engine="coreml", record=str(journal)) as pipeline:

        def shared() -> bool:
            assert [result.tokens for result in pipeline.generate(list(TEXTS), params)] == own
            return shared_steps(journal) > 0

        # The target decodes alone until the draft is up.
        assert until(shared)


# Step by step, so that timing does not matter ------------------------------------------------------


class Rates(NamedTuple):
    accepted: float
    """Share of tried tokens."""
    hits: float
    """Share of verdicts whose root had children already."""


def rates(engine: Engine, texts: dict[tuple[int, ...], tuple[int, ...]], sampling: Sampling) -> Rates:
    """What a target that says these continuations of prompts makes of the draft: it verifies what two growth
    steps have found, two deep, and meanwhile the draft makes two more."""
    accepted = tried = hits = rounds = 0
    for prompt, continuation in texts.items():
        worker = DraftWorker(engine, lambda: 0.0)
        list(worker.handle(Start(ONE, 0, prompt, ROOT, sampling, BestFirst(8, 4))))
        tree, said, round = TokenTree(ROOT, prompt[-1], len(prompt) - 1), list(continuation), 0
        while len(said) > 5:
            grow(worker, tree, 2)
            path = 0
            node = tree.root
            while path < 2 and node.children:
                tried += 1
                if said[path] not in node.children:
                    break
                node = node.children[said[path]]
                path += 1
            accepted += path
            grow(worker, tree, 2)
            tokens, position, root, round = said[: path + 1], tree.root.depth, tree.root.id, round + 1
            for token in tokens:
                root = node_id(root, token)
            tree.advance(tokens)
            hits += bool(tree.root.children)
            rounds += 1
            del said[: path + 1]
            list(worker.handle(Reroot(ONE, round, position, tuple(tokens), root, False)))
    return Rates(accepted / tried, hits / rounds)


def grow(worker: DraftWorker, tree: TokenTree, steps: int) -> None:
    while worker.has_work and steps > 0:
        for reply in worker.work():
            if isinstance(reply, Grow):
                steps -= 1
                for parent, token, probability in zip(reply.parents, reply.tokens, reply.probabilities, strict=True):
                    above = tree.get(parent)
                    if above is not None:
                        tree.add(above, token, probability)


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_acceptance_and_hits_are_those_of_the_mlx_draft(reference: Reference, temperature: float):
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=64)
    texts = {tuple(CODEC.encode(text)): tuple(reference(text, params).tokens) for text in TEXTS[:2]}
    sampling = Sampling(temperature=temperature, seed=4)

    package = Converted.open(converted_demo())
    converted = rates(CoreMlEngine(package, ExecutorRuntime(package)), texts, sampling)
    mlx = rates(MlxEngine.load(DEMO_DRAFT), texts, sampling)

    assert converted.accepted == pytest.approx(mlx.accepted, abs=0.02)
    assert converted.hits == pytest.approx(mlx.hits, abs=0.02)
    assert mlx.accepted > 0.3
    assert mlx.hits > 0.3


# A life after death --------------------------------------------------------------------------------


def saved_by_the_draft(name: str) -> int:
    """The most tokens that an arena of this pipeline's draft holds: of as many slots as the converted model."""
    owner, most = members(name)["orchestrator"], 0
    for entry in segments_folder().glob("lp-*"):
        with suppress(ArenaError, SegmentError, OSError):
            arena = Arena.attach(entry.name)
            if json.loads(entry.read_bytes())["pid"] == owner and arena.layout.capacity == DEMO_CONTEXT:
                most = max(most, arena.committed)
    return most


def resumptions(journal: Path) -> list[Prefilled]:
    """What drafts that had adopted KV have reported so far."""
    said = [event.message for event, _ in replay(journal) if isinstance(event, Arrived) and event.role == "draft"]
    return [message for message in said if isinstance(message, Prefilled)]


@pytest.mark.thorough
def test_a_draft_that_is_killed_goes_on_without_reading_again(tmp_path: Path, reference: Reference):
    journal, prompt = tmp_path / "journal", tuple(CODEC.encode(Path(__file__).read_text()))[:200]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=120)
    with Pipeline(draft=str(converted_demo()), draft_engine="coreml", record=str(journal)) as pipeline:
        name = mark(pipeline)
        with pipeline.stream(prompt, params) as stream:
            for count, _ in enumerate(stream):
                if count == 0:
                    # The target waits, so that the request is not over before the next draft has resumed it.
                    os.kill(target := members(name)["target_worker"], signal.SIGSTOP)
                    until(lambda: saved_by_the_draft(name) >= 199)
                    os.kill(members(name)["draft_worker"], signal.SIGKILL)
                    until(lambda: resumptions(journal))
                    os.kill(target, signal.SIGCONT)
            assert stream.result is not None
    (resumed,) = resumptions(journal)

    assert stream.result.tokens == reference(prompt, params).tokens
    assert resumed.warning == ""
    assert resumed.adopted >= 199
    assert remains(name) == []


# First use, and bad input --------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_model_is_converted_on_its_first_use_and_found_on_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    stages: list[str] = []
    params = SamplingParams(max_tokens=8)
    with Pipeline(draft_engine="coreml", on_progress=lambda progress: stages.append(progress.stage)) as pipeline:
        assert pipeline.generate(TEXTS[0], params).tokens == reference(TEXTS[0], params).tokens
    assert stages
    made = list(stages)
    again = Pipeline(draft_engine="coreml", on_progress=lambda progress: stages.append(progress.stage))

    assert stages == made
    assert again.note == ""


@pytest.mark.thorough
def test_a_package_without_its_weights_is_refused_before_anything_starts(tmp_path: Path):
    folder = copied(tmp_path)
    weights = folder / "model.mlpackage" / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
    weights.write_bytes(weights.read_bytes()[:1000])

    with pytest.raises(PipelineError, match=r"weight.bin is truncated\): convert the model again\.$"):
        Pipeline(draft=str(folder), draft_engine="coreml").start()


def test_a_folder_that_lacks_a_part_is_refused(tmp_path: Path):
    folder = copied(tmp_path)
    (folder / "tokenizer.json").unlink()

    with pytest.raises(PipelineError, match=r"lacks tokenizer.json: convert the model again"):
        Pipeline(draft=str(folder), draft_engine="coreml")


@pytest.mark.thorough
def test_the_command_line_drafts_by_the_executor(reference: Reference):
    command = ["-m", "orchestrator.cli.app", "generate", TEXTS[0], "--max-tokens", "16", "--quiet"]
    engine = ["--draft-engine", "coreml", "--draft", str(converted_demo())]
    out = subprocess.run([sys.executable, *command, *engine], capture_output=True, text=True, check=True)

    assert out.stdout == reference(TEXTS[0], SamplingParams(max_tokens=16)).text + "\n"
    assert out.stderr == ""


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(converted_demo(), folder / "copy"))
