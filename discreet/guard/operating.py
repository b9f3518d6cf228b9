"""Blocks that a site's operators run beside a guard's own: to check its walls, or to try an app."""

from __future__ import annotations

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

from discreet.guard.block_task import SELF_TEST, BlockTask
from discreet.guard.guard_policy import GuardPolicy
from discreet.guard.sandbox import BlockInput, BlockResult, Sandbox, SandboxError
from discreet.guard.site_blocks import archive_of
from discreet.guard.site_guard import block_limits


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
