"""The live page in a real browser, before a real pipeline: what a person sees, and what the page can't do."""

import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import SamplingParams
from tests.conftest import Reference
from tests.end_to_end.test_http_serve import KEY, PROMPT, SECONDS, Serving
from tests.orchestrator.cli.test_cli import Command
from tests.support.browser import PROGRAM, Browser
from tests.support.processes import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium, or Google Chrome"),
]
STRICT = """(() => {
  window.unknown = new Set();
  const strict = (value) => value && typeof value === "object" ? new Proxy(value, {
    get(target, key) {
      if (!(key in target)) unknown.add(String(key));
      return strict(target[key]);
    },
  }) : value;
  const add = telemetry.add;
  telemetry.add = (frame) => add.call(telemetry, strict(frame));
})()"""
"""Collect every key that the page reads of a frame and the frame does not have."""
READING = """(() => {
  window.told = [];
  window.places = [];
  new MutationObserver(() => {
    const found = [...document.querySelectorAll(".turn .faint")].at(-1);
    if (!found || found.textContent === told.at(-1)) return;
    told.push(found.textContent);
    places.push(found.nextElementSibling.className);
  }).observe($("log"), { childList: true, subtree: true, characterData: true });
})()"""
"""Collect what is said of how far a prompt was read, and what stands below it."""
ROUNDS = """(() => {
  window.seen = [];
  const paint = paintRequest;
  paintRequest = () => {
    paint();
    if (!telemetry.runs(telemetry.shown?.request) || !tree.drawn) return;
    const words = [$("words"), $("tree-words")].map((each) => each.textContent);
    const request = /Request (\\d+) /.exec(words[0])[1];
    const rounds = [/ in (\\d+) rounds?/.exec(words[0]), /Round (\\d+) of/.exec(words[1])].map((found) => found[1]);
    const figure = document.querySelector("[data-figure=rounds]").textContent;
    if (words[1].includes(` of request ${request} `)) seen.push([...rounds, figure]);
  };
})()"""
"""Collect the rounds that words, tree and figures speak of, whenever they are painted."""
CONTRAST = """(() => {
  const linear = (part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4;
  const luminance = (rgb) => rgb.reduce((sum, part, at) => sum + linear(part / 255) * [.2126, .7152, .0722][at], 0);
  const skipped = "script, svg, :disabled, [hidden], .unseen, dialog:not([open])";
  const colour = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = colour(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const ratio = (one, other) => {
    const [dim, light] = [luminance(one.slice(0, 3)), luminance(other)].sort((a, b) => a - b);
    return (light + .05) / (dim + .05);
  };
  const faults = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const style = getComputedStyle(element);
    if (!own || element.closest(skipped) || style.display === "none") continue;
    const found = ratio(colour(style.color), ground(element));
    if (found < 4.5) faults.push(`${element.tagName} ${element.className} ${element.textContent} ${found}`);
  }
  for (const text of document.querySelectorAll("#tree text")) {
    const under = text.parentElement.querySelector("rect"), fill = under && getComputedStyle(under).fill;
    const base = fill && fill !== "none" ? colour(fill) : ground(document.getElementById("tree"));
    if (ratio(colour(getComputedStyle(text).fill), base) < 4.5) faults.push(`tree "${text.textContent}"`);
  }
  return faults;
})()"""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving() as server:
        until(lambda: server.health() == "ok", SECONDS)
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser, serving: Serving) -> Browser:
    """The page as it is when it was opened with the printed address."""
    chromium.size(1360, 900)
    chromium.prefers(color_scheme="light")
    opened(chromium, serving)
    # The chat of the test before.
    chromium.value("conversation.reset(); $('question').value = ''")
    opened(chromium, serving)
    return chromium


def opened(browser: Browser, serving: Serving) -> None:
    browser.open("about:blank")
    browser.open(f"{serving.url}/#key={KEY}")
    browser.until("$('status').dataset.is === 'ok' && telemetry.frame !== null")


def ask(browser: Browser, text: str, most: int = 48, temperature: float = 0.0) -> None:
    browser.value(f"$('temperature').value = {temperature}; $('seed').value = 5; $('max-tokens').value = {most}")
    browser.value("$('question').focus()")
    browser.type(text)
    browser.press("Enter", control=True)


