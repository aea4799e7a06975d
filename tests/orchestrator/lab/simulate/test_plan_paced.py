"""What is predicted from a recorded run against the project's own paced processes. Needs two idle cores."""

import pytest

from orchestrator import Pipeline, SamplingParams
from orchestrator.api.result import Result
from orchestrator.core.options import StrategyName
from orchestrator.lab.simulate.devices import Devices, Wire, Wires
from orchestrator.lab.simulate.prediction.plan import Scenario, simulated
from orchestrator.lab.simulate.trace import read_trace
from orchestrator.machine.profiles.device_profiles import load_profile

PROMPTS = ["def quicksort(items):\n", "import os\n\n\ndef walk(folder):\n", "class Stack:\n    def push(self, item):\n"]
TOKENS = 100
STRATEGIES: list[StrategyName] = ["ar", "sd", "ssd", "adaptive"]


def paced(strategy: StrategyName, profile: str, temperature: float, record: str) -> list[Result]:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=1)
    with Pipeline(strategy=strategy, pace=profile, record=record) as pipeline:
        return [pipeline.generate(prompt, params) for prompt in PROMPTS]


def speed(results: list[Result]) -> float:
    figures = [result.statistics for result in results]
    seconds = sum(one.generated_tokens / one.tokens_per_second for one in figures)
    return sum(one.generated_tokens for one in figures) / seconds


def hop(results: list[Result]) -> float:
    """Seconds of a round that are neither forward nor waiting, as measured."""
    return sum(result.statistics.overhead_per_round for result in results) / len(results)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("profile", ["m4-16gb-qwen2.5-3b", "m4-pro-gemma3-12b-bf16"])
def test_paced_runs_are_predicted_within_five_percent(profile, temperature, tmp_path):
    path = tmp_path / "adaptive.jsonl"
    runs = {
        strategy: paced(strategy, profile, temperature, str(path) if strategy == "adaptive" else "")
        for strategy in STRATEGIES
    }
    if not all(result.statistics.pace and result.statistics.pace.valid for run in runs.values() for result in run):
        pytest.skip("this machine was too busy to keep to the device's pace")
    recorded = tuple(read_trace(path))
    ratios = {}
    for strategy, run in runs.items():
        wires = Wires(Wire(delay=hop(run) / 2), Wire(delay=hop(run) / 2))
        scenario = Scenario(
            devices=Devices.of(load_profile(profile)),
            wires=wires,
            recorded=recorded,
            temperature=temperature,
            tokens=TOKENS,
        )
        ratios[strategy] = simulated(scenario, strategy).tokens_per_second / speed(run)

    assert all(abs(ratio - 1) <= 0.05 for ratio in ratios.values()), ratios
