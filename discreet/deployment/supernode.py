"""A SuperNode that is checked before it connects: `python -m discreet.deployment.supernode`.

Its data, policy and ledger are checked; then this process becomes `flower-supernode`
(`flower_fixes/commands.py`), with TLS and the node's own key. The preforked clients run beside it
(`flower_fixes/preforked_clients.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from discreet.data.folder import node_table
from discreet.deployment.flower_fixes import commands, hand_over
from discreet.deployment.flower_fixes.hand_over import POLICY_VARIABLE, SOCKET_VARIABLE
from discreet.deployment.flower_fixes.told_processes import (
    FLOWERS_SECONDS,
    LONGEST_PAUSE,
    SHORTEST_SECONDS,
)
from discreet.guard.site_check import check_site
from discreet.ledger.durable_ledger import DurableLedger
from discreet.logs import log_to
from discreet.node.account import Refused
from discreet.node.policy import TASK, policy_from, words_of
from discreet.node.secure_aggregation import GUARD, KEY, NAME, PEERS, STATE, files_of, read_identity
from discreet.settings.rules import ConfigError
from discreet.simulation.processes import SCRATCH, removed_folder

logger = logging.getLogger("discreet.node")

PEM = (
    "its first line must be -----BEGIN CERTIFICATE-----, with no byte order mark; of a binary "
    "one, openssl x509 -inform der -in FILE makes it"
)
LONGEST_SECONDS = 60.0  # largest allowed pause of a node


def node_config(arguments: argparse.Namespace) -> dict[str, str | int]:
    """The node configuration, which Flower passes on to each ClientApp of this node. Raises
    ConfigError: no data are named, or two data sets."""
    given = arguments
    config = dict[str, str | int]()
    if given.guard is not None:
        _check_no_more_than_the_guard(given)
        return _peers_of(given, given.guard.with_name("masking"))
    if given.ledger is None:
        raise ConfigError("give --ledger, this node's account")
    if (given.data is None) == (given.partition is None):
        raise ConfigError("give either --data FOLDER or --partition NUMBER --of COUNT")
    if given.partition is not None:
        if given.of is None or not 0 <= given.partition < given.of:
            raise ConfigError(
                f"--partition must be within 0 and --of ({given.partition} of {given.of})"
            )
        config = {"partition-id": given.partition, "num-partitions": given.of}
        if given.task is not None:
            config[TASK] = given.task
    paths = {"ledger": given.ledger, "data": given.data, "policy": given.policy}
    config |= {name: str(path.resolve()) for name, path in paths.items() if path is not None}
    return config | _peers_of(given, given.ledger.with_suffix(".masking"))


def _peers_of(given: argparse.Namespace, state: Path) -> dict[str, str | int]:
    """A node's settings for secure aggregation: its name, key, peers, and a folder for its state,
    by default `state`."""
    if given.peers is None:
        return {}
    paths = {KEY: given.key, PEERS: given.peers, STATE: given.masking_state or state}
    return {
        NAME: given.name or given.key.stem,
        **{name: str(path.resolve()) for name, path in paths.items()},
    }


def _check_no_more_than_the_guard(given: argparse.Namespace) -> None:
    """Raises ConfigError for options that a guarded node takes from guard.toml, or that it does not
    support."""
    for name in ("data", "partition", "of", "ledger", "policy", "task"):
        if getattr(given, name) is not None:
            raise ConfigError(
                f"--{name} goes without --guard: guard.toml says which data, account and policy"
            )


@contextmanager
def _about(option: str) -> Iterator[None]:
    """A context in which errors name the option that they are about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise ConfigError(f"{option}: {error}") from error
        raise ConfigError(f"{option}: {error.filename}: {error.strerror}") from error
    except (ValueError, Refused) as error:
        raise ConfigError(f"{option}: {error}") from error


def check(arguments: argparse.Namespace, config: dict[str, str | int]) -> None:
    """Raises ConfigError if anything is wrong on the node itself: data that do not fit, a policy
    that can't be read, a ledger that is missing, damaged or old, a key that is not in the list of
    peers, or a pause out of range."""
    pause: float = arguments.longest_pause
    if not SHORTEST_SECONDS <= pause <= LONGEST_SECONDS:
        raise ConfigError(
            f"--longest-pause must be from {SHORTEST_SECONDS} to {LONGEST_SECONDS:g} s (got "
            f"{pause:g})"
        )
    with _about("--authority"):
        check_authority(arguments.authority)
    _check_peers(arguments, config)
    if arguments.guard is not None:
        check_site(arguments.guard)
        return
    with _about("--policy"):
        policy = policy_from(config)
    logger.info("%s", words_of(policy))
    if policy.public_num_examples is not None:
        said = "DP-SGD uses public-num-examples=%d: its guarantee is add or remove one example"
        logger.info(said, policy.public_num_examples)
    with _about("--ledger"):
        DurableLedger(arguments.ledger).check()
    if arguments.data is not None and arguments.task is not None:
        with _about("--data"):
            examples, _ = node_table(arguments.data, arguments.task)
        logger.info("%d examples of %s", len(examples), arguments.task)