def answered(browser: Browser, text: str = PROMPT, most: int = 48, temperature: float = 0.0) -> None:
    ask(browser, text, most, temperature)
    browser.until("!conversation.running && document.querySelector('.turn .after')")


def press(browser: Browser, name: str) -> None:
    """The last button of that name below an answer."""
    browser.value(
        f"[...document.querySelectorAll('.turn button')].findLast((one) => one.textContent === '{name}').click()"
    )


def test_a_text_comes_as_the_target_alone_would_say_it_and_the_pipeline_is_seen_at_work(
    browser: Browser, reference: Reference
):
    alone = reference(PROMPT, SamplingParams(temperature=0.0, seed=5, max_tokens=400))
    expected = alone.text
    ask(browser, PROMPT, most=400)

    said = browser.until("document.querySelector('.turn pre.text b')?.textContent")
    assert expected.startswith(said)
    assert len(said) < len(expected), "it did not come in parts"
    browser.until("document.querySelectorAll('#tree .node').length > 3")
    browser.until("document.querySelectorAll('#tree .node.bonus').length === 1")
    browser.until("telemetry.spans.some((span) => span.role === 'draft')")
    browser.until("!conversation.running")

    assert browser.value("document.querySelector('.turn pre.text b').textContent") == expected
    browser.until(f"$('words').textContent.includes('has ended: {alone.statistics.generated_tokens} tokens')")
    figures = browser.value("telemetry.figures()")
    hidden = browser.value("document.querySelector('[data-figure=hits]').parentElement.hidden")
    assert hidden == (2 * figures["overlapped"] <= figures["rounds"])
    for figure in ("speed", "plain", "speedup", "acceptance", "tokensPerRound", "rounds"):
        assert re.search(r"\d", browser.value(f"document.querySelector('[data-figure={figure}]').textContent")), figure
    browser.until("/\\d+% of \\d+/.test($('depths').textContent)")
    browser.until("$('lanes-words').textContent.includes('the target worked')")
    assert browser.value("$('workers').children.length") == 2
    # What was painted is no even surface.
    assert browser.value(
        "new Set($('lanes').getContext('2d').getImageData(60, 0, $('lanes').width - 60, 30).data).size > 6"
    )


@pytest.mark.parametrize("mode", ["complete", "chat"])
def test_a_long_prompt_shows_how_far_it_was_read_until_the_text_comes(browser: Browser, mode: str):
    browser.value(READING)
    browser.value(f"conversation.choose('{mode}')")
    # Different beginnings: KV of the other mode's prompt must not be used.
    answered(browser, f"{mode} {'import os ' * 700}")

    told = [re.fullmatch(r"Reading: (\d+) of ([\d,]+) tokens", words) for words in browser.value("told")]
    progress = [(int(words[1]), int(words[2].replace(",", ""))) for words in told if words]
    assert progress, "nothing was said while the prompt was read"
    assert len(progress) == len(told)
    assert sorted(progress) == progress
    assert 0 < progress[0][0] < progress[0][1]
    assert set(browser.value("places")) == {"content"}
    assert browser.value("document.querySelectorAll('.turn .faint').length") == 0
    browser.value("conversation.choose('complete')")


def test_the_page_reads_only_keys_that_frames_have(browser: Browser):
    browser.value(STRICT)
    answered(browser, PROMPT, most=64)
    browser.until("telemetry.active === false")
    browser.until("$('words').textContent.includes('has ended')")

    assert browser.value("[...unknown]") == []
    assert browser.value("$('workers').textContent").count("active") == 2


def test_escape_stops_and_gives_the_place_back(browser: Browser, serving: Serving):
    ask(browser, PROMPT, most=1500)
    browser.until("telemetry.active && telemetry.rounds.length > 5")

    browser.press("Escape")

    browser.until("document.querySelector('.turn .after')?.textContent.startsWith('Stopped.')")
    assert browser.value("document.activeElement.id") == "question"
    until(lambda: "launch_pipeline_open_generations 0.0" in serving.client.get("/metrics").text, SECONDS)
    browser.until("telemetry.active === false")


