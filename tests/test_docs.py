"""The pages: named tests exist, commands and prices are right, nothing is fetched from elsewhere,
and the notebook runs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

import discreet
from discreet import DPSGD, LoopPrivacy
from discreet.cli.verbs import VERBS
from discreet.ledger.durable_ledger import DurableLedger
from discreet.planning.prices import sampled_prices
from discreet.run_files.compose import load_asked, load_config
from discreet.server.round import one_round
from tests.command import calibrate

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def named_tests(text: str) -> list[tuple[str, str]]:
    return NAMED.findall(text)


@cache
def defined_in(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_a_test_that_is_named_exists() -> None:
    named = named_tests((DOCS / "privacy.md").read_text())
    assert [(file, name) for file, name in named if name not in defined_in(ROOT / file)] == []


def test_every_guarantee_names_its_tests() -> None:
    sections = re.split(r"^## ", (DOCS / "privacy.md").read_text(), flags=re.MULTILINE)
    of_clients = ("Example level", "Local", "What a client can do")
    for title in (
        "User level",
        "Clients who take turns",
        "Another Flower app",
        *of_clients,
        "The account",
        "Noise",
    ):
        (section,) = (text for text in sections if text.startswith(title))
        assert len(named_tests(section)) >= 5, title


def test_every_page_is_in_the_nav_of_the_site() -> None:
    named = set(re.findall(r"[\w/]+\.md\b", (ROOT / "mkdocs.yml").read_text()))
    # Reports for another project are no pages of this one.
    pages = {
        str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "upstream"
    }
    assert pages - named == set(), "add these pages to the nav in mkdocs.yml"
    assert named - pages == set(), "the nav in mkdocs.yml names pages that are not there"


SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Each line of a page's bash blocks, as words; a line that ends in a backslash goes on."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [in_container(words) for words in found if words]


def in_container(words: list[str]) -> list[str]:
    """The words that a service of the compose file is told to run, if there are any."""
    if words[:3] == ["docker", "compose", "exec"]:
        assert words[3] in SERVICES, words
        return words[4:]
    return words


LINES = [words for page in PAGES for words in commands(page)]


def overrides_of(words: list[str]) -> list[str]:
    """The Hydra overrides of a command that takes them; of a sweep the first value of each."""
    if words[0] == "scripts/run" or words[:2] in (["discreet", "run"], ["discreet", "simulate"]):
        given = [word for word in words if re.match(r"^[\w.]+=", word)]
        return [
            word.split(",")[0] if "--multirun" in words and "[" not in word else word
            for word in given
        ]
    if words[:2] == ["flwr", "run"] and "--run-config" in words:
        text = words[words.index("--run-config") + 1]
        return shlex.split(re.sub(r"^overrides=", "", text).strip('"'))
    return []


def test_a_command_names_what_is_there() -> None:
    assert len(commands(ROOT / "README.md")) >= 8
    for words in LINES:
        if words[0].startswith("scripts/"):
            assert (ROOT / words[0]).exists(), words
        if words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists(), words
        if words[0] == "discreet":
            assert words[1] in VERBS, words


def test_the_overrides_of_a_command_compose() -> None:
    every = {
        tuple(word for word in overrides_of(words) if not word.startswith("hydra"))
        for words in LINES
    }
    for given in every - {()}:
        assert (
            load_asked([*given], of_sweep=any(word.endswith("_sweep") for word in given))[0].rounds
            >= 1
        )


@pytest.mark.parametrize(
    "words", [words for words in LINES if words[:2] == ["discreet", "calibrate"]]
)
def test_calibrate_answers(words: list[str]) -> None:
    assert calibrate(words[2:]) == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.mark.processes
def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", path.read_text())
        elsewhere = [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:\w+:)?//""", tag)]
        assert [
            tag for tag in elsewhere if not re.search("rel=.?(canonical|next|prev)", tag)
        ] == [], path
    for path in site.rglob("*.css"):
        assert not re.search(r"""(?:url\(|@import\s+)["']?(?:\w+:)?//""", path.read_text()), path


def test_both_first_pages_say_the_accuracy_of_the_default_run_that_was_measured() -> None:
    runs = [
        line.split(",")
        for line in (DOCS / "results" / "default_run.csv").read_text().splitlines()[1:]
    ]
    first = load_config().privacy.user.clip.norm
    measured = [100 * float(accuracy) for norm, accuracy in runs if float(norm) == first]
    assert len(measured) >= 5
    said = f"{sum(measured) / len(measured):.0f} %"
    assert f"{said} accuracy on a public test set, epsilon 8" in (ROOT / "README.md").read_text()
    assert f"the default has 200 clients, and reaches {said}" in (DOCS / "index.md").read_text()
    assert (
        f"{min(measured):.1f} %, the highest at {max(measured):.1f} %"
        in (ROOT / "README.md").read_text()
    )