def check_authority(path: Path) -> None:
    """Raises ValueError unless a file holds certificates in Flower's format; with a wrong file
    Flower would try to connect forever. Raises OSError: the file can't be read."""
    content = path.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=content.decode("ascii")
        )
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{path} holds no certificate in PEM: {PEM}") from error


def _check_peers(arguments: argparse.Namespace, config: dict[str, str | int]) -> None:
    """Raises ConfigError if a key is not in the list of peers, or if an app would get the key of a
    guard."""
    guarded = arguments.guard is not None
    if arguments.key.stem.endswith(GUARD) and not guarded:
        raise ConfigError(f"--key: {arguments.key} is a guard's key, and no app may have it")
    if arguments.peers is not None:
        with _about("--peers"):
            count = len(read_identity(files_of(None, config), guarded=guarded)[1].keys)
        logger.info("secure aggregation: this node is %s among %d", config[NAME], count)


def supernode_command(arguments: argparse.Namespace, config: dict[str, str | int]) -> list[str]:
    """The command line, with values of the configuration quoted for Flower."""
    for name, value in config.items():
        if '"' in str(value):
            raise ConfigError(f"{name}: a path must not hold a quotation mark ({value})")
    words = " ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
        for name, value in config.items()
    )
    started = commands.command("supernode")
    if arguments.guard is not None:
        guarded = commands.command("guarded", str(arguments.guard.resolve()))
        started = [*guarded, "--isolation", "process"]
    command = [
        *started,
        "--superlink",
        arguments.superlink,
        "--root-certificates",
        str(arguments.authority),
        "--auth-supernode-private-key",
        str(arguments.key),
        "--host",
        "127.0.0.1",
        "--port",
        str(arguments.port),
        *(("--node-config", words) if words else ()),
    ]
    if arguments.max_retries is None:
        return command
    return [*command, "--max-retries", str(arguments.max_retries)]


def start_preforked_clients() -> None:
    """Starts the preforked clients unless the environment names some, and makes Flower find them.
    They end with this process, also after it has become a SuperNode, and their cached features are
    removed then."""
    if SOCKET_VARIABLE not in os.environ:
        folder, _ = removed_folder()
        path = folder / "clients"
        subprocess.Popen(commands.clients_command(path), env={**os.environ, SCRATCH: str(folder)})
        os.environ[SOCKET_VARIABLE] = str(path)
    first = [str(Path(hand_over.__file__).parent), str(Path(sys.executable).parent)]
    os.environ["PATH"] = os.pathsep.join([*first, os.environ.get("PATH", os.defpath)])


def _add_masking(parser: argparse.ArgumentParser) -> None:
    """Adds a node's options for secure aggregation."""
    parser.add_argument(
        "--peers",
        type=Path,
        help="for secure aggregation: all nodes' public keys, which the owners have compared",
    )
    parser.add_argument(
        "--name", help="this node's name in that list (default: the file name of its key)"
    )
    parser.add_argument(
        "--masking-state", type=Path, help="a folder for its state (default: beside the ledger)"
    )


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m discreet.deployment.supernode", description=__doc__
    )
    parser.add_argument("--superlink", required=True, help="host:port of the server's node proxy")
    parser.add_argument("--authority", type=Path, required=True, help="ca.crt of the federation")
    parser.add_argument("--key", type=Path, required=True, help="this node's private key")
    parser.add_argument("--ledger", type=Path, help="its account, made by discreet ledger create")
    guard = (
        "a guard.toml: this node runs any app, on blocks of patients, and each patient stays "
        "private"
    )
    parser.add_argument("--guard", type=Path, help=guard)
    parser.add_argument(
        "--policy",
        type=Path,
        help="a JSON file: the least privacy that this node accepts. Apps that do not ask it are "
        "refused: all but Discreet's own and those with one of its mods",
    )
    _add_masking(parser)
    parser.add_argument("--data", type=Path, help="a folder with data.toml: this node's own data")
    parser.add_argument(
        "--task", help="the task that the data are checked for at start, or are a share of"
    )
    parser.add_argument(
        "--partition", type=int, help="instead of --data: a share of the demonstration data"
    )
    parser.add_argument("--of", type=int, help="how many shares there are")
    parser.add_argument(
        "--port", type=int, default=9094, help="on loopback, for this node's own processes"
    )
    pause = (
        "seconds between looks for a message while there is nothing to do (default: 3; with "
        "hundreds of nodes 20)"
    )
    parser.add_argument("--longest-pause", type=float, default=FLOWERS_SECONDS, help=pause)
    parser.add_argument(
        "--max-retries", type=int, help="give up after so many attempts to connect (default: never)"
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Checks the node, and becomes a SuperNode; exit code 2 for an error."""
    arguments = _parsed(words)
    log_to(sys.stdout)
    try:
        config = node_config(arguments)
        check(arguments, config)
        command = supernode_command(arguments, config)
    except ConfigError as error:
        logger.error("discreet: %s", error)
        return 2
    logger.info("starting %s", shlex.join(command))
    os.environ[LONGEST_PAUSE] = str(arguments.longest_pause)
    if arguments.policy is not None:
        os.environ[POLICY_VARIABLE] = "1"
    if arguments.guard is None:
        start_preforked_clients()
    sys.stdout.flush()
    return os.execvp(command[0], command)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
