"""A federation of processes on loopback: SuperLink, node proxy and SuperNodes, with TLS and
temporary keys.

    python -m discreet.deployment.local_federation rounds=3

With `--data FOLDER` each folder in it is a node, with its owner's data and, optionally, policy."""

from __future__ import annotations

import argparse
import functools
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from discreet.data.description import DESCRIPTION
from discreet.deployment import flower_home
from discreet.deployment.certificates import PEERS_FILE, make_secrets
from discreet.deployment.flower_fixes.commands import clients_command
from discreet.deployment.flower_fixes.hand_over import SOCKET_VARIABLE
from discreet.deployment.flower_run import exit_code
from discreet.deployment.healthy import healthy
from discreet.deployment.interruption import override, resumable
from discreet.deployment.run_watch import RunWatch, follow
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.logs import log_to
from discreet.run_files.opening import check_output
from discreet.run_files.places import PACKAGE, app_folder
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder, read_status
from discreet.server.resolve import forbid_seed, resolve
from discreet.settings.rules import ConfigError, require_extra
from discreet.simulation.processes import RunLostError, end_carrying, scratch_folder

REPOSITORY = PACKAGE.parent  # the folder from which Discreet itself is imported
START_SECONDS = 90.0
END_SECONDS = 10.0
# seconds between polls of a node, and of all nodes together, so that many do not overload a machine
SHORTEST_PAUSE = 0.05
DEMONSTRATION_NODES = 4
POLICY = "policy.json"  # in a node's folder, if its owner has one
PATHS = ("data.path", "privacy.user.account")  # settings with a path, beside output_dir
SERVERS = ("httpx", "starlette", "uvicorn")  # packages of the node proxy
PROGRAM = ("python", "-m", "discreet.deployment.local_federation")


