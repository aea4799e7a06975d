"""Laws of the names that people are shown: a model's own name, whatever folder holds it, and a device in words."""

import pytest

from protocol.shown_names import device_name, model_name

CACHE = "/home/me/.cache/launch-pipeline"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (f"{CACHE}/models/SmolLM2-135M-Instruct-b179c9523d0e", "SmolLM2-135M-Instruct"),
        (f"{CACHE}/drafts/SmolLM2-135M-Instruct-b179c9523d0e-draft-0123456789ab", "SmolLM2-135M-Instruct-draft"),
        (f"{CACHE}/gguf/Qwen3-4B.Q4_K_M-0123456789abcdef0123456789abcdef", "Qwen3-4B.Q4_K_M"),
        ("/Users/me/Library/Caches/launch-pipeline/converted/Llama-3.2-1B-0123456789abcdef", "Llama-3.2-1B"),
        ("/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db6499f32faf8b98477b0a26969ef7d8b9987", "Qwen2.5-0.5B"),
        ("/somewhere/target_worker/demo_model", "demo"),
        ("/models/mine-0123456789abcdef", "mine-0123456789abcdef"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("/models/tiny/", "tiny"),
        ("", ""),
    ],
)
def test_a_model_has_its_own_name(folder: str, name: str):
    assert model_name(folder) == name


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("Device(cpu, 0)", "processor"),
        ("Device(gpu, 0)", "GPU"),
        ("cpu", "processor"),
        ("gpu (Apple M4)", "GPU (Apple M4)"),
        ("cpu, by the executor: no Neural Engine", "processor, by the executor: no Neural Engine"),
        ("Core ML, Neural Engine preferred", "Core ML, Neural Engine preferred"),
        ("", ""),
    ],
)
def test_a_device_is_told_in_words(device: str, name: str):
    assert device_name(device) == name
