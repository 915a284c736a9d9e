"""A real browser for tests of pages: one process opens page after page, clicks on marks and takes screenshots.

It is driven through the pipe of Chrome's devtools protocol, so no port and no package is needed. Leaves out: the
expected content.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 30.0
# The middle of the largest run of pixels of a colour in a row of a canvas, in the page's coordinates; and how many.
SEEN = """((selector, name) => {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  probe.fillRect(0, 0, 1, 1);
  const want = probe.getImageData(0, 0, 1, 1).data, found = { count: 0, x: null, y: null };
  let longest = 0;
  for (const canvas of document.querySelectorAll(selector + " canvas")) {
    if (!canvas.width || !canvas.offsetParent) continue;
    const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const at = (x, y) => [0, 1, 2].every((i) => Math.abs(data[4 * (y * width + x) + i] - want[i]) < 3);
    for (let y = 0; y < height; y++) for (let x = 0, run = 0; x < width; x++) {
      if (!at(x, y)) { run = 0; continue; }
      found.count++;
      if (++run > longest) { longest = run; found.canvas = canvas; found.at = [x - run / 2, y]; }
    }
  }
  if (!found.count) return found;
  let top = found.at[1], { canvas } = found;
  canvas.scrollIntoView({ block: "center" });
  const box = canvas.getBoundingClientRect(), scale = box.width / canvas.width;
  return { count: found.count, x: box.left + found.at[0] * scale, y: box.top + (top + 2) * scale };
})"""


class Browser:
    """`open` a page, `ask` it, `click` on a colour."""

    def __init__(self, folder: Path) -> None:
        (theirs, to), (from_, answers) = os.pipe(), os.pipe()
        words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
                 "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--window-size=1280,1000")  # fmt: skip
        # The browser reads commands from 3 and writes answers to 4.
        program = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@" 2>/dev/null'
        self._process = subprocess.Popen(
            ["bash", "-c", program, "bash", str(theirs), str(answers), str(BROWSER), *words],
            pass_fds=(theirs, answers),
        )
        os.close(theirs)
        os.close(answers)
        self._to, self._from, self._number, self._rest = to, from_, 0, b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def _call(self, method: str, **given: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        asked = {"id": self._number, "method": method, "params": given, **session}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                ready, _, _ = select([self._from], [], [], PATIENCE)
                more = os.read(self._from, 1 << 20) if ready else b""
                assert more, f"the browser does not answer {method}"
                self._rest += more
            line, _, self._rest = self._rest.partition(b"\0")
            said = json.loads(line)
            if said.get("id") == self._number:
                assert "error" not in said, (method, said)
                return said["result"]

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        said = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until it holds in the page."""
        within = int(1000 * PATIENCE)
        assert self.ask(f"new Promise((done) => {{ const begun = Date.now(), look = () => ({condition}) ? done(true) : "
                        f"Date.now() - begun > {within} ? done(false) : setTimeout(look, 30); look(); }})"), condition

    def open(self, file: Path, until: str, *, dark: bool = False, fragment: str = "") -> dict[str, str]:
        """Show a page -> the data attributes of its root."""
        self.scheme(dark=dark)
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=f"{file.as_uri()}#{fragment}")
        self.until('document.readyState === "complete" && document.querySelector("footer")')
        self.until(f"document.documentElement.dataset.failed || ({until})")
        return self.data()

    @contextmanager
    def width(self, pixels: int) -> Iterator[None]:
        """Show pages as on a phone of this width."""
        self._call("Emulation.setDeviceMetricsOverride", width=pixels, height=1000, deviceScaleFactor=1, mobile=True)
        try:
            yield
        finally:
            self._call("Emulation.clearDeviceMetricsOverride")

    def scheme(self, *, dark: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def data(self) -> dict[str, str]:
        found: dict[str, str] = self.ask("({...document.documentElement.dataset})")
        return found

    def counting(self, color: str, within: str) -> str:
        """The expression for how many pixels of canvases show a colour of the page's style."""
        return f"{SEEN}({json.dumps(within)}, {json.dumps(color)}).count"

    def seen(self, color: str, within: str) -> int:
        return int(self.ask(self.counting(color, within)))

    def click(self, color: str, within: str) -> None:
        """Press the mouse on a mark of this colour."""
        spot = self.ask(f"{SEEN}({json.dumps(within)}, {json.dumps(color)})")
        assert spot["count"], f"nothing has the colour {color} in {within}"
        self.press(spot["x"], spot["y"])

    def press(self, x: float, y: float) -> None:
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 1)):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if buttons else "none",
                       clickCount=buttons)  # fmt: skip

    def picture(self, file: Path, *, whole: bool = False) -> None:
        made = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(made["data"]))

    def close(self) -> None:
        self._session = ""
        self._call("Browser.close")
        self._process.wait(PATIENCE)


@contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        made = Browser(Path(folder))
        try:
            yield made
        finally:
            made.close()
