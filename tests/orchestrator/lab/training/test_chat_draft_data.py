"""Laws of the prompts for a chat model's draft."""

import json
import sys
from pathlib import Path

import pytest

from orchestrator.lab.training.chat_draft import prompts


def real_text(folder: Path) -> Path:
    """Packages with a little of everything that prompts are made of."""
    (folder / "docs").mkdir(parents=True)
    nouns = [f"0 04 n 01 noun{chr(97 + i // 26)}{chr(97 + i % 26)} 0 003 @ 1 n 0000 ~ 2 n 0000 ~ 3 n 0000 | thing {i}"
             for i in range(200)]  # fmt: skip
    (folder / "data.noun").write_text("\n".join(nouns))
    paragraphs = [f"Paragraph {i} tells what it is about. {'It says so in plain words. ' * 10}" for i in range(100)]
    (folder / "docs" / "guide.rst").write_text("\n\n".join(paragraphs))
    functions = [f'def function_{i}(one):\n    """Compute what number {i} is good for."""\n' + "    one += 1\n" * 20
                 for i in range(100)]  # fmt: skip
    (folder / "code.py").write_text("\n\n".join(functions))
    return folder


def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict], list[dict]]:
    """Training and held-out prompts of the text in `folder`."""
    out = folder / "out"
    monkeypatch.setattr(prompts, "MOST_TEXTS", 200)
    monkeypatch.setattr(sys, "argv", ["prompts", "--sources", str(folder), "--out", str(out), "--held-out", "3"])
    prompts.main()
    train, held_out = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "held_out")
    )
    return train, held_out


def test_prompts_are_of_every_category_and_at_most_so_many_are_held_out(tmp_path: Path, monkeypatch):
    train, held_out = made(real_text(tmp_path / "sources"), monkeypatch)

    categories = {"chat", "code", "extraction", "maths", "summary", "translation"}
    assert {prompt["category"] for prompt in train} == categories
    counts = [sum(prompt["category"] == category for prompt in held_out) for category in categories]
    assert held_out
    assert max(counts) <= 3


def test_no_text_is_both_trained_on_and_held_out(tmp_path: Path, monkeypatch):
    train, held_out = made(real_text(tmp_path / "sources"), monkeypatch)

    trained = {turn for prompt in train if prompt["category"] != "maths" for turn in prompt["turns"][:1]}
    texts = [paragraph for paragraph in prompts.paragraphs(tmp_path / "sources") if prompts.is_held_out(paragraph)]
    assert texts
    assert not any(text in turn for text in texts for turn in trained)
    assert not trained & {turn for prompt in held_out if prompt["category"] != "maths" for turn in prompt["turns"]}


def test_prompts_are_the_same_in_every_run(tmp_path: Path, monkeypatch):
    folder = real_text(tmp_path / "sources")

    assert made(folder, monkeypatch) == made(folder, monkeypatch)
