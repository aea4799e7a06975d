"""Laws of inference: a chat template shows in which syntax its model writes tool calls."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.text.answer.answer_format import infer_answer_format
from orchestrator.text.answer.tool_syntax import infer_tool_syntax
from orchestrator.text.chat_template import ChatTemplate
from tests.orchestrator.text.test_answer_parsers import CALLS
from tests.support.paths import DEMO_TARGET

SHOWN = {
    **CALLS,
    "json": '<tool_call>{"name": ..., "arguments": ...}</tool_call>',
    "llama3": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
}


def template(folder: Path, shown: str, **settings: str) -> ChatTemplate:
    """That of a model with tools, which shows how calls look."""
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((DEMO_TARGET / name).read_bytes())
    source = "{% if tools %}{{ tools | tojson }}{{ calls }}{% raw %}" + shown + "{% endraw %}{% endif %}"
    (folder / "chat_template.jinja").write_text(source)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate(folder)


@pytest.mark.parametrize("name", SHOWN)
def test_the_syntax_is_the_one_that_the_template_shows(tmp_path: Path, name: str):
    syntax = infer_tool_syntax(template(tmp_path, SHOWN[name]))

    assert syntax is not None
    assert syntax.name == name


@pytest.mark.parametrize(("named", "name"), [("laguna", "glm47"), ("json_tools", "json"), ("unknown", "qwen3_coder")])
def test_the_model_s_settings_may_name_it(tmp_path: Path, named: str, name: str):
    syntax = infer_tool_syntax(template(tmp_path, CALLS["qwen3_coder"], tool_parser_type=named))

    assert syntax is not None
    assert syntax.name == name


def test_no_syntax_is_guessed(tmp_path: Path):
    assert infer_tool_syntax(template(tmp_path, "<call>")) is None
    (tmp_path / "chat_template.jinja").write_text(CALLS["gemma4"])
    assert infer_tool_syntax(ChatTemplate(tmp_path)) is None


def test_the_parsers_are_loaded_without_mlx():
    code = (
        "import sys; from orchestrator.text.answer.tool_syntax import ToolSyntax; "
        "assert ToolSyntax('minicpm5').start; assert not {'mlx', 'mlx_lm', 'transformers'} & sys.modules.keys()"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("shown", "start"),
    [
        ("<thought>{{ x }}{{ message.content.split('</thought>')[-1] }}", "<thought>"),
        ('<my:reasoning>{{ content.split( "</my:reasoning>" ) | last }}', "<my:reasoning>"),
        ("<|inner_prefix|>{{ thought }}<|inner_suffix|>", "<|inner_prefix|>"),
        ("{{ content.split('</thought>')[-1] }}", None),
        ("<answer>{{ content.split('</answer>')[0] }}", None),
    ],
)
def test_thoughts_are_known_by_the_markers_at_which_a_template_cuts(tmp_path: Path, shown: str, start: str | None):
    thought = infer_answer_format(template(tmp_path, shown)).thought

    assert (thought and thought.start) == start
