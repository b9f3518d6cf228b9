"""Tools for a site's operators beside running the guard: check its walls, try an app."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.common.serde import context_to_proto

from discreet.guard.block_task import SELF_TEST, TRIAL, BlockTask
from discreet.guard.guard_policy import ALL_BLOCKS, BlockSettings, GuardPolicy
from discreet.guard.sandbox import BlockInput, BlockResult, Sandbox, SandboxError
from discreet.guard.site_blocks import archive_of
from discreet.guard.site_guard import block_limits
from discreet.settings.rules import ConfigError

TRIAL_SECONDS = 120.0


@contextmanager
def started(policy: GuardPolicy) -> Iterator[Sandbox]:
    """The sandbox of a site, until the end of a with block."""
    sandbox = Sandbox(policy)
    try:
        yield sandbox
    finally:
        sandbox.close()


def broken_walls(sandbox: Sandbox) -> list[str]:
    """The resources that can be reached from a block of a site's sandbox and must not be; empty if
    the walls hold. SandboxError: a block in it can't be started."""
    policy = sandbox.policy
    with tempfile.TemporaryDirectory() as folder, listening(Path(folder)) as (port, path):
        facts = {
            "site": policy.blocks.folder,
            "ledger": policy.ledger,
            "port": str(port),
            "socket": str(path),
            "guard": str(os.getpid()),
        }
        (result,) = run_in(sandbox, task_of(policy, SELF_TEST, facts=facts), [archive_of({})])
    lines = result.log.decode(errors="replace").strip().splitlines()
    try:
        return [str(each) for each in json.loads(lines[-1])]
    except (IndexError, ValueError) as error:
        raise SandboxError(f"the self-test did not run: {' '.join(lines[-1:])}") from error


@contextmanager
def listening(folder: Path) -> Iterator[tuple[int, Path]]:
    """A TCP port and a UNIX socket that take connections."""
    path = folder / "socket"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        yield int(tcp.getsockname()[1]), path


def try_app(app: Path, mock: Path, policy: GuardPolicy) -> tuple[str, bool]:
    """The output of an app that runs as a whole in a block, on the public rows in `mock`; and
    whether it ended without an error."""
    from discreet.guard.patient_blocks import mock_archive

    bundle = bundle_of(app)
    if not mock.is_dir():
        raise ConfigError(f"--mock: {mock} is not a folder")
    config, name, version = described_bundle(bundle)
    digest = hashlib.sha256(bundle).hexdigest()
    task = task_of(policy, TRIAL, bundle=bundle, app=(name, version, digest), config=config)
    with started(policy) as sandbox:
        (result,) = run_in(sandbox, task, [mock_archive(mock)])
    return result.log.decode(errors="replace"), bool(result.state)


def bundle_of(app: Path) -> bytes:
    """The bundle of an app: a .fab file, or a folder that is packed as `flwr build` does."""
    from flwr.cli.build import build_fab_from_disk

    if app.is_dir():
        return build_fab_from_disk(app)
    try:
        return app.read_bytes()
    except OSError as error:
        raise ConfigError(f"{app} can't be read: {error.strerror}") from error


def described_bundle(bundle: bytes) -> tuple[dict[str, Any], str, str]:
    """The run configuration of a bundle, its id and its version."""
    from flwr.common.config import flatten_dict, get_fab_config, get_metadata_from_config

    config = get_fab_config(bundle)
    name, version = get_metadata_from_config(config)
    return dict(flatten_dict(config["tool"]["flwr"]["app"].get("config", {}))), name, version


def trial_policy(mock: Path) -> GuardPolicy:
    """A policy for trials without a guard.toml."""
    blocks = BlockSettings(folder=str(mock), id="-", count=2)
    return GuardPolicy(
        ledger="-", blocks=blocks, max_epsilon=1.0, max_delta=1e-5, min_noise_multiplier=1.0,
        block_seconds=TRIAL_SECONDS, any=True, charge=ALL_BLOCKS,
    )  # fmt: skip


def task_of(policy: GuardPolicy, instead: str, **more: Any) -> BlockTask:
    """A task of the site's own operators. `more`: fields of `BlockTask`, and the run's `config`."""
    context = Context(1, 1, {}, RecordDict(), more.pop("config", {}))
    empty: dict[str, Any] = {"app": ("", "", ""), "bundle": b"", "message": b"", "metric": ""}
    return BlockTask(
        **{**empty, "run_id": 1, "node_id": 1, "names": (), "sizes": (), **more},
        context=context_to_proto(context).SerializeToString(),
        limits=block_limits(policy),
        instead=instead,
    )


def run_in(sandbox: Sandbox, task: BlockTask, archives: Sequence[bytes]) -> list[BlockResult]:
    """The results of some blocks."""
    with ExitStack() as files:
        blocks = []
        for number, archive in enumerate(archives):
            file = files.enter_context(tempfile.TemporaryFile())
            file.write(archive)
            file.flush()
            blocks.append(BlockInput(number, file.fileno(), b""))
        return list(sandbox.run(task, blocks))
