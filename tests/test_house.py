"""The rules of the house, read from the tree itself."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("discreet", "strategies", "client_app", "server_app", "benchmarks")
ROOMS = (
    *("discreet.privacy", "discreet.tasks", "discreet.training", "discreet.federated", "discreet.reporting"),
    *("discreet.client", "discreet.central", "discreet.simulation", "discreet.deployment", "discreet.audit"),
    *("discreet.masking", "discreet.mechanisms", "discreet.cli"),
)

# Who may import whom: a folder may import itself and what is listed. "discreet" alone means its settings and its log.
BELOW_FEDERATED = {
    "discreet",
    *(f"discreet.{name}" for name in ("privacy", "masking", "mechanisms", "tasks", "training")),
}
BELOW_REPORTING = BELOW_FEDERATED | {"discreet.federated"}
LIBRARY = {"discreet", *ROOMS}
MAY = {
    "discreet.privacy": set[str](),
    "discreet.masking": {"discreet.privacy"},
    "discreet": {"discreet.privacy"},
    "discreet.tasks": {"discreet", "discreet.privacy"},
    "discreet.training": {"discreet", "discreet.privacy", "discreet.tasks"},
    "discreet.mechanisms": {"discreet", "discreet.privacy", "discreet.tasks", "discreet.training"},
    "discreet.federated": BELOW_FEDERATED,
    "discreet.reporting": BELOW_REPORTING,
    "discreet.client": BELOW_REPORTING,
    "discreet.central": BELOW_REPORTING,
    "discreet.simulation": BELOW_REPORTING | {"discreet.client"},
    "discreet.deployment": BELOW_REPORTING | {"discreet.client"},
    "discreet.audit": LIBRARY - {"discreet.audit", "discreet.cli"},
    "discreet.cli": LIBRARY - {"discreet.cli"},
    "strategies": LIBRARY - {"discreet.cli"},
    "client_app": LIBRARY - {"discreet.cli"},
    "server_app": LIBRARY - {"discreet.cli"} | {"strategies"},
    "benchmarks": {*LIBRARY, *FOLDERS},
}
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PRIVACY_KNOWS_NOT = {"flwr", "hydra", "omegaconf", "sklearn", "flwr_datasets"}


def room(module: str) -> str:
    if module == "discreet.__main__":
        return "discreet.cli"
    for name in ROOMS:
        if module == name or module.startswith(f"{name}."):
            return name
    return module.split(".")[0]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_one_way() -> None:
    upward = {}
    for path in FILES:
        here = room(module_of(path))
        ours = {room(name) for name in imports(path) if name.split(".")[0] in FOLDERS}
        if not ours <= MAY[here] | {here}:
            upward[module_of(path)] = ours - MAY[here]
    assert upward == {}


def test_privacy_knows_no_flower_no_hydra_and_no_task() -> None:
    for path in (ROOT / "discreet" / "privacy").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & PRIVACY_KNOWS_NOT, path


def test_no_cycle_between_modules() -> None:
    graph = {module_of(path): {name for name in imports(path) if name.split(".")[0] in FOLDERS} for path in FILES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done or name not in graph:
            return
        for needed in graph[name]:
            visit(needed, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{module_of(path)}.{node.name}", node


def test_functions_are_short() -> None:
    # The docstring counts as its purpose, not as its length.
    found = {}
    for name, node in functions():
        text = ast.get_docstring(node, clean=False) or ""
        lines = (node.end_lineno or 0) - node.lineno - text.count("\n")
        if lines > 40 and name not in AS_ELSEWHERE:
            found[name] = lines
    assert found == {}


# Public signatures that follow those of Flower, or of Opacus, so that code written for them goes on, and the options of
# the command's verbs.
AS_ELSEWHERE = {
    *(f"discreet.flower.strategy.{name}" for name in ("__init__", "start")),
    "discreet.dpsgd.dpsgd.__init__",
    *(f"{module_of(path)}.command" for path in (ROOT / "discreet" / "cli").glob("*.py")),
}


def test_functions_have_few_parameters() -> None:
    found = {}
    for name, node in functions():
        if name in AS_ELSEWHERE:
            continue
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(given) - (given[:1] in (["self"], ["cls"]))
        if count > 5:
            found[name] = count
    assert found == {}


def test_files_are_short() -> None:
    long = {module_of(path): text.count("\n") for path in FILES if (text := path.read_text()).count("\n") > 400}
    assert long == {}


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    wanted = [*project["dependencies"], *itertools.chain(*extras.values())]
    declared = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in wanted}
    homes = importlib.metadata.packages_distributions()
    ours = {*FOLDERS, "tests", "examples", "pfl"}  # pfl-research is compared only if somebody installed it
    foreign = {name.split(".")[0] for path in FILES for name in imports(path)} - ours - sys.stdlib_module_names
    missing = {
        name for name in foreign if not {home.lower().replace("_", "-") for home in homes.get(name, ["?"])} & declared
    }
    assert missing == set()
