"""The app inside a block: unpacks the guard's task, runs the ClientApp as Flower does, and writes
one vector.

This runs inside the sandbox, in a process that has only its own block of the site's data. Its
output is read as bytes and never parsed."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tarfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from discreet.guard.block_task import CHANNELS, PART, SELF_TEST, TRIAL, BlockTask
from discreet.guard.channels import TURN, take_part
from discreet.guard.kernel_stores import all_channels
from discreet.guard.self_test import reached
from discreet.guard.whole_app import run_whole

if TYPE_CHECKING:
    from flwr.app import Context


def _context_of(task: BlockTask, state: bytes, data: Path) -> Context:
    """The context that the app sees: its own state, and the folder of the block as its data."""
    from flwr.common.serde import context_from_proto, recorddict_from_proto
    from flwr.proto.message_pb2 import Context as ContextProto
    from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 1
    TaskIdentity.run_id = task.run_id
    TaskIdentity.node_id = task.node_id
    context: Context = context_from_proto(ContextProto.FromString(task.context))
    context.node_config = {"data": str(data)}
    if state:
        context.state = recorddict_from_proto(RecordDictProto.FromString(state))
    return context


def unpack(archive: bytes, folder: Path) -> None:
    """Writes the files of a block, which `site split` has packed, into a folder."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        # Python before 3.11.4, such as Debian 12's, has no filters.
        files.extraction_filter = getattr(tarfile, "data_filter", None)
        files.extractall(folder)


def run_app(task: BlockTask, *, archive: bytes, state: bytes, data: Path, out: int) -> None:
    """Runs the app on the files of one block, in the folder `data`. Writes the vector that leaves
    and then the app's state to `out`. Raises whatever the app raises."""
    from flwr.app import Message
    from flwr.cli.install import install_from_fab
    from flwr.clientapp.utils import get_load_client_app_fn
    from flwr.common.serde import message_from_proto, recorddict_to_proto
    from flwr.proto.message_pb2 import Message as MessageProto

    unpack(archive, data)
    seed_anew()
    if task.instead == SELF_TEST:
        print(json.dumps(reached(task.facts)), flush=True)
        return
    if task.instead == CHANNELS:
        part = json.loads((data / PART).read_bytes())
        channels = all_channels(side_by_side=part["role"] != TURN)
        with os.fdopen(out, "wb") as pipe:  # as a state, which may be longer than a log
            pipe.write(json.dumps(take_part(channels, part)).encode())
        return
    context = _context_of(task, state, data)
    install_from_fab(task.bundle, skip_prompt=True)
    if task.instead == TRIAL:
        run_whole(task.app, context)
        os.write(out, b"1")  # as a state: the app has ended without an error
        return
    app = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)(*task.app)
    message: Message = message_from_proto(MessageProto.FromString(task.message))
    reply = app(message=message, context=context)
    if task.metric:
        vector = metric_vector(reply, task.metric)
    else:
        vector = array_vector(reply, task)
    kept = recorddict_to_proto(context.state).SerializeToString()
    with os.fdopen(out, "wb") as pipe:
        pipe.write(vector)
        pipe.write(kept)


def array_vector(reply: Any, task: BlockTask) -> bytes:
    """The arrays of a reply, under the names that were sent, as float32. ValueError: they do not
    fit."""
    import numpy as np

    for record in reply.content.array_records.values():
        if set(task.names) <= set(record):
            values = [np.asarray(record[name].numpy(), np.float32).ravel() for name in task.names]
            if tuple(each.size for each in values) != task.sizes:
                raise ValueError(
                    "an array of the app's reply differs in size from the array that was sent"
                )
            return b"".join(each.tobytes() for each in values)
    raise ValueError(f"the app's reply has no record with the arrays {', '.join(task.names)}")


def metric_vector(reply: Any, name: str) -> bytes:
    """The number of that name in a reply, as float32. ValueError: there is none."""
    import numpy as np

    for record in reply.content.metric_records.values():
        if isinstance(record.get(name), int | float):
            return np.float32(record[name]).tobytes()
    raise ValueError(f"the app's reply has no metric {name}")


def seed_anew() -> None:
    """Gives each block its own random seeds: a fork copies the generators of its parent."""
    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()


def run_and_end(app: Callable[[], None]) -> NoReturn:
    """The life of a process that was forked for an app: it ends with 0, or with 1 and its error in
    the log, and does nothing of what its parent would do at its end."""
    code = 1
    try:
        app()
        code = 0
    except BaseException:  # noqa: BLE001  (of the app: its log is the site's alone)
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


def flush_output() -> None:
    """Writes what the process has printed, if anybody still reads it."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
