"""A headless Chromium on a page of ours, driven over its debugging pipe."""

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.kit.waiting import until
from tests.monitoring.tools import tool

# A browser starts in a second on an idle machine.
BROWSER_S = 120.0
# Chromium reads commands from file descriptor 3 and answers on 4.
_START = (
    'exec "$0" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe "$@" 3<&{} 4>&{}'
)


class Browser:
    """One page in a window of its own."""

    def __init__(self, profile: str) -> None:
        (theirs_in, self._in), (self._out, theirs_out) = os.pipe(), os.pipe()
        command = ["bash", "-c", _START.format(theirs_in, theirs_out), tool("chromium"), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._numbers, self._session = b"", itertools.count(1), ""
        # What the page logged.
        self.logged: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable")

    def open(self, url: str, *, width: int = 1440, ready: str) -> None:
        """Open a page in a window of this width, and wait until the expression `ready` is true there."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=url)
        self.until(ready)

    def until(self, expression: str) -> None:
        until(lambda: self.eval(f"document.readyState === 'complete' && Boolean({expression})"), BROWSER_S)

    def eval(self, expression: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        os.write(
            self._in, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._read()).get("id") != number:
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.logged.append(json.dumps(answer))
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._out, 1 << 16)
            assert got, "the browser has ended"
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser for the block; without Chromium the test is skipped."""
    # Not tmp_path: the browser's sockets live in its profile, and their paths are short.
    with tempfile.TemporaryDirectory(prefix="chr", ignore_cleanup_errors=True) as profile:
        opened = Browser(profile)
        try:
            yield opened
        finally:
            opened.close()
