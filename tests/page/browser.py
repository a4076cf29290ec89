"""A headless Chromium, driven over its DevTools protocol: what a person at the page sees and does."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
MISSING = ("no Chromium is here: apt-get install chromium-headless-shell (requirements/setup.sh test does it as root), "
           "or name one in CHROMIUM")
_START_S = 60
_WAIT_S = 30
_KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}
_SHIFT = 8


def find() -> str | None:
    """The browser's program, or None."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A running browser without a profile of its own. Raises RuntimeError where there is none or it does not start."""
    program = find()
    if program is None:
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        # A sandbox cannot be made by root, and only our own page is opened.
        process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            yield Browser(_port(process, Path(folder) / "DevToolsActivePort"))
        finally:
            # Debian's program is a shell script that waits for the browser: to end it alone would leave the browser.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _port(process: subprocess.Popen[bytes], file: Path) -> tuple[int, str]:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"Chromium ended with {process.returncode}")
        lines = file.read_text().split("\n") if file.exists() else []
        if len(lines) > 1:
            return int(lines[0]), lines[1]
        time.sleep(0.05)
    raise RuntimeError(f"Chromium did not start within {_START_S} s")


class _Connection:
    """Commands and events of one end of the protocol."""

    def __init__(self, address: str) -> None:
        self._socket: ClientConnection = connect(address, max_size=None, ping_interval=None)
        self._ids = itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises RuntimeError where it is refused."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            told = json.loads(self._socket.recv(_WAIT_S))
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self.hear(told)

    def hear(self, told: dict[str, Any]) -> None:
        """Called for each event."""

    def close(self) -> None:
        self._socket.close()


class Browser(_Connection):
    """The browser as a whole."""

    def __init__(self, at: tuple[int, str]) -> None:
        self._port = at[0]
        super().__init__(f"ws://127.0.0.1:{at[0]}{at[1]}")

    def profile(self) -> str:
        """A new profile: nothing is kept in it yet."""
        return self.call("Target.createBrowserContext")["browserContextId"]

    @contextlib.contextmanager
    def open(self, url: str, profile: str | None = None, width: int = 1100, height: int = 800) -> Iterator[Page]:
        """A tab that has loaded ``url``."""
        target = self.call("Target.createTarget", url="about:blank", browserContextId=profile or self.profile(),
                           width=width, height=height)["targetId"]
        page = Page(f"ws://127.0.0.1:{self._port}/devtools/page/{target}")
        try:
            page.load(url)
            yield page
        finally:
            page.close()
            self.call("Target.closeTarget", targetId=target)


class Page(_Connection):
    """A tab. errors: what its console told of, uncaught exceptions and refusals by the security policy among it. said:
    what its dialogs asked; they are confirmed."""

    def __init__(self, address: str) -> None:
        self.errors: list[str] = []
        self.said: list[str] = []
        super().__init__(address)
        for domain in ("Page", "Runtime", "Log", "DOM", "Accessibility"):
            self.call(f"{domain}.enable")

    def hear(self, told: dict[str, Any]) -> None:
        params = told.get("params", {})
        # Without one it is the answer to what was sent below.
        method = told.get("method")
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            # A refused request is told of by the page itself.
            if params["entry"]["source"] != "network":
                self.errors.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.said.append(params["message"])
            self._socket.send(json.dumps({"id": 10**6 + len(self.said), "method": "Page.handleJavaScriptDialog",
                                          "params": {"accept": True}}))

    def load(self, url: str | None = None) -> None:
        """Opens ``url``, or the same page once more, and waits until its script has run."""
        self.js("window.before = true")
        if url is None:
            self.call("Page.reload")
        else:
            self.call("Page.navigate", url=url)
        self.until("!window.before && document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page. Raises RuntimeError where it throws."""
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {json.dumps(told['exceptionDetails'])[:600]}")
        return told["result"].get("value")

    def until(self, expression: str, seconds: float = _WAIT_S) -> None:
        """Waits until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < deadline, f"not within {seconds} s: {expression}\n{self.text('body')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """What is shown of an element; "" without it."""
        return self.js(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''")

    def texts(self, selector: str) -> list[str]:
        return self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText)")

    def click(self, selector: str, number: int = 0) -> None:
        """Clicks into the middle of an element that must be there to be seen."""
        box = self.js(f"""(() => {{
            const element = document.querySelectorAll({json.dumps(selector)})[{number}];
            element.scrollIntoView({{block: "nearest"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2, box.width * box.height];
        }})()""")
        assert box[2] > 0, f"{selector} is not to be seen"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def write(self, text: str, into: str | None = None) -> None:
        """Types text, behind what is in the field already."""
        if into:
            self.click(into)
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        code, number, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=code, code=code, windowsVirtualKeyCode=number,
                      modifiers=_SHIFT if shift else 0, **({"text": text} if text and kind == "keyDown" else {}))

    def choose(self, selector: str, value: str | bool) -> None:
        """Sets a select, a field or a checkbox, as if by hand."""
        self.js(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element[element.type === "checkbox" ? "checked" : "value"] = {json.dumps(value)};
            for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, {{bubbles: true}}));
        }})()""")

    def pick(self, selector: str, *files: Path) -> None:
        """Chooses files in a file field."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.call("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=found["result"]["objectId"])

    def unnamed_controls(self) -> list[str]:
        """Controls that a screen reader would have no name for."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "combobox", "checkbox", "spinbutton", "link", "image", "log", "listbox")
        return [f"{node['role']['value']} {node['nodeId']}" for node in nodes if not node.get("ignored")
                and node.get("role", {}).get("value") in roles and not node.get("name", {}).get("value")]

    def scheme(self, name: str) -> None:
        """What the system's colours are: ``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def offline(self, on: bool) -> None:
        self.call("Network.enable")
        self.call("Network.emulateNetworkConditions", offline=on, latency=0, downloadThroughput=-1,
                  uploadThroughput=-1)

    def screenshot(self, file: Path) -> None:
        """A PNG of what is to be seen."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
