"""Ends the log of a run that has failed with a line that says so, and with it `flwr run --stream` with exit code 1.

Flower's ends with 0 at the end of the log, whatever became of the run, and if the ServerApp was killed without a word.
Its command knows no other end of a log that is an error than a message which it can't read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flwr.common.constant import Status, SubStatus
from flwr.proto.control_pb2 import RegisterNodeRequest, StreamLogsResponse
from flwr.server.superlink.linkstate import LinkState
from flwr.superlink.servicer.control import control_handlers

from discreet.deployment.flower_fixes import Fixes

# Bytes in the place of a StreamLogsResponse's text that are none.
UNREADABLE = RegisterNodeRequest(public_key=b"\xff")
UNKNOWN = "Task failed with unknown error."  # Flower's words if the ServerApp has ended the run itself
SAYS = (
    "discreet: run {run} {what}. What is spent stays spent. If it has a run folder, it goes on by resume=true "
    "output_dir=FOLDER, once nobody writes there. (The next line is flwr's: its exit code is 1)\n"
)

whole_log = control_handlers._stream_logs


def stream_logs(
    run: int, task: int, after: float, state: LinkState, is_active: Callable[[], bool] | None
) -> Iterator[StreamLogsResponse | RegisterNodeRequest]:
    """Flower's `_stream_logs`, and the end of a run that has not completed."""
    yield from whole_log(run, task, after, state, is_active)
    status = state.get_run_info(run_ids=[run])[0].status
    if status.status == Status.FINISHED and status.sub_status != SubStatus.COMPLETED:
        why = "the reason is above" if status.details == UNKNOWN else status.details
        what = "was stopped" if status.sub_status == SubStatus.STOPPED else f"has failed ({why})"
        yield StreamLogsResponse(log_output=SAYS.format(run=run, what=what), latest_timestamp=after)
        yield UNREADABLE


FIXES: Fixes = {"failed_runs": ((control_handlers, "_stream_logs", stream_logs),)}
