"""Laws of `generate` with a target that has a chat template: it answers a message, or continues a text with --raw."""

import json
import shutil
from pathlib import Path

import pytest

from orchestrator import Pipeline, SamplingParams
from protocol.errors import InputError
from tests.conftest import Reference
from tests.orchestrator.cli.test_cli import run
from tests.support.paths import DEMO_TARGET

PROMPT = "import os"
TEMPLATE = "# Question\n{{ messages[0]['content'] }}\n# Answer\n"
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo target with a chat template."""
    folder = tmp_path_factory.mktemp("instruct") / "model"
    shutil.copytree(DEMO_TARGET, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def asked(instruct: str, *options: str) -> tuple[dict[str, object], str]:
    """The answer as JSON, and what stderr says without --json."""
    arguments = ("generate", PROMPT, "--target", instruct, "--max-tokens", "8", "--temperature", "0", *options)
    code, output, _ = run(*arguments, "--json")
    assert code == 0
    return json.loads(output), run(*arguments)[2]


@pytest.mark.thorough
def test_a_bare_prompt_is_a_chat_message(instruct: str, reference: Reference):
    answer, told = asked(instruct)

    assert answer["tokens"] == list(reference(f"# Question\n{PROMPT}\n# Answer", PARAMS).tokens)
    assert answer["chat"] is True
    assert "The prompt is a chat message" in told


@pytest.mark.thorough
def test_raw_continues_the_prompt(instruct: str, reference: Reference):
    answer, told = asked(instruct, "--raw")

    assert answer["tokens"] == list(reference(PROMPT, PARAMS).tokens)
    assert answer["chat"] is False
    assert "continued as text (--raw)" in told


@pytest.mark.thorough
def test_python_continues_unless_a_chat_is_asked_for(instruct: str, reference: Reference):
    with Pipeline(target=instruct, strategy="ar") as pipeline:
        continued = pipeline.generate(PROMPT, PARAMS)
        answered = pipeline.generate(pipeline.chat_prompt(PROMPT), PARAMS)

    assert continued.tokens == reference(PROMPT, PARAMS).tokens
    assert answered.tokens == reference(f"# Question\n{PROMPT}\n# Answer", PARAMS).tokens


def test_a_target_without_a_template_has_no_chat_prompt():
    with Pipeline(strategy="ar") as pipeline, pytest.raises(InputError, match="has no chat template"):
        pipeline.chat_prompt(PROMPT)


@pytest.mark.thorough
def test_the_demo_pair_is_a_pair():
    code, output, errors = run("generate", PROMPT, "--pair", "demo", "--max-tokens", "4", "--quiet")

    assert (code, errors) == (0, "")
    assert output


@pytest.mark.thorough
def test_json_that_the_limit_cuts_off_is_an_error_behind_its_text(tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "integer"}, "minItems": 50}')

    code, said, told = run("generate", PROMPT, "--json-schema", str(schema), "--max-tokens", "8", "--temperature", "0")

    assert (code, said.startswith("[")) == (1, True)
    assert "The JSON is incomplete, cut off after 8 tokens" in told