def test_a_conversation_is_shown_as_text_whatever_is_in_it(browser: Browser):
    evil = "<img src=x onerror=alert(1)> **bold** `<b>`"
    browser.value("conversation.choose('chat')")
    browser.value("$('max-tokens').value = 8")
    browser.value("$('question').focus()")
    browser.type(evil)
    browser.press("Enter")
    browser.until("document.querySelector('.turn .after')")

    assert browser.value("document.querySelector('.turn.user .content').textContent") == evil
    assert browser.value("document.querySelectorAll('img, iframe, object').length") == 0
    shown = browser.value(
        "(() => { const place = make('div'); place.append(...markdown("
        "'# T\\n\\na **b** `c<i>`\\nd\\n\\n- x\\n- y\\n\\n3. z\\n```py\\n<p>\\n\\nq\\n```\\nend'));"
        " return [...place.children].map((one) => one.outerHTML).join('') })()"
    )
    assert shown == (
        "<p><strong>T</strong></p><p>a <strong>b</strong> <code>c&lt;i&gt;</code><br>d</p><ul><li>x</li><li>y</li></ul>"
        '<ol start="3"><li>z</li></ol><pre tabindex="0"><code>&lt;p&gt;\n\nq</code></pre><p>end</p>'
    )


def test_a_reload_finds_the_chat_again_at_its_end_until_a_new_one_begins(browser: Browser, serving: Serving):
    browser.value("conversation.choose('chat')")
    question = "import os\n" * 60
    answered(browser, question, most=8)
    messages = browser.value("JSON.stringify(conversation.messages)")

    opened(browser, serving)
    assert browser.value("JSON.stringify(conversation.messages)") == messages
    assert browser.value("document.querySelector('.turn.user .content').textContent") == question
    assert browser.value("document.querySelectorAll('.turn').length") == 2
    assert browser.value(
        "$('log').scrollTop > 0 && $('log').scrollHeight - $('log').scrollTop - $('log').clientHeight < 2"
    )
    press(browser, "Regenerate")
    browser.until("!conversation.running")
    assert browser.value("conversation.messages.map((one) => one.role).join()") == "user,assistant"

    browser.value("$('new-chat').click()")
    opened(browser, serving)
    assert browser.value("conversation.messages.length + document.querySelectorAll('.turn').length") == 0


@pytest.mark.parametrize("mode", ["complete", "chat"])
def test_an_answer_that_its_limit_ended_says_so_and_goes_on(browser: Browser, mode: str):
    browser.value(f"conversation.choose('{mode}')")
    output = "document.querySelector('.turn:last-child .content').textContent"
    ended = "!conversation.running && document.querySelector('.turn:last-child .after')"
    ask(browser, PROMPT, most=24)
    browser.until(ended)
    whole = browser.value(output)

    browser.value("$('max-tokens').value = 12")
    press(browser, "Regenerate")
    browser.until(ended)
    assert "limit of 12 tokens" in browser.value("document.querySelector('.turn:last-child .after').textContent")
    half = browser.value(output)
    press(browser, "Continue")
    browser.until(ended)

    continued = browser.value(output)
    assert continued.startswith(half)
    assert continued != half
    # A chat's stop strings, which this model needs, may lie across the end of the first half.
    assert mode == "chat" or continued == whole
    press(browser, "Copy")
    browser.until("$('spoken').textContent === 'Copied' || getSelection().toString() !== ''")
    browser.value("conversation.choose('complete')")


def test_figures_words_and_tree_are_of_one_round_and_the_last_with_nodes_stays(browser: Browser):
    browser.value(ROUNDS)
    ask(browser, PROMPT, most=200)
    browser.until("document.querySelector('.turn .after') && $('words').textContent.includes('has ended')")

    seen = browser.value("seen")
    assert len(seen) > 3
    assert [each for each in seen if len(set(each)) > 1] == []
    browser.until("tree.drawn.tree.keys.length > 1")
    # Earlier rounds can be seen at rest, and a new message shows the present ones.
    shown = browser.value("tree.drawn.round")
    browser.value("$('earlier').click()")
    assert browser.value("[tree.drawn.round, tree.pace]") == [shown - 1, "hold"]
    assert f"Round {shown} " in browser.value("$('tree-words').textContent")
    ask(browser, PROMPT, most=8)
    browser.until("tree.pace === 'live' && !conversation.running")


