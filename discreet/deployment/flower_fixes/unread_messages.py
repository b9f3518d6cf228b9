"""Deletes from a SuperLink's state what nobody will read any more, round by round.

Flower deletes the content of a message when its receiver confirms that it has it, and the rest when a node calls after
the end of the run. So what was sent to a node that is gone stays, and so does a reply that came when nobody looked for
it any more: as much as a model, for each round in which that happens, until the run is over. Here the content goes with
the message, and messages go when their time is over: Discreet gives each message its round's time.
"""

from __future__ import annotations

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.date import now

from discreet.deployment.flower_fixes import Fixes

# A message to the server itself is read when its row is gone, and so is a reply that somebody has asked for.
CONTENTS = (
    "SELECT message_id FROM message_ins WHERE message_id = :message AND dst_node_id != :server UNION ALL "
    "SELECT message_id FROM message_res WHERE reply_to_message_id = :message AND delivered_at = ''"
)
OVER = "SELECT message_id FROM message_ins WHERE created_at + ttl <= :now"

delete_rows, begin_session = SqlLinkState.delete_messages, SqlLinkState.start_session


def delete_messages(state: SqlLinkState, message_ins_ids: set[str]) -> None:
    """Flower's function of this name, and the content too: of the messages, and of replies that nobody has read."""
    with state.session():
        asked = [{"message": name, "server": SUPERLINK_NODE_ID} for name in message_ins_ids]
        contents = [row["message_id"] for one in asked for row in state.query(CONTENTS, one)]
        delete_rows(state, message_ins_ids)
        for name in contents:
            state.object_store.delete(name)


def start_session(state: SqlLinkState, run_id: int) -> str:
    """Flower's function of this name: somebody is about to send. First all messages go whose time is over."""
    with state.session():
        over = state.query(OVER, {"now": now().timestamp()})
        state.delete_messages({row["message_id"] for row in over})
    return begin_session(state, run_id)


FIXES: Fixes = {
    "unread_messages": (
        (SqlLinkState, "delete_messages", delete_messages),
        (SqlLinkState, "start_session", start_session),
    )
}
