"""Patches of a SuperLink, by name: docs/flower_fixes.md gives the reasons. Functions have Flower's
names."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from flwr.common.constant import SUPERLINK_NODE_ID, Status, SubStatus
from flwr.proto.control_pb2 import RegisterNodeRequest, StreamLogsResponse
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.date import now
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink import extensions
from flwr.superlink.servicer.control import control_handlers

from discreet.deployment.flower_fixes import local_callers

# In milliseconds; KiB (SQLite's default); bytes. With Flower's values each of up to fifteen
# connections would cache 64 MB and map 256 MB.
PRAGMAS = {"busy_timeout": "120000", "cache_size": "-2000", "mmap_size": "0"}
EVERY = 2**25  # bytes of contents between two garbage collections, which take about 20 ms
# A message to the server itself, or a requested reply, has been read when its row is gone.
CONTENTS = (
    "SELECT message_id FROM message_ins WHERE message_id = :message AND dst_node_id != :server "
    "UNION ALL "
    "SELECT message_id FROM message_res WHERE reply_to_message_id = :message AND delivered_at = ''"
)
OVER = "SELECT message_id FROM message_ins WHERE created_at + ttl <= :now"
# Invalid bytes in place of a StreamLogsResponse's text: the only end of a log that makes `flwr run`
# fail.
UNREADABLE = RegisterNodeRequest(public_key=b"\xff")
# Flower's message if the ServerApp has ended the run itself
UNKNOWN = "Task failed with unknown error."
SAYS = (
    "discreet: run {run} {what}. What is spent stays spent. If it has a run folder, it is resumed "
    "by resume=true output_dir=FOLDER, once nobody writes there. (The next line is flwr's: its "
    "exit code is 1)\n"
)

put_content = SqlObjectStore.put
get_content = SqlObjectStore.get
delete_rows = SqlLinkState.delete_messages
begin_session = SqlLinkState.start_session
whole_log = control_handlers._stream_logs
since_collection = [0]  # bytes of contents stored and read


def _came(size: int) -> None:
    """Counts content, and collects garbage now and then. Content would stay in memory after a call:
    Starlette's middlewares leave reference cycles, which Python collects by the number of objects,
    whatever their size."""
    since_collection[0] += size
    if since_collection[0] >= EVERY:
        since_collection[0] = 0
        gc.collect()


def put(store: SqlObjectStore, object_id: str, object_content: bytes) -> None:
    """Stores content, and collects garbage now and then."""
    _came(len(object_content))
    put_content(store, object_id, object_content)


def get(store: SqlObjectStore, object_id: str) -> bytes | None:
    """Reads content, and collects garbage now and then."""
    content = get_content(store, object_id)
    _came(len(content or b""))
    return content


def delete_messages(state: SqlLinkState, message_ins_ids: set[str]) -> None:
    """Deletes messages with their content, and the content of replies that nobody has read."""
    with state.session():
        asked = [{"message": name, "server": SUPERLINK_NODE_ID} for name in message_ins_ids]
        contents = [row["message_id"] for one in asked for row in state.query(CONTENTS, one)]
        delete_rows(state, message_ins_ids)
        for name in contents:
            state.object_store.delete(name)


def start_session(state: SqlLinkState, run_id: int) -> str:
    """Deletes all expired messages before a sender starts. Discreet's expire with their round."""
    with state.session():
        over = state.query(OVER, {"now": now().timestamp()})
        state.delete_messages({row["message_id"] for row in over})
    return begin_session(state, run_id)


def stream_logs(
    run: int, task: int, after: float, state: LinkState, is_active: Callable[[], bool] | None
) -> Iterator[StreamLogsResponse | RegisterNodeRequest]:
    """The log of a run. If the run has not completed, the reason and the bytes that make `flwr run`
    exit with 1 follow."""
    yield from whole_log(run, task, after, state, is_active)
    status = state.get_run_info(run_ids=[run])[0].status
    if status.status == Status.FINISHED and status.sub_status != SubStatus.COMPLETED:
        if status.details == UNKNOWN:
            why = "the reason is above"
        else:
            why = status.details
        if status.sub_status == SubStatus.STOPPED:
            what = "was stopped"
        else:
            what = f"has failed ({why})"
        yield StreamLogsResponse(log_output=SAYS.format(run=run, what=what), latest_timestamp=after)
        yield UNREADABLE


# its package has a function of this name
command = import_module("flwr.superlink.cli.flower_superlink")
SMALL = tuple({**dict(sql_mixin.SQLITE_PRAGMAS), **PRAGMAS}.items())  # type: ignore[attr-defined]
FIXES: dict[str, list[tuple[Any, str, object]]] = {
    "database": [(sql_mixin, "SQLITE_PRAGMAS", SMALL)],
    "content_garbage": [(SqlObjectStore, "put", put), (SqlObjectStore, "get", get)],
    "unread_messages": [
        (SqlLinkState, "delete_messages", delete_messages),
        (SqlLinkState, "start_session", start_session),
    ],
    "local_callers": [
        (extensions, "get_middleware", local_callers.middleware),
        (command, "uvicorn", local_callers.SERVER),
    ],
    "failed_runs": [(control_handlers, "_stream_logs", stream_logs)],
}