def test_a_tab_shows_its_own_request_first(browser: Browser, serving: Serving):
    shown = "telemetry.own !== null && $('words').textContent.startsWith(`Request ${telemetry.own} `)"
    with Browser() as other:
        opened(other, serving)
        ask(browser, PROMPT, most=1200)
        browser.until("telemetry.own !== null && telemetry.rounds.length > 3")
        ask(other, PROMPT, most=1200)
        other.until(shown)
        # The first tab does not turn to the later request, nor the second one to what runs on.
        later = other.value("telemetry.own")
        browser.until(f"telemetry.runs({later})")
        other.press("Escape")
        other.until(f"$('words').textContent.includes('Request {later} has ended')")
        for tab in (browser, other):
            assert tab.value(shown)
        browser.press("Escape")
        browser.until("!conversation.running")


def test_everything_is_reached_by_keys_alone_in_a_sensible_order(browser: Browser, serving: Serving):
    reached = []
    for _ in range(11):
        browser.press("Tab")
        element = "document.activeElement"
        reached.append(browser.value(f"{element}.id || {element}.name || {element}.className || {element}.localName"))
        assert browser.value(f"{element}.matches(':focus-visible')")

    # There may be rounds of the test before.
    places = [place for place in reached if place not in ("earlier", "later")][:9]
    assert places == ["skip", "theme", "mode", "new-chat", "log", "question", "send", "summary", "pace"]

    opened(browser, serving)
    browser.press("Tab")
    browser.press("Enter")
    assert browser.value("document.activeElement.id") == "question"
    browser.type("import os\n")
    browser.press("Tab")
    browser.value("$('max-tokens').value = 8")
    browser.press("Enter")
    browser.until("document.querySelector('.turn .after')")


