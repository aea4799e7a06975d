"""A headless Chromium for tests, spoken to by the DevTools protocol over two pipes: no port, no driver, no library.

https://chromedevtools.github.io/devtools-protocol; messages are JSON, each ended by a zero byte.
"""

import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
_SECONDS = 30.0
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowRight": 39, "ArrowLeft": 37}
_ENDED = b"\0"


class Browser:
    """One tab. `requests` are the addresses of all that it asked for; `complaints` what its console said was wrong."""

    def __init__(self, width: int = 1360, height: int = 900) -> None:
        assert PROGRAM is not None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._ids = itertools.count(1)
        self._unread = b""
        self._profile = tempfile.mkdtemp(prefix="lp-browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            PROGRAM,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # tests run as root in containers
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            f"--user-data-dir={self._profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to descriptor 4.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._session: str | None = None
        tab = self._first_tab()
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)
            shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command. Raises RuntimeError for one that fails."""
        id = next(self._ids)
        message = {"id": id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + _ENDED)
        while (answer := self._next()).get("id") != id:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression, perhaps a promise, comes to under the page's own policy."""
        under = {"returnByValue": True, "awaitPromise": True, "allowUnsafeEvalBlockedByCSP": False}
        result = self.call("Runtime.evaluate", expression=expression, **under)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = _SECONDS) -> Any:
        """Wait until an expression is true, and return it; an element counts as true."""
        found = f"((found) => found instanceof Node || found)({expression})"
        return self.wait(lambda: self.value(found), expression, seconds)

    def wait(self, found: Callable[[], Any], words: str, seconds: float = _SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := found()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"In vain: {words}. The page says: {self.value('document.body.innerText')}")
            time.sleep(0.02)
        return value

    def press(self, key: str, *, control: bool = False, shift: bool = False) -> None:
        """One of the keys that type nothing, or a blank."""
        text = {"Enter": "\r", " ": " "}.get(key, "") if not control else ""
        modifiers = 2 * control + 8 * shift
        said = {"key": key, "code": key if key != " " else "Space", "windowsVirtualKeyCode": _KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, text=text, **said)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **said)

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """`scale`: device pixels a pixel; a zoom of 200% is half the size at twice the scale."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefers(self, **features: str) -> None:
        """For instance prefers(color_scheme="dark", reduced_motion="reduce")."""
        given = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=given)

    def roles(self) -> list[tuple[str, str]]:
        """(role, name) of everything that assistive technology is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]

    def _first_tab(self) -> str:
        targets: Sequence[Any] = self.call("Target.getTargets")["targetInfos"]
        return next(target["targetId"] for target in targets if target["type"] == "page")

    def _next(self) -> Any:
        while _ENDED not in self._unread:
            if not select.select([self._read], [], [], _SECONDS)[0]:
                raise TimeoutError("The browser does not answer.")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise RuntimeError("The browser is gone.")
            self._unread += piece
        message, self._unread = self._unread.split(_ENDED, 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        said = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(said["request"]["url"])
            case "Log.entryAdded" if said["entry"]["level"] == "error":
                self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning"):
                self.complaints.append(json.dumps(said["args"]))
            case _:
                pass
