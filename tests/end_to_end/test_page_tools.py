"""Thoughts and calls on the live page, in a real browser before a real pipeline."""

import json
from collections.abc import Iterator

import pytest

from tests.end_to_end.test_http_serve import Serving, started
from tests.end_to_end.test_http_thinking import TOOLS
from tests.end_to_end.test_page_browser import CONTRAST, opened
from tests.support.browser import PROGRAM, Browser
from tests.support.models.thinking_pair import write_thinking_pair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium, or Google Chrome"),
]
_CALLS = """(() => {
  const calls = new Calls(), turn = conversation.addTurn("assistant", "Answer");
  const parts = [
    [0, "one", "look", '{"at": "<img src=x>'], [1, "two", "<b>", ""], [0, "", "", '"}'], [2, "three", "cut", '{"a'],
  ];
  for (const [index, id, name, text] of parts) calls.add({ index, id, function: { name, arguments: text } }, turn);
  conversation.finish(turn, "chat", "", [], "", "tool_calls", calls, 0);
})()"""
"""An answer of three calls, the last of which was cut off."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    target, draft = write_thinking_pair(tmp_path_factory.mktemp("models"))
    with started("--target", str(target), "--draft", str(draft)) as server:
        yield server


@pytest.fixture
def browser(serving: Serving) -> Iterator[Browser]:
    with Browser() as browser:
        opened(browser, serving)
        browser.value("conversation.choose('chat')")
        yield browser


def enter_tools(browser: Browser, text: str) -> None:
    browser.value("$('tools-details').open = true; $('tools').focus()")
    browser.type(text)


def send(browser: Browser, text: str) -> None:
    browser.value("$('question').focus()")
    browser.type(text)
    browser.press("Enter")


def test_a_model_thinks_calls_and_goes_on_with_the_result(browser: Browser):
    browser.value(
        "$('temperature').value = 1; $('seed').value = 1; $('max-tokens').value = 60; $('budget').value = 6; "
        "$('must-call').checked = true"
    )
    enter_tools(browser, json.dumps([tool["function"] for tool in TOOLS]))
    send(browser, "def add")

    browser.until("document.querySelector('.turn .after')")
    calls = browser.value("conversation.calls.length")
    assert calls >= 1
    assert browser.value("document.querySelector('.turn details summary').textContent") == "Thinking"
    assert browser.value("document.querySelector('.turn details pre').textContent")
    assert browser.value("document.querySelector('.call code').textContent") == "pick"
    assert json.loads(browser.value("document.querySelector('.call pre').textContent"))["one"] in ("left", "right")
    assert browser.value(CONTRAST) == []

    browser.value("document.querySelector('.call textarea').focus()")
    browser.type("it is <b>there</b>")
    browser.value("$('max-tokens').value = 8; conversation.sendResults.querySelector('button').click()")
    browser.until("document.querySelectorAll('.turn.assistant').length === 2 && !conversation.running")

    roles = browser.value("conversation.messages.map((one) => one.role)")
    assert roles[: 2 + calls] == ["user", "assistant", *["tool"] * calls]
    first = browser.value("[conversation.messages[1].tool_calls[0].id, conversation.messages[2]]")
    assert first[1] == {"role": "tool", "tool_call_id": first[0], "content": "it is <b>there</b>"}
    assert browser.value("document.querySelectorAll('.turn .wrong').length") == 0


def test_a_wrong_entry_is_told_and_loses_no_message(browser: Browser):
    enter_tools(browser, '[{"type": "function"')
    send(browser, "Look.")

    assert browser.value("$('tools-wrong').textContent").startswith("The tools can't be read (")
    assert browser.value("document.activeElement.id") == "tools"
    assert browser.value("$('question').value") == "Look."
    assert browser.value("document.querySelectorAll('.turn').length") == 0


def test_calls_are_shown_as_text_and_a_cut_one_gets_no_result(browser: Browser):
    browser.value(_CALLS)

    assert browser.value("[...document.querySelectorAll('.call code')].map((one) => one.textContent)") == [
        "look",
        "<b>",
        "cut",
    ]
    assert browser.value("document.querySelector('.call pre').textContent") == '{"at": "<img src=x>"}'
    assert browser.value("document.querySelectorAll('.call img, .call b').length") == 0
    assert browser.value("document.querySelectorAll('.call textarea').length") == 2

    browser.value("document.querySelectorAll('.call textarea')[1].value = 'seen'; $('max-tokens').value = 4")
    send(browser, "Go on.")
    sent = browser.value("conversation.messages.slice(0, 4)")
    assert [call["id"] for call in sent[0]["tool_calls"]] == ["one", "two"]
    assert sent[0]["tool_calls"][1]["function"] == {"name": "<b>", "arguments": "{}"}
    assert [(one["role"], one.get("tool_call_id"), one["content"]) for one in sent[1:]] == [
        ("tool", "one", ""),
        ("tool", "two", "seen"),
        ("user", None, "Go on."),
    ]
    browser.until("!conversation.running")
