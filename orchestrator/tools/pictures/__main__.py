"""Makes the pictures of the documentation: `generate` in a terminal, the live page while the server answers a chat
message, and the page after a thought and a call (`thinking_pair`).

    python -m orchestrator.tools.pictures --out docs/page

Needs Chromium and `pip install playwright`. What follows `--` goes to `generate` and `serve`.
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

from orchestrator.tools.pictures.thinking_pair import thinking_pair
from protocol.own_modules import module_command

_LAUNCH = [*module_command("orchestrator.cli.app")]
_COLUMNS, _SIZE = 96, {"width": 1440, "height": 900}
_ANSWERED, _SHOWN = 300, 12
"""Characters of the conversation, and words in the tree, on the page when its picture is taken."""
_START_SECONDS = 300
_CITY = {"city": {"type": "string", "maxLength": 20}}
_WEATHER = {"type": "object", "properties": _CITY, "required": ["city"], "additionalProperties": False}
_TOOLS = [{"name": "weather", "description": "Today's weather in a city.", "parameters": _WEATHER}]
_BUDGET = 24
"""Tokens of a thought: this model was not trained to end one."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="the folder of the pictures")
    options.add_argument("--question", default="Why is the sky blue?")
    options.add_argument("--pipeline", nargs=argparse.REMAINDER, default=[], help="options of the pipeline, at the end")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    _terminal(given.question, given.pipeline, given.out / "generate.svg")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        with _server(given.pipeline) as address:
            _page(browser, address, given.question, given.out)
        with tempfile.TemporaryDirectory() as folder:
            target, draft = thinking_pair(Path(folder))
            with _server(["--target", str(target), "--draft", str(draft)]) as address:
                _calling(browser, address, given.out)
        browser.close()


def _terminal(question: str, options: list[str], file: Path) -> None:
    """What a user sees who types the command: the answer, then the figures."""
    shown = subprocess.run(
        [*_LAUNCH, "generate", question, "--max-tokens", "160", "--temperature", "0.7", "--seed", "1", *options],
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
    """The page in both colour schemes, in the middle of an answer, while the tree is big."""
    page = _opened(browser, address)
    _set(page, temperature="0.7")
    page.locator("#question").fill(question)
    page.locator("#send").click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(
            f"document.querySelector('#log').innerText.length > {_ANSWERED} && "
            f"document.querySelectorAll('#tree text').length > {_SHOWN}",
            timeout=60_000,
        )
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
