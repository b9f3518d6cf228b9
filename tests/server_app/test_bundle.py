"""The bundle that Flower sends to nodes: what a client runs, all of it, and nothing else; the
server runs its own."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

import strategies.dp_fedavg
from discreet.flower.serving import run
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder, read_status
from discreet.server.transport import MessagesTooLarge
from server_app.bundle_entry import OtherCodeError, use_installed
from strategies.dp_fedavg import dp_fedavg
from tests.conftest import REPOSITORY

# of Flower's build
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

# What nodes have gained lately: replies that leave whatever fails, random numbers of each example, a
# watch over items, columns that bend, least squares in one round, survival, computed weights, a check
# of Flower's own code, noise on a GPU, exact sums of a shared step, cells as they are written,
# batches whose rows share memory.
MOST_TOKENS = 177_200
# The rooms that nodes run, each whole: docs/deployment.md says of each why it is there.
ROOMS = {
    "accounting",
    "data",
    "layers",
    "ledger",
    "masking",
    "mechanisms",
    "models",
    "node",
    "per_example",
    "privacy",
}
ROOMS |= {"protocol", "queries", "settings", "training"}

# What a node does: its own packages are on the path, and the app's folder comes first.
IMPORT = """
import sys
import tokenize
sys.path.insert(0, sys.argv[1])
import client_app.client_app
names = ("client_app", "discreet", "strategies", "conf")
ours = [m for name, m in sys.modules.items() if name.split(".")[0] in names]
print([m.__file__ for m in ours if not str(m.__file__).startswith(sys.argv[1])], len(ours) > 30)
"""


@pytest.fixture(scope="module")
def built() -> bytes:
    return build_fab_from_disk(REPOSITORY)


@pytest.fixture(scope="module")
def bundle(built: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle").resolve()
    with zipfile.ZipFile(io.BytesIO(built)) as app:
        app.extractall(folder / "app")
    return folder / "app"


def test_a_run_started_in_the_image_sends_the_bundle_of_the_checkout(
    built: bytes, tmp_path: Path
) -> None:
    """docs/deployment.md starts runs by `docker compose exec`, and nodes compare digests."""
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY ")]
    app = Path("/opt/discreet")
    for *sources, target in copied:
        place = tmp_path / Path(target).relative_to(app) if target.startswith(str(app)) else None
        for source in sources if place else []:
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, place)
            else:
                shutil.copy(REPOSITORY / source, place)
    assert build_fab_from_disk(tmp_path) == built


def python_files(bundle: Path) -> set[str]:
    return {str(path.relative_to(bundle)) for path in bundle.rglob("*.py")}


def file_of(module: str) -> str | None:
    place = module.replace(".", "/")
    return next(
        (name for name in (f"{place}.py", f"{place}/__init__.py") if (REPOSITORY / name).is_file()),
        None,
    )


def imported_by(module: str, found: set[str]) -> set[str]:
    """The files of this repository that a module imports, at any depth and at any time."""
    file = file_of(module)
    if file is None or file in found:
        return found
    found.add(file)
    imported_by(module.rpartition(".")[0], found)
    for node in ast.walk(ast.parse((REPOSITORY / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                imported_by(name, found)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                imported_by(alias.name, found)
    return found


def test_it_holds_whole_rooms_with_every_import_of_a_client_and_the_servers_entry(
    bundle: Path,
) -> None:
    folders = ["client_app", "discreet", *(f"discreet/{room}" for room in ROOMS)]
    wanted = {path for folder in folders for path in (REPOSITORY / folder).glob("*.py")}
    entry = {"server_app/__init__.py", "server_app/bundle_entry.py"}
    assert python_files(bundle) == {str(path.relative_to(REPOSITORY)) for path in wanted} | entry
    needed = imported_by("client_app.client_app", set())
    assert needed <= python_files(bundle)
    assert {name.split("/")[1] for name in needed if name.count("/") == 2} == ROOMS


def tokens(text: str) -> int:
    """The names, operators and literals of a Python file, docstrings among them. An f-string is one
    literal: from Python 3.12 on it has tokens of its own."""
    begin, end = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
    counted = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING, begin}
    found = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        depth -= token.type == end
        found += depth == 0 and token.type in counted
        depth += token.type == begin
    return found


def test_a_nodes_people_have_at_most_so_much_python_to_read(bundle: Path) -> None:
    read = sum(tokens((bundle / name).read_text()) for name in python_files(bundle))
    assert read <= MOST_TOKENS


@pytest.mark.processes
def test_a_client_runs_from_the_bundle_alone(bundle: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT, str(bundle)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[] True\n"


@pytest.fixture
def app(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundle from which one package was imported already, as a simulation does."""
    subprocess.run(["cp", "-r", str(bundle), str(tmp_path / "app")], check=True)
    package = ModuleType("discreet.of_the_bundle")
    package.__path__ = [str(tmp_path / "app" / "discreet")]
    monkeypatch.setitem(sys.modules, "discreet.of_the_bundle", package)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "app"), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return tmp_path / "app"


