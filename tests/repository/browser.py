"""A headless Chromium for tests of pages, by Chrome's protocol."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
import websocket

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
HEADLESS = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu"]
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")


@contextmanager
def open_browser(profile: Path) -> Iterator[str]:
    """Start a browser with a new profile in a folder, and yield the address of its protocol."""
    command = [*HEADLESS, f"--user-data-dir={profile}", "--remote-debugging-port=0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as browser:
        try:
            line = next(line for line in browser.stderr if "DevTools listening on" in line)
            port = re.search(r":(\d+)/", line)[1]
            yield f"http://localhost:{port}"
        finally:
            browser.kill()


def evaluated(browser: str, page: str, expression: str, width: int = 1280) -> Any:
    """Open a page in a window, and return the first value of an expression that is neither null nor empty."""
    with urlopen(Request(f"{browser}/json/new?{quote('about:blank', safe='')}", method="PUT")) as answer:
        target = json.load(answer)["webSocketDebuggerUrl"]
    with closing(websocket.create_connection(target, timeout=60, suppress_origin=True)) as socket:
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        _call(socket, "Emulation.setDeviceMetricsOverride", screen)
        _call(socket, "Page.navigate", {"url": page})
        for _ in range(100):
            answer = _call(socket, "Runtime.evaluate", {"expression": expression, "returnByValue": True})
            if value := answer["result"].get("value"):
                return value
            time.sleep(0.2)
    return None


def _call(socket: websocket.WebSocket, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    number = time.monotonic_ns() % 2**31
    socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
    answer: dict[str, Any] = {}
    while answer.get("id") != number:  # events come between
        answer = json.loads(socket.recv())
    return answer.get("result", {})