def test_assistive_technology_is_told_what_is_what(browser: Browser):
    answered(browser)
    roles = browser.roles()

    for expected in (
        ("main", "Conversation"),
        ("complementary", "The pipeline at work"),
        ("log", "Messages"),
        ("textbox", "Text to continue"),
        ("button", "Continue"),
        ("button", "Use dark colours"),
        ("radio", "Complete"),
        ("radio", "Hold"),
        ("group", "How often the tree is drawn"),
        ("image", "Token tree"),
        ("image", "Work of target and draft over time"),
        ("table", "Acceptance by depth"),
        ("region", "Work over time"),
    ):
        assert expected in roles, expected
    unnamed = [role for role, name in roles if role in ("button", "radio", "textbox", "image", "region") and not name]
    assert unnamed == []
    assert browser.value("$('log').getAttribute('aria-live')") == "off"
    # The answer was spoken once, not token by token.
    assert browser.value("$('spoken').getAttribute('aria-live')") == "polite"
    assert browser.value("document.querySelector('.turn pre.text b').textContent.endsWith($('spoken').textContent)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(browser: Browser, scheme: str):
    browser.prefers(color_scheme=scheme)
    ask(browser, PROMPT, most=400, temperature=0.7)
    browser.until("document.querySelectorAll('#tree .node').length > 4")

    assert browser.value(CONTRAST) == []
    browser.until("!conversation.running")
    assert browser.value("document.documentElement.dataset.theme") == scheme

    browser.value("$('theme').click()")
    assert browser.value("document.documentElement.dataset.theme") != scheme
    assert browser.value(CONTRAST) == []
    browser.value("localStorage.clear()")


def test_reduced_motion_stops_all_motion(browser: Browser, serving: Serving):
    browser.prefers(reduced_motion="reduce")
    opened(browser, serving)

    assert browser.value("tree.pace") == "slow"
    ask(browser, PROMPT, most=400)
    browser.until("document.querySelector('#tree .verifying rect')")
    assert browser.value("getComputedStyle(document.querySelector('#tree .verifying rect')).animationName") == "none"
    browser.until("!conversation.running")


@pytest.mark.parametrize(("width", "height", "scale"), [(360, 740, 2.0), (680, 450, 2.0), (1360, 900, 1.0)])
def test_nothing_is_cut_off_on_a_narrow_screen_or_at_twice_the_size(
    browser: Browser, width: int, height: int, scale: float
):
    browser.size(width, height, scale)
    answered(browser)

    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    outside = browser.value(
        "[...document.querySelectorAll('button, input, textarea, h2, dd')].filter((one) => one.offsetParent)"
        ".filter((one) => one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.id || one.textContent)"
    )
    assert outside == []


def test_nothing_leaves_the_server_and_nothing_can(browser: Browser, serving: Serving):
    answered(browser)
    assert browser.complaints == []
    assert browser.requests
    assert {
        address for address in browser.requests if not address.startswith((serving.url, "about:", "data:"))
    } == set()
    assert not any(KEY in address for address in browser.requests)

    def fails(expression: str) -> Any:
        return browser.value(
            f"(async () => {{ try {{ await {expression}; return false }} catch {{ return true }} }})()"
        )

    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        assert fails(f"fetch('http://127.0.0.1:{elsewhere.getsockname()[1]}/?text')")
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert fails("eval('1')")
    assert fails("(document.body.innerHTML = '<b>x</b>')")
    assert fails("document.createElement('script').setAttribute('src', '/x')")
    browser.complaints.clear()


def test_a_hidden_page_watches_nothing(browser: Browser):
    browser.value("Object.defineProperty(document, 'hidden', { get: () => window.away, configurable: true })")
    browser.value("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("stream.signal.aborted")
    asked = len(browser.requests)
    told = browser.value("telemetry.frame.at")

    answered(browser)
    assert browser.requests[asked:] == [f"{browser.value('location.origin')}/v1/completions"]
    assert browser.value("telemetry.frame.at") == told

    browser.value("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    browser.until(f"telemetry.frame.at > {told}")


def test_a_wrong_key_is_asked_for_again_and_the_right_one_stays_in_the_tab(browser: Browser, serving: Serving):
    browser.value("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(f"{serving.url}/#key=a-wrong-key")
    browser.until("$('key-dialog').open && $('key-text').textContent.includes('did not accept')")
    assert browser.value("location.hash") == ""

    browser.press("Escape")
    browser.until("!$('key-dialog').open")
    assert browser.value("$('status').innerText") == "The key is missing"
    browser.value("$('unlock').focus()")
    browser.press("Enter")
    browser.until("document.activeElement.id === 'key'")
    browser.type(KEY)
    browser.press("Enter")

    browser.until("$('status').dataset.is === 'ok' && telemetry.frame !== null")
    browser.open(f"{serving.url}/")
    browser.until("$('status').dataset.is === 'ok'")
    browser.complaints.clear()


def test_a_page_outlives_its_server(chromium: Browser):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    arguments = ("serve", "--port", port, "--api-key", KEY)
    first = Command(*arguments)
    try:
        first.stdout.readline()
        chromium.open("about:blank")
        chromium.open(f"http://127.0.0.1:{port}/#key={KEY}")
        chromium.until("['loading', 'ok'].includes($('status').dataset.is)")
        chromium.until("$('status').dataset.is === 'ok'", SECONDS)
        ask(chromium, PROMPT, most=1500)
        chromium.until("telemetry.rounds.length > 3 && tree.drawn !== null")
    finally:
        first.process.kill()
        first.end()
    chromium.until("$('status').innerText.includes('Trying again')")
    chromium.until("document.querySelector('.turn .after')?.textContent.startsWith('Failed')")
    # The server's end in the page's words, not in the browser's ("network error").
    assert chromium.value("document.querySelector('.turn .wrong').textContent") == chromium.value("AWAY")
    chromium.until("$('words').textContent.includes('has ended')")

    second = Command(*arguments)
    try:
        chromium.until("$('status').dataset.is === 'ok'", SECONDS)
        # The last picture stays until another server's request is shown.
        chromium.until("telemetry.rounds.length === 0")
        assert chromium.value("tree.drawn.request === telemetry.shown.request")
        chromium.value("$('max-tokens').value = 8")
        press(chromium, "Regenerate")
        chromium.until("document.querySelector('.turn .after')?.textContent.startsWith('Ended')")
        assert chromium.value("document.querySelectorAll('.turn .wrong').length") == 0
        began = time.monotonic()
        second.interrupt()
        second.end()
        assert time.monotonic() - began < 10.0
    finally:
        second.process.kill()
    chromium.complaints.clear()
