"""A page in a real browser: Debian's chromium, headless, at a width and in a colour scheme."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY = "no browser: apt-get install chromium"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=WHY)

# Runs in a frame of the given width: a window may not be narrower than a browser allows.
PROBE = """<!doctype html><html><body style="margin:0"><iframe id="page" style="border:0">
</iframe><pre id="said"></pre>
<script>
const frame = document.getElementById("page");
frame.width = WIDTH; frame.height = 20000;
frame.onload = () => {
  const page = frame.contentDocument, root = page.documentElement;
  const style = frame.contentWindow.getComputedStyle;
  const edge = (each) => each.getBoundingClientRect();
  const cut = [...page.querySelectorAll("figure svg")].flatMap((svg) => {
    const outer = edge(svg);
    return [...svg.querySelectorAll("text")].filter((text) => {
      const inner = edge(text);
      return inner.right > outer.right + 1 || inner.left < outer.left - 1
        || inner.bottom > outer.bottom + 1;
    }).map((text) => svg.getAttribute("aria-label") + ": " + text.textContent.trim());
  });
  const inks = [...page.querySelectorAll("figure svg text")].map((text) => style(text).fill);
  document.getElementById("said").textContent = JSON.stringify({
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    width: root.clientWidth, content: root.scrollWidth, cut,
    background: style(page.body).backgroundColor, ink: style(page.body).color,
    inks: [...new Set(inks)],
  });
};
frame.srcdoc = PAGE;
</script></body></html>
"""


def looked_at(page: Path, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """What a browser makes of a page: sizes, colours, and texts of pictures that are cut off."""
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    probe = folder / f"probe_{width}_{dark}.html"
    probe.write_text(PROBE.replace("WIDTH", str(width)).replace("PAGE", text))
    words = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
    ]
    words += [
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=20000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*words, probe.as_uri()], capture_output=True, text=True, timeout=240, check=False
    )
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(unescape(found[1]))
    return said
