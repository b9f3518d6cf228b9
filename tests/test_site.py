"""The site: it builds without a warning, needs no other host, and its pages hold what they promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import discreet
from discreet.federated.prices import sampled_prices

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NAMED_ONLY = {"canonical", "next", "prev"}  # links of a page's head that a browser does not fetch


class Fetched(HTMLParser):
    """Collects what a browser fetches of its own accord to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(FETCHED.get(tag, ""))
        if address and given.get("rel") not in NAMED_ONLY:
            self.found.append(address)


def fetched(page: str) -> list[str]:
    parser = Fetched()
    parser.feed(page)
    return parser.found


def from_elsewhere(addresses: list[str]) -> list[str]:
    return [address for address in addresses if re.match(r"(\w+:)?//", address)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    sources = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert sources - {path.relative_to(site) for path in site.rglob("*.html")} == set()


def test_a_reader_can_search_for_what_a_docstring_says(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    hits = [entry["location"] for entry in entries if "analytic_gaussian_noise_multiplier" in entry["location"]]
    assert hits == ["api/privacy.html#discreet.privacy.mechanisms.analytic_gaussian_noise_multiplier"]


def test_every_name_that_a_reference_page_lists_is_shown_with_its_docstring(site: Path) -> None:
    for source in (DOCS / "api").glob("*.md"):
        page = (site / "api" / f"{source.stem}.html").read_text()
        names = re.findall(r"^::: ([\w.]+)$", source.read_text(), flags=re.MULTILINE)
        assert names
        assert [name for name in names if f'id="{name}"' not in page] == []


@pytest.mark.parametrize("name", discreet.__all__)
def test_every_name_of_the_package_has_its_place_in_the_reference(site: Path, name: str) -> None:
    public = getattr(discreet, name)
    page = (site / "api" / "discreet.html").read_text()
    assert f'id="{public.__module__}.{name}"' in page
    assert f"discreet.{name}" in page


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        text = path.read_text()
        styles = re.findall(r"url\([\"']?([^)\"']+)|@import\s+[\"']([^\"']+)", text) if path.suffix == ".css" else []
        addresses = [one or other for one, other in styles] or fetched(text)
        assert from_elsewhere(addresses) == [], path


def test_a_page_that_fetches_from_another_host_would_be_found() -> None:
    assert from_elsewhere(fetched('<script src="https://cdn.example/x.js"></script>')) == ["https://cdn.example/x.js"]
    assert from_elsewhere(fetched('<link rel="stylesheet" href="//fonts.example/x.css">')) == ["//fonts.example/x.css"]


def prices() -> list[list[str]]:
    """The rows of the first page's table of noise multipliers."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / "index.md").read_text().splitlines()]
    return [row for row in rows if len(row) == 8 and row[0].isdigit()]


@pytest.mark.parametrize("row", prices(), ids=lambda row: f"{row[0]}_clients")
def test_calibrate_gives_the_prices_of_the_first_page(row: list[str]) -> None:
    clients, cohort, rounds, delta, noise = int(row[0]), int(row[1]), int(row[2]), float(row[3]), row[5]
    poisson, _, _, everyone = sampled_prices(clients, cohort)
    assert [f"{price.noise(2.0, rounds, delta):.5g}" for price in (poisson, everyone)] == [noise, row[7]]


def test_the_first_page_has_prices_for_small_and_large_federations() -> None:
    assert [row[0] for row in prices()] == ["200", "1000", "6000", "100000"]
