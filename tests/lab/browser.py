"""A headless Chromium that a test opens pages in, over the DevTools protocol on a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT = 60.0


def executable() -> str:
    """The browser's program.

    Raises:
        FileNotFoundError: there is none on the path.
    """
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        raise FileNotFoundError(f"this test needs Chromium; install one of {', '.join(NAMES)}")
    return found


class Browser:
    """One page in a browser of its own.

    Args:
        profile: an empty folder for what the browser keeps.
        width: of the window in pixels.
        height: of the window in pixels.
        dark: whether the page is told that its reader prefers dark colours.
    """

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4, whatever they are here.
        shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        options = [*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, executable(), *options],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests: list[str] = []

    def open(self, page: Path) -> None:
        """Load a page and wait until its script is through."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + TIMEOUT
        while self.run("document.documentElement?.dataset.ready") != "true":
            if time.monotonic() > end:
                raise TimeoutError(f"the script of {page} did not come to its end: {self.errors}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key."""
        codes = {"Enter": 13, " ": 32, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Escape": 27}
        text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
        fields = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click with the mouse at a place in the window."""
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, file: Path) -> None:
        """The window as a PNG file."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def close(self) -> None:
        """Close the browser."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        self._process.wait(TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError("the browser has closed its pipe")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        """Remember what went wrong on the page, and what it asked for."""
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
