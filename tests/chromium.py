"""A headless Chromium for tests, driven over the DevTools protocol: no driver to match, no download."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import websocket
from tools import tool

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--window-size=1500,1000",
)
WAIT_SECONDS = 300.0


class Chromium:
    """One browser with one page; a context manager."""

    def __init__(self, profile: Path) -> None:
        self._process = subprocess.Popen(
            [tool("chromium"), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._calls = 0
        try:
            self._socket = websocket.create_connection(
                self._page_address(profile / "DevToolsActivePort"), timeout=WAIT_SECONDS, suppress_origin=True
            )
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_SECONDS)

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression as soon as it is truthy."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"never came true: {expression}\n{self.evaluate('document.body.innerText')}")

    def resize(self, width: int, height: int) -> None:
        """Gives the page a window of so many CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def type(self, element: str, text: str) -> None:
        """Types into an element, given as a JavaScript expression, as a keyboard does."""
        self.evaluate(f"{element}.focus()")
        self._call("Input.insertText", text=text)

    def click(self, x: float, y: float) -> None:
        """Clicks with the mouse at a place of the window, in CSS pixels."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Presses a key by its name, as a keyboard does: `Enter`, `Escape`."""
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text, windowsVirtualKeyCode=code
            )

    def prefer(self, theme: str) -> None:
        """Prefers a `light` or a `dark` page, as a system's settings do."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def print_preview(self, *, on: bool) -> None:
        """Shows the page as paper would have it, or as the screen has it again."""
        self._call("Emulation.setEmulatedMedia", media="print" if on else "")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _page_address(self, port_file: Path) -> str:
        """The DevTools address of the first page, once the browser has written its port."""
        deadline = time.monotonic() + WAIT_SECONDS
        opener = build_opener(ProxyHandler({}))
        while time.monotonic() < deadline:
            if port_file.exists() and (words := port_file.read_text().split()):
                pages = json.load(opener.open(f"http://127.0.0.1:{words[0]}/json", timeout=WAIT_SECONDS))
                found = [page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page"]
                if found:
                    return str(found[0])
            time.sleep(0.1)
        raise AssertionError("Chromium did not start")