@dataclass
class Federation:
    """Starts processes with logs, and ends all of them. They end with this process, even by kill
    -9.

    Attributes:
      folder: the folder for all files. `secrets` in it is made by `make_secrets`; its nodes are
        registered.
      pause: seconds between two polls of a node.
    """

    folder: Path
    pause: float = SHORTEST_PAUSE
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = field(default_factory=flower_home.free_port)
    proxy_port: int = field(default_factory=flower_home.free_port)

    def __post_init__(self) -> None:
        self.home = self.folder / "home"
        self.secrets = self.folder / "secrets"
        self.environment = flower_home.flower_environment(self.home) | {
            "OMP_NUM_THREADS": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(self.pause),
            "PYTHONPATH": str(REPOSITORY),
        }
        # With bytecode files a node compiles an app once, not for every message.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.authority = self.secrets / "ca.crt"

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a process with its own log, to which a later process of the same name appends."""
        process = flower_home.start(
            command, self.log(name), folder=self.folder, environment=self.environment
        )
        self.processes[name] = process
        self.started.append(process)
        return process

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / f"{name}.log"

    def says(self, name: str) -> str:
        """The text that a process has logged so far."""
        return self.log(name).read_text(errors="replace")

    def start_superlink(self) -> None:
        """Starts the SuperLink and the node proxy if they are not running, and waits until both
        answer."""
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        options = {
            "secrets": self.secrets,
            "state": self.folder / "state",
            "port": self.port,
            "ready": ready,
        }
        self.start("superlink", _module("superlink", **options))
        if "gate" not in self.processes:
            options = {
                "upstream": f"https://127.0.0.1:{self.port}",
                "secrets": self.secrets,
                "port": self.proxy_port,
            }
            self.start("gate", _module("gate", **options))
        flower_home.wait_until(ready.exists, START_SECONDS, "the SuperLink knows the nodes' keys")
        url = f"https://127.0.0.1:{self.proxy_port}/health"
        flower_home.wait_until(
            lambda: healthy(url, authority=self.authority), START_SECONDS, "the node proxy answers"
        )
        flower_home.write_connection(
            self.home, address=f"127.0.0.1:{self.port}", authority=self.authority
        )

    def start_preforked_clients(self) -> None:
        """Starts one process of preforked clients for all nodes; on separate machines each node has
        its own."""
        path = self.folder / "clients"
        process = self.start("clients", clients_command(path))
        self.environment[SOCKET_VARIABLE] = str(path)
        flower_home.wait_until(
            lambda: path.exists() or process.poll() is not None,
            START_SECONDS,
            "ClientApps can be started",
        )

    def start_node(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Starts a SuperNode with the key and the ledger of its name; `words` come last and take
        precedence. The first start makes the ledger; a later one needs it."""
        ledger = self.folder / f"{name}.db"
        if not self.log(name).exists() and "--ledger" not in words:
            DurableLedger.create(ledger)
        options = {
            "superlink": f"127.0.0.1:{self.proxy_port}",
            "port": flower_home.free_port(),
            "authority": self.authority,
            "key": self.secrets / "nodes" / f"{name}.key",
            "ledger": ledger,
            "peers": self.secrets / "public" / PEERS_FILE,
        }
        return self.start(name, [*_module("supernode", **options), *words])

    def wait_for_nodes(self, names: Sequence[str], *, prepare_seconds: float = 0.0) -> None:
        """Waits until each of these SuperNodes is connected. `prepare_seconds`: the time that one
        needs before it starts. Raises RunLostError if one has ended."""
        # They start at the same time.
        seconds = START_SECONDS * max(1.0, len(names) / DEMONSTRATION_NODES) + prepare_seconds

        def is_let_in(name: str) -> bool:
            code = self.processes[name].poll()
            said = self.says(name)
            if code is not None and "SuperNode ID" not in said:
                last = " ".join(said.strip().splitlines()[-1:])
                raise RunLostError(
                    f"{name} has ended with {code} before it was connected; it said last: {last}"
                )
            return "SuperNode ID" in said

        for name in names:
            let_in = functools.partial(is_let_in, name)
            flower_home.wait_until(let_in, seconds, f"{name} is connected")

    def run(
        self, name: str, *overrides: str, app: Path | None = None, output: Path | None = None
    ) -> RunFolder:
        """Starts `flwr run`, by default in an output folder of that name, without waiting for
        it."""
        output = output or self.folder / name
        words = [*overrides, override("output_dir", output)]
        self.start(
            f"run-{name}", flower_home.flwr_run_command(self.folder / f"{name}.toml", words, app)
        )
        return RunFolder(output)

    def watch(self, run: RunFolder) -> RunWatch:
        """The processes of this federation that the run needs."""
        processes = self.processes
        nodes = {name: process for name, process in processes.items() if name.startswith("node-")}
        if "clients" in processes:
            helpers = {"the starter of ClientApps": processes["clients"]}
        else:
            helpers = {}
        return RunWatch(run, processes["superlink"], processes["gate"], nodes, helpers)

    def stop(self) -> None:
        """Ends every process of this federation."""
        for process in self.started:
            process.terminate()
        # Flower starts some processes in separate sessions.
        end_carrying("FLWR_HOME", str(self.home), signal.SIGTERM, signal.SIGKILL)
        for process in self.started:
            process.wait(timeout=END_SECONDS)


def _module(name: str, **options: object) -> list[str]:
    """The command line of a module in this package."""
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    return [sys.executable, "-m", f"{__package__}.{name}", *words]


def demonstration(count: int) -> list[list[str]]:
    """The options that give each of `count` nodes its share of the demonstration data."""
    return [["--partition", str(number), "--of", str(count)] for number in range(count)]


def owned(parent: Path) -> list[list[str]]:
    """The options for a node's data and policy, for each folder in `parent` with a `data.toml`, by
    name. Raises ConfigError if there is none."""
    folders = sorted(file.parent.resolve() for file in parent.glob(f"*/{DESCRIPTION}"))
    if not folders:
        raise ConfigError(
            f"--data: {parent} has no folder with a {DESCRIPTION}; each node needs one"
        )
    return [
        [
            "--data",
            str(folder),
            *(["--policy", str(folder / POLICY)] if (folder / POLICY).is_file() else []),
        ]
        for folder in folders
    ]


@contextmanager
def empty_federation(
    folder: Path, names: Sequence[str], *, pause: float = SHORTEST_PAUSE
) -> Iterator[Federation]:
    """A federation with a SuperLink, its node proxy, and keys of nodes that are not started yet;
    every process ends with the block."""
    make_secrets(folder / "secrets", names)
    federation = Federation(folder, pause)
    try:
        federation.start_superlink()
        yield federation
    finally:
        federation.stop()