def test_a_package_imported_meanwhile_by_another_thread_has_its_other_modules(
    app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_installed(app, [str(app), str(REPOSITORY)])
    assert sys.path[0] == str(REPOSITORY)
    assert list(sys.modules["discreet.of_the_bundle"].__path__) == [str(REPOSITORY / "discreet")]
    package = ModuleType("discreet.of_the_bundle")
    package.__path__ = [str(app / "discreet")]
    monkeypatch.setitem(sys.modules, "discreet.of_the_bundle", package)
    assert not (app / "discreet" / "flower").exists()
    found = importlib.util.find_spec("discreet.of_the_bundle.flower")
    assert found.origin == str(REPOSITORY / "discreet" / "flower" / "__init__.py")
    assert importlib.util.find_spec("discreet.of_the_bundle.nobody_has_it") is None


def test_a_server_with_the_wheel_takes_the_app_from_where_the_wheel_has_it(
    app: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(REPOSITORY / "discreet", site / "discreet")
    for name in ("client_app", "server_app"):
        shutil.copytree(REPOSITORY / name, site / "discreet" / "app" / name)
    use_installed(app, [str(app), str(site)])
    assert sys.path[:2] == [str(site), str(site / "discreet" / "app")]
    assert list(sys.modules["discreet.of_the_bundle"].__path__) == [str(site / "discreet")]


@pytest.mark.parametrize("name", ["discreet/logs.py", "discreet/more.py"])
def test_the_server_refuses_a_bundle_with_another_byte_or_another_file(
    app: Path, name: str
) -> None:
    with (app / name).open("a") as file:
        file.write("\n")
    before = list(sys.path)
    with pytest.raises(
        OtherCodeError, match=rf"{re.escape(name)} of this run is not the one installed in [^\n]*$"
    ):
        use_installed(app, [str(app), str(REPOSITORY)])
    with pytest.raises(OtherCodeError, match="not installed where the ServerApp runs"):
        use_installed(app, [str(app)])
    assert sys.path == before


def full_server() -> SimpleNamespace:
    """Knows two nodes, and takes no message: what a proxy with a limit does."""
    asked = httpx.Request("POST", "https://server/v1/runtime/push-messages")
    too_large = httpx.HTTPStatusError(
        "too large", request=asked, response=httpx.Response(413, request=asked)
    )
    nodes = GetNodesResponse(nodes=[NodeInfo(node_id=1), NodeInfo(node_id=2)])
    return SimpleNamespace(
        GetNodes=Mock(return_value=nodes), PushMessages=Mock(side_effect=too_large)
    )


def test_messages_that_are_too_large_end_the_run_with_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = HttpGrid(token="a token")
    grid.set_run(Run.create_empty(1))
    monkeypatch.setattr(grid, "_client", full_server())
    words = [
        "data.num_clients=2",
        "sampling.kind=everyone",
        "sampling.min_nodes=2",
        "privacy.delta=0.01",
        "rounds=1",
    ]
    asked = load_asked(
        [*words, "privacy.user.noise_multiplier=2", f"output_dir={tmp_path / 'run'}"]
    )
    with pytest.raises(MessagesTooLarge, match=r"round 1 .*too large \(HTTP 413\)"):
        run(grid, *asked, strategy=dp_fedavg)
    folder = RunFolder(tmp_path / "run")
    status = read_status(folder)
    assert status.state == "interrupted"
    assert "HTTP 413" in (status.reason or "")
    assert DurableLedger(folder.ledger_path).releases() == []


# What stays out of the bundle for nodes.
OF_SERVERS = {
    "server",
    "evaluation",
    "flower",
    "simulation",
    "deployment",
    "reporting",
    "audit",
    "cli",
    "dpsgd",
}


def names(settings: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in settings.items():
        found |= {prefix + name} | (
            names(value, f"{prefix}{name}.") if isinstance(value, dict) else set()
        )
    return found


def named_settings(text: str) -> set[str]:
    """`a.b` and `a.b.{c,d}` of the sections that a round reads."""
    found = set()
    for start, ends in re.findall(
        r"(?<![a-z.])((?:sampling|privacy|server)\.[a-z_.]*)(?:\{([a-z_0-9.,]+)\})?", text
    ):
        found |= {start + end for end in ends.split(",")} if ends else {start}
    return found


def test_every_setting_that_the_page_names_is_one() -> None:
    said = named_settings(strategies.dp_fedavg.__doc__ or "")
    assert len(said) >= 15
    assert said <= names(dataclasses.asdict(load_config([])))


def modules_of(name: str) -> set[str]:
    code = f"import sys, {name}; print(*[m for m in sys.modules if m.startswith('discreet.')])"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.processes
def test_the_server_does_not_load_reports() -> None:
    assert not {
        name
        for name in modules_of("server_app.server_app")
        if name.startswith("discreet.reporting")
    }


@pytest.mark.processes
def test_a_client_loads_nothing_of_the_servers() -> None:
    assert not {name.split(".")[1] for name in modules_of("client_app.client_app")} & OF_SERVERS
