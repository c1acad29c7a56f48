"""A headless browser for tests of pages: what it renders at a phone's width, and what it asks the network."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no browser: none of chromium, chromium-browser, google-chrome is installed"
)
WIDTH, HEIGHT = 390, 3600  # a phone's width, and the whole page; AROUND has the same width
DARK, LIGHT = 0, 1  # Blink's preferredColorScheme

# A browser window is no narrower than 500 pixels, a frame can be.
AROUND = """<!DOCTYPE html>
<pre id="probe"></pre>
<script>
addEventListener("message", (event) => { document.getElementById("probe").textContent = event.data; });
</script>
<iframe src="copy.html" style="width: 390px; height: 800px; border: 0"></iframe>
"""


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a browser made of a page: its document, what went to the console, and what the page asked for."""

    document: str
    console: tuple[str, ...]
    requests: tuple[str, ...]
    picture: np.ndarray  # [height, width, RGB], from 0 to 1


def visit(page: Path, folder: Path, scheme: int = LIGHT) -> Visit:
    """Open a page in a browser that resolves no name."""
    assert PROGRAM is not None
    folder.mkdir()
    log, picture = folder / "net.json", folder / "page.png"
    done = subprocess.run(
        [
            *(PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
            *(f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", f"--log-net-log={log}"),
            *(f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={WIDTH},{HEIGHT}"),
            *(f"--screenshot={picture}", "--virtual-time-budget=1000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    network = json.loads(log.read_text(encoding="utf-8"))
    start = network["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event["params"] for event in network["events"] if event["type"] == start and "params" in event]
    return Visit(
        document=done.stdout,
        console=tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line),
        # the browser's own requests have "not an origin", a page from a file the origin "null"
        requests=tuple(asked["url"] for asked in started if asked.get("initiator") == "null"),
        picture=imread(picture)[..., :3],
    )


def probe(page: str, folder: Path) -> Any:
    """What a page's script posts to the page around it, which is a phone wide; nothing may go wrong there."""
    (folder / "copy.html").write_text(page, encoding="utf-8")
    (folder / "around.html").write_text(AROUND, encoding="utf-8")
    seen = visit(folder / "around.html", folder / "visit")
    assert not seen.console
    (found,) = re.findall(r'<pre id="probe">(.*?)</pre>', seen.document)
    return json.loads(unescape(found))