@pytest.mark.processes
def test_the_loop_of_the_readme_runs_as_it_stands() -> None:
    (loop,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, check=True)
    found = re.fullmatch(r"accuracy (0\.\d+) at epsilon (\d\.\d+)\n", done.stdout)
    assert found is not None
    assert float(found[1]) > 0.8
    assert 2.9 < float(found[2]) <= 3.0
    assert not done.stderr


def test_a_loss_that_is_paid_for_as_the_guide_says_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (paying,) = re.findall(
        r"```python\n((?:(?!```).)*ledger\.charge.*?)```",
        (DOCS / "guide" / "dpsgd.md").read_text(),
        re.DOTALL,
    )
    monkeypatch.chdir(tmp_path)
    DurableLedger.create(tmp_path / "ledger.db")
    model = nn.Linear(5, 3)
    inputs, targets = torch.ones(40, 5), torch.zeros(40, dtype=torch.int64)
    loop = DPSGD(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(inputs, targets),
        batch_size=10, epochs=1, delta=1e-3,
        privacy=LoopPrivacy(noise_multiplier=2.0, ledger="ledger.db"),
    )  # fmt: skip
    loop.step(*next(iter(loop)))
    before = loop.epsilon()
    names = {"private": loop, "model": model, "inputs": inputs, "targets": targets}
    exec(paying, {"torch": torch, "nn": nn, **names})
    assert loop.epsilon() > before
    assert len(DurableLedger(tmp_path / "ledger.db").releases()) == 2


def test_the_pages_have_at_most_36_000_words() -> None:
    # Neither the history nor reports for another project.
    pages = [path for path in DOCS.rglob("*.md") if path.parent.name != "upstream"]
    # The name of a test beside a claim is a link, and no word to read.
    named = re.compile(r"`tests/[^`]*::[^`]*`,?")
    texts = [named.sub("", path.read_text()) for path in pages if path.name != "history.md"]
    words = sum(len(text.split()) for text in texts)
    assert words <= 36_000


def test_accuracies_on_the_first_page_are_those_of_the_results() -> None:
    first, results = ((DOCS / f"{name}.md").read_text() for name in ("index", "results"))
    measured = [float(number) for number in re.findall(r"\b\d\d\.\d\b", results)]
    said = re.findall(r"\b(\d\d(?:\.\d)?) %", first)
    assert len(said) >= 9
    assert [
        each for each in said if each not in {str(n) for n in measured} | rounded(measured)
    ] == []


def rounded(numbers: list[float]) -> set[str]:
    return {f"{number:.0f}" for number in numbers}


def prices() -> list[list[str]]:
    """The rows of the first page's table of noise multipliers."""
    rows = [line.strip("| ").split(" | ") for line in (DOCS / "index.md").read_text().splitlines()]
    return [row for row in rows if len(row) == 8 and row[0].isdigit()]


@pytest.mark.parametrize("row", prices())
def test_calibrate_gives_the_prices_of_the_first_page(row: list[str]) -> None:
    clients, cohort, rounds, delta, noise = (
        int(row[0]),
        int(row[1]),
        int(row[2]),
        float(row[3]),
        row[5],
    )
    poisson, _, _, everyone = sampled_prices(clients, cohort)
    assert [f"{price.noise(2.0, rounds, delta):.5g}" for price in (poisson, everyone)] == [
        noise,
        row[7],
    ]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """docs/hooks/notebook_page.py, which is no package."""
    spec = importlib.util.spec_from_file_location(
        "notebook_page", ROOT / "docs" / "hooks" / "notebook_page.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_cell_in_order(tool: ModuleType) -> None:
    text, at = tool.PAGE.read_text(), 0
    for cell in tool.nbformat.read(tool.NOTEBOOK, as_version=4).cells:
        found = text.find(tool.source_of(cell), at)
        assert found >= 0, (
            f"run python docs/hooks/notebook_page.py: the page lacks {cell.source[:60]!r}"
        )
        at = found + len(cell.source)


def test_the_page_of_the_package_lists_what_the_package_has() -> None:
    listed = re.findall(
        r"^::: [\w.]+\.(\w+)$",
        (ROOT / "docs" / "api" / "discreet.md").read_text(),
        flags=re.MULTILINE,
    )
    assert sorted(listed) == sorted(discreet.__all__)
    assert all(getattr(discreet, name).__name__ == name for name in listed)


@pytest.mark.slow
def test_all_cells_run_and_end_within_the_budget(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    said = "\n".join(tool.said_by(cell) for cell in tool.executed().cells)
    assert "round 15/15" in said
    assert "epsilon user 8.000" in said
    assert "user -> all data of one client" in said


def test_the_page_of_a_round_in_the_design_is_the_code() -> None:
    source = inspect.getsource(one_round)
    page = source[source.index("    number =") :].rstrip()
    assert page in (ROOT / "docs" / "design.md").read_text()
