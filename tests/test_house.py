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
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("discreet", "strategies", "client_app", "server_app", "benchmarks")
# The rooms of the library from the ground up: a room may import itself and those below it.
# "discreet" alone is its log.
FLOORS = (
    "discreet",
    "discreet.accounting",
    "discreet.privacy",
    "discreet.masking",
    "discreet.layers",
    "discreet.per_example",
    "discreet.settings",
    "discreet.ledger",
    "discreet.protocol",
    "discreet.data",
    "discreet.models",
    "discreet.queries",
    "discreet.training",
    "discreet.mechanisms",
    "discreet.node",
    "discreet.dpsgd",
    "discreet.planning",
    "discreet.run_files",
    "discreet.server",
    "discreet.tables",
    "discreet.flower",
    "discreet.reporting",
    "discreet.simulation",
    "discreet.guard",
    "discreet.deployment",
    "discreet.audit",
    "discreet.cli",
    "strategies",
    "client_app",
    "server_app",
    "benchmarks",
)
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PRIVACY_KNOWS_NOT = {"flwr", "hydra", "omegaconf", "sklearn", "flwr_datasets"}


def room(module: str) -> str:
    """The room of a module: of the library's own modules at the top that of the command, which is
    above all others."""
    if module in ("discreet", "discreet.__main__"):
        return "discreet.cli" if module == "discreet.__main__" else "discreet"
    name = ".".join(module.split(".")[:2])
    return name if name in FLOORS else module.split(".")[0]


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_one_way() -> None:
    upward = set()
    for path in FILES:
        here = module_of(path)
        if here == "discreet":
            continue  # the face of the library names what is public, from every room
        for name in (each for each in imports(path) if each.split(".")[0] in FOLDERS):
            if FLOORS.index(room(name)) > FLOORS.index(room(here)):
                upward.add((here.removeprefix("discreet."), name.removeprefix("discreet.")))
    assert upward == set()


def test_privacy_knows_no_flower_no_hydra_and_no_task() -> None:
    rooms = ("accounting", "privacy", "layers", "per_example", "masking")
    for path in (path for name in rooms for path in (ROOT / "discreet" / name).rglob("*.py")):
        assert not {name.split(".")[0] for name in imports(path)} & PRIVACY_KNOWS_NOT, path


