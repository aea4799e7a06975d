"""Makes the pictures of the documentation: `generate` in a terminal, the live page after an answer, with the token tree
of a round in its middle, and the page after a thought and a call (`thinking_pair`).

    python -m orchestrator.lab.pictures --out docs/page
    python -m orchestrator.lab.pictures --out docs/page --only page --question "How do I cook rice?"

Needs Chromium (apt-get install chromium) and `pip install playwright`. What follows `--pipeline` goes to `generate` and
`serve`.
"""

# pyright: reportMissingImports=false
# playwright is needed here alone.

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.text import Text

from orchestrator.machine.downloads.default_target import default_target
from orchestrator.machine.drafts.shipped_drafts import default_draft
from protocol.own_modules import module_command

_RENAMED = {"<jupyter_script>": "<think>", "<empty_output>": "</think>"}
_TEMPLATE = """\
{% if tools %}<|im_start|>system
Functions: {{ tools | tojson }}
Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def thinking_pair(folder: Path) -> tuple[Path, Path]:
    """Folders of the target and of its draft, written below `folder`."""
    return _copy(default_target().folder, folder / "target"), _copy(default_draft().folder, folder / "draft")


def _copy(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for name, marker in _RENAMED.items():
        tokenizer = tokenizer.replace(f'"{name}"', f'"{marker}"')
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return folder


_LAUNCH = [*module_command("orchestrator.cli.app")]
_COLUMNS, _SIZE = 96, {"width": 1440, "height": 900}
_BIG_TREE = """() => {
  const answered = document.querySelector("#log").innerText.length > 300;
  const ended = document.querySelector(".turn > .after");
  const big = document.querySelectorAll("#tree .node").length > 12 && document.querySelector("#tree .node.accepted");
  if (answered && big || ended) document.querySelector("input[name=pace][value=hold]").click();
  return answered && big || ended;
}"""
"""Hold the tree in the middle of the answer when it is big, or at the end of the answer."""
_TEMPERATURE, _SEED = "0.2", "1"
_START_SECONDS, _ANSWER_SECONDS = 300, 300
_CITY = {"city": {"type": "string", "maxLength": 20}}
_WEATHER = {"type": "object", "properties": _CITY, "required": ["city"], "additionalProperties": False}
_TOOLS = [{"name": "weather", "description": "Today's weather in a city.", "parameters": _WEATHER}]
_BUDGET = 24
"""Tokens of a thought: this model was not trained to end one."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="the folder of the pictures")
    options.add_argument("--only", choices=("terminal", "page", "tools"), help="one of the pictures; the page in two")
    options.add_argument("--question", default="Why is the sky blue?")
    options.add_argument("--pipeline", nargs=argparse.REMAINDER, default=[], help="options of the pipeline, at the end")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.only in (None, "terminal"):
        _terminal(given.question, given.pipeline, given.out / "generate.svg")
    if given.only != "terminal":
        _pages(given.only, given.question, given.pipeline, given.out)


def _pages(only: str | None, question: str, options: list[str], out: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        if only in (None, "page"):
            with _server(options) as address:
                _page(browser, address, question, out)
        if only in (None, "tools"):
            with tempfile.TemporaryDirectory() as folder:
                target, draft = thinking_pair(Path(folder))
                with _server(["--target", str(target), "--draft", str(draft)]) as address:
                    _calling(browser, address, out)
        browser.close()


def _terminal(question: str, options: list[str], file: Path) -> None:
    """What a user sees who types the command: the answer, then the figures."""
    shown = subprocess.run(
        [*_LAUNCH, "generate", question, "--temperature", _TEMPERATURE, "--seed", _SEED, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": str(_COLUMNS), "FORCE_COLOR": "1"},
    )
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(Text(f'$ bin/launch-pipeline generate "{question}"', style="bold"))
    console.print(Text.from_ansi(shown.stdout))
    console.save_svg(str(file), title="launch-pipeline")


@contextmanager
def _server(options: list[str]) -> Iterator[str]:
    """The page's address, key included."""
    process = subprocess.Popen(
        [*_LAUNCH, "serve", "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+#\S+", line):
                yield found.group()
                return
        raise SystemExit("The server ended before it printed its address.")
    finally:
        process.terminate()
        process.wait(_START_SECONDS)


def _page(browser: Browser, address: str, question: str, folder: Path) -> None:
    """The page in both colour schemes, after the answer. The tree is that of a round in its middle, when it was big."""
    page = _opened(browser, address)
    _set(page, temperature=_TEMPERATURE, seed=_SEED)
    page.locator("#question").fill(question)
    page.locator("#send").click()
    page.wait_for_function(_BIG_TREE, timeout=1000 * _ANSWER_SECONDS)
    page.locator(".turn > .after").wait_for(timeout=1000 * _ANSWER_SECONDS)
    page.wait_for_function("document.querySelector('#words').innerText.includes('has ended')")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        # The lanes are painted again in the other colours.
        page.evaluate("() => new Promise((painted) => setTimeout(painted, 500))")
        page.screenshot(path=str(folder / f"page-{scheme}.png"))
    page.close()


def _calling(browser: Browser, address: str, folder: Path) -> None:
    """The page after the model has answered with the result of its call."""
    page = _opened(browser, address)
    page.emulate_media(color_scheme="light")
    _set(page, temperature="0", budget=str(_BUDGET), tools=json.dumps(_TOOLS, indent=1))
    page.locator("#must-call").evaluate("box => { box.checked = true; }")
    page.locator("#question").fill("What is the weather in Paris today?")
    page.locator("#send").click()
    page.locator(".call textarea").first.fill("18 degrees and sunny")
    page.locator(".turn details").first.evaluate("details => { details.open = true; }")
    page.get_by_role("button", name="Send the results").click()
    page.wait_for_function("document.querySelectorAll('.turn > .after').length === 2", timeout=60_000)
    page.screenshot(path=str(folder / "page-tools.png"))
    page.close()


def _opened(browser: Browser, address: str) -> Page:
    # The page forbids the scripts of others, and a condition to wait for would be one.
    page = browser.new_page(viewport=_SIZE, bypass_csp=True)
    page.goto(address)
    page.locator('#status[data-is="ok"]').wait_for(timeout=1000 * _START_SECONDS)
    return page


def _set(page: Page, **values: str) -> None:
    """Values of fields, folded or not."""
    for field, value in values.items():
        page.locator(f"#{field}").evaluate("(field, value) => { field.value = value; }", value)


if __name__ == "__main__":
    main()