@contextmanager
def federation_of(
    nodes: Sequence[Sequence[str]], folder: Path, *, ledgers: Path | None = None
) -> Iterator[Federation]:
    """A federation whose nodes are connected; every process ends with the block. `nodes`: the
    options of each node, as from `demonstration` and `owned`. `ledgers`: the folder of the nodes'
    ledgers, which outlive the federation."""
    names = [f"node-{number}" for number in range(len(nodes))]
    with empty_federation(folder, names, pause=max(1, len(nodes)) * SHORTEST_PAUSE) as federation:
        federation.start_preforked_clients()
        for name, data in zip(names, nodes, strict=True):
            if ledgers:
                ledger = ["--ledger", str(ledgers / f"{name}.db")]
            else:
                ledger = []
            federation.start_node(name, *data, *ledger)
        federation.wait_for_nodes(names)
        yield federation


def node_ledgers(run: RunFolder, count: int) -> list[Path]:
    """The ledgers of the nodes for a single run. They are in its folder, and a resumed run uses
    them."""
    return [run.path / "nodes" / f"node-{number}.db" for number in range(count)]


@dataclass(frozen=True)
class _Asked:
    """A command whose settings and ledgers were checked: the options of each node, the overrides of
    the run, and its folder."""

    nodes: Sequence[Sequence[str]]
    overrides: Sequence[str]
    run: RunFolder


def main(words: Sequence[str]) -> int:
    """Trains the experiment of docker-compose.yml over nodes on this machine; `words` are
    overrides.

    Exit code 0: the run folder is complete; 2: a setting is wrong.
    """
    arguments = _parser().parse_args(words)
    log_to(sys.stderr)
    try:
        asked = _checked(arguments)
    except (ConfigError, LedgerError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    count = len(asked.nodes)
    print(
        f"discreet: starting {count} nodes takes up to a minute; the run folder is "
        f"{asked.run.path}",
        file=sys.stderr,
    )
    if arguments.data is None:
        which = ("--nodes", str(count))
    else:
        which = ("--data", str(arguments.data.resolve()))
    with resumable(asked.run, *PROGRAM, *which):
        return _trained(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m discreet.deployment.local_federation", description=__doc__
    )
    parser.add_argument("--nodes", type=int, default=DEMONSTRATION_NODES)
    parser.add_argument("--data", type=Path, help="instead: the folder with a folder for each node")
    parser.add_argument(
        "overrides", nargs="*", help="of conf/config.yaml, for instance rounds=3 output_dir=RUN"
    )
    return parser


def _checked(arguments: argparse.Namespace) -> _Asked:
    """The checked command. Raises ConfigError, LedgerError before any process is started."""
    if arguments.data is None:
        nodes = demonstration(arguments.nodes)
    else:
        nodes = owned(arguments.data)
    defaults = [
        "experiment=deployment",
        f"data.num_clients={len(nodes)}",
        f"sampling.min_nodes={len(nodes)}",
    ]
    config, call = asked_settings(arguments.overrides, defaults=defaults)
    app_folder()
    require_extra(*SERVERS, why="the node proxy of a federation")
    run = check_output(call)
    forbid_seed(config.seed)
    resolve(config, resumed=call.resume)
    overrides = [from_here(word) for word in arguments.overrides]
    if call.resume:
        for ledger in node_ledgers(run, len(nodes)):
            DurableLedger(ledger).check()
    else:
        overrides = [*defaults, *overrides]
    return _Asked(nodes, overrides, run)


def from_here(word: str) -> str:
    """An override whose path, if it has one, holds in any folder: the server runs in another."""
    name, _, value = word.partition("=")
    path = value.strip("'\"")
    if name not in PATHS or path in ("", "null"):
        return word
    return override(name, Path(path).expanduser().resolve())


def _trained(asked: _Asked) -> int:
    """Runs the federation until its run has ended; returns the run's exit code."""
    run = asked.run
    before = read_status(run)
    for ledger in node_ledgers(run, len(asked.nodes)):
        # Ledgers exist if the run is resumed, or if an earlier attempt ended before it began.
        if not ledger.exists():
            DurableLedger.create(ledger)
    with (
        scratch_folder() as folder,
        federation_of(asked.nodes, folder, ledgers=run.path / "nodes") as federation,
    ):
        federation.run("run", *asked.overrides, output=run.path)
        follow(federation.processes["run-run"], federation.log("run-run"), federation.watch(run))
    return exit_code(run, before)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