def test_no_cycle_between_modules() -> None:
    graph = {
        module_of(path): {name for name in imports(path) if name.split(".")[0] in FOLDERS}
        for path in FILES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                yield f"{module_of(path)}.{node.name}", node


STRATEGY = {f"discreet.flower.strategy.{name}" for name in ("__init__", "start")}
# Public signatures that follow those of Flower, or of Opacus, so that code written for them goes
# on, and the options of the command's verbs.
AS_ELSEWHERE = {
    *STRATEGY,
    "discreet.dpsgd.dpsgd.__init__",
    "discreet.flower.local_dp_mod.local_dp_mod",
    *(f"{module_of(path)}.command" for path in (ROOT / "discreet" / "cli").glob("*.py")),
}


def test_functions_are_short_and_have_few_parameters() -> None:
    # The docstring counts as its purpose, not as its length.
    found, long = {}, {}
    for name, node in functions():
        lines = (
            (node.end_lineno or 0)
            - node.lineno
            - (ast.get_docstring(node, clean=False) or "").count("\n")
        )
        if lines > 42 and name not in AS_ELSEWHERE:
            long[name] = lines
        if name in AS_ELSEWHERE - STRATEGY:
            continue
        given = [
            each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        count = len(given) + (node.args.kwarg is not None) - (given[:1] in (["self"], ["cls"]))
        if count > (20 if name in STRATEGY else 5):
            found[name] = count
    assert (found, long) == ({}, {})


def test_settings_end_at_the_door() -> None:
    """A plan's settings are read where they are decided and where they are written to a file."""
    doors = {
        "server/table_rule.py": {"with_step"},
        "server/run_context.py": {"open_run"},
        "server/session.py": {"normalised"},
        "flower/serving.py": {"ask_and_end"},
    }
    assert reads_of("settings", "plan") == {
        (file, name) for file, names in doors.items() for name in names
    }


def test_the_settings_of_a_request_end_at_the_doors_of_a_node() -> None:
    """Policy, admission and mechanisms have numbers in their place (`node/promise.py`)."""
    doors = {
        "flower/secure_sum_mod.py": {"_read_work"},
        "guard/masked_blocks.py": {"_sum_of"},
        "node/client.py": {"noised_vector", "_check_model"},
        "node/nodes.py": {"virtual_client", "node_client", "_split"},
        "node/secure_aggregation.py": {"answer_masking"},
        "node/work.py": {"declaring", "sized", "query", "_query", "work_of", "check_names"},
        "protocol/messages.py": {"no_outside_name"},
        "simulation/cohort.py": {"_vectors"},
    }
    doors["node/work.py"] |= {"least_user_noise", "planned_user_epsilon"}
    assert reads_of("run", "request") == {
        (file, name) for file, names in doors.items() for name in names
    }


def reads_of(attribute: str, of: str) -> set[tuple[str, str]]:
    """The files and functions that read an attribute of variables, or of attributes, whose names
    end with `of`."""
    return {
        (str(path.relative_to(ROOT / "discreet")), function.name)
        for path in (ROOT / "discreet").rglob("*.py")
        for function in nodes_of(path)
        if isinstance(function, ast.FunctionDef)
        for read in ast.walk(function)
        if isinstance(read, ast.Attribute)
        and read.attr == attribute
        and getattr(read.value, "attr", getattr(read.value, "id", "")).endswith(of)
    }


def test_files_are_short() -> None:
    long = {
        module_of(path): text.count("\n")
        for path in FILES
        if (text := path.read_text()).count("\n") > 500
    }
    assert long == {}


def test_the_name_of_a_test_has_at_most_80_characters() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 80] == []


def is_pair(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def is_swap(node: ast.Assign) -> bool:
    """Whether a tuple is assigned to names that its values read: a swap, or a step of two."""
    read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    written = {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
    return bool(read & written)


def test_code_says_one_thing_a_statement() -> None:
    pairs, conditionals, nested, lines = [], 0, [], 0
    for path in (ROOT / "discreet").rglob("*.py"):
        lines += sum(bool(line.strip()) for line in path.read_text().splitlines())
        for node in nodes_of(path):
            if isinstance(node, ast.Assign) and is_pair(node) and not is_swap(node):
                pairs.append(f"{path.name}:{node.lineno}")
            if isinstance(node, ast.IfExp):
                conditionals += 1
                if any(isinstance(each, ast.IfExp) for each in (node.body, node.orelse)):
                    nested.append(f"{path.name}:{node.lineno}")
    assert (pairs, nested) == ([], [])
    assert 1000 * conditionals / lines < 10


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: lines
        for name, lines in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
    }
    wanted = [*project["dependencies"], *itertools.chain(*extras.values())]
    declared = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in wanted}
    homes = importlib.metadata.packages_distributions()
    # pfl-research is compared only if somebody installed it; Triton comes with PyTorch for CUDA
    ours = {
        *FOLDERS,
        "tests",
        "examples",
        "pfl",
        "triton",
    }
    foreign = (
        {name.split(".")[0] for path in FILES for name in imports(path)}
        - ours
        - sys.stdlib_module_names
    )
    missing = {
        name
        for name in foreign
        if not {home.lower().replace("_", "-") for home in homes.get(name, ["?"])} & declared
    }
    assert missing == set()


def parameters(node: ast.AST) -> set[str]:
    """The names that a docstring explains: parameters, or the fields of a class and its `__init__`."""
    if isinstance(node, ast.FunctionDef):
        return {
            each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        }
    assert isinstance(node, ast.ClassDef)
    fields = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    starts = [each for each in node.body if getattr(each, "name", "") == "__init__"]
    return fields.union(*(parameters(each) for each in starts))


def test_each_item_of_a_docstring_begins_a_line() -> None:
    joined = []
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                said := ast.get_docstring(node)
            ):
                names = "|".join(parameters(node)) or "-"
                items = re.split("(?:Args|Attributes):", said)[1:]
                found = re.findall(rf"[.;] ({names}): ", "".join(items))
                joined += [(path.name, node.name, name) for name in found]
    assert joined == []
