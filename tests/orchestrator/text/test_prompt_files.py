"""Prompts for a training, from files to tokens."""

import json
from pathlib import Path

import pytest

from orchestrator.text.chat_template import ChatTemplate
from orchestrator.text.prompt_files import write_prompts
from orchestrator.text.tokenizer import TextCodec
from protocol.errors import InputError
from tests.support.models.tokenizer_files import END, write_tokenizer

_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(settings | {"chat_template": _TEMPLATE}))
    return tmp_path


def _written(target: Path, *files: Path) -> list[list[list[int]]]:
    out = target / "work" / "prompts.jsonl"
    write_prompts(files, target, out)
    return [json.loads(line) for line in out.read_text().splitlines()]


def _file(target: Path, name: str, text: str) -> Path:
    (target / name).write_text(text)
    return target / name


def test_turns_have_the_target_s_template_around_the_answers_to_come(target: Path):
    file = _file(target, "chats.jsonl", '{"turns": ["ab", "cd"], "category": "any"}\n\n{"turns": ["ef"]}\n')

    first, second = _written(target, file)

    codec, template = TextCodec(target), ChatTemplate(target)
    assert first[0] == template.tokens([{"role": "user", "content": "ab"}])
    assert first[1] == codec.encode("[end][user]cd[end][assistant]", special=False)
    assert len(second) == 1


def test_prompts_that_are_too_long_are_counted(target: Path):
    file = _file(target, "chats.jsonl", json.dumps({"prompt": "abc " * 300}) + '\n{"prompt": "ab"}\n')

    written = write_prompts([file], target, target / "prompts.jsonl")

    assert (written.kept, written.left_out) == (1, 1)


def test_answers_end_where_the_target_s_own_do(target: Path):
    settings = {"chat_template": _TEMPLATE.replace("[end]", "<end>")}
    _file(target, "tokenizer_config.json", json.dumps(settings))
    _file(target, "config.json", json.dumps({"eos_token_id": 5}))
    prompts = _file(target, "chats.jsonl", '{"turns": ["ab"]}\n')

    assert write_prompts([prompts], target, target / "prompts.jsonl").ends == (5, END)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "line 1: .*one object a line"),
        ('{"turns": []}', "line 1"),
        ('{"turns": ["a"]}\n{"id": 3}', "line 2 needs"),
    ],
)
def test_a_wrong_line_is_named(target: Path, text: str, words: str):
    with pytest.raises(InputError, match=words):
        _written(target, _file(target, "chats.jsonl", text))


def test_a_missing_file_is_named(target: Path):
    with pytest.raises(InputError, match=r"none\.jsonl can't be read"):
        _written(target, target / "none.jsonl")
