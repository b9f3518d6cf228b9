"""The site: it builds without a warning, needs no other host, and its pages hold what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from discreet.server.prices import sampled_prices

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", path.read_text())
        elsewhere = [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:\w+:)?//""", tag)]
        assert [tag for tag in elsewhere if not re.search("rel=.?(canonical|next|prev)", tag)] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"""(?:url\(|@import\s+)["']?(?:\w+:)?//""", path.read_text()), path


def prices() -> list[list[str]]:
    """The rows of the first page's table of noise multipliers."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / "index.md").read_text().splitlines()]
    return [row for row in rows if len(row) == 8 and row[0].isdigit()]


@pytest.mark.parametrize("row", prices())
def test_calibrate_gives_the_prices_of_the_first_page(row: list[str]) -> None:
    clients, cohort, rounds, delta, noise = int(row[0]), int(row[1]), int(row[2]), float(row[3]), row[5]
    poisson, _, _, everyone = sampled_prices(clients, cohort)
    assert [f"{price.noise(2.0, rounds, delta):.5g}" for price in (poisson, everyone)] == [noise, row[7]]
