"""Makes what a SuperLink does for each call less, where it does nothing with it.

Every call of a node or a ServerApp passes Flower's middlewares for all of its interfaces, each of which costs tasks and
streams and looks at the path alone to see that the call is not for it; and whoever asks for the state of a run first
writes to the database, to mark tasks whose time is over, although there is next to never one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.date import now
from flwr.supercore.sql_mixin import SqlMixin, _current_sessions
from flwr.supercore.state.schema.corestate_models import Task
from flwr.superlink.routers.control import middlewares as control
from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from starlette.middleware.base import BaseHTTPMiddleware

from discreet.deployment.flower_fixes.applies import applies

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONTROL, FLEET, RUNTIME = PATHS = ("/v1/control/", "/v1/fleet/", "/v1/runtime/")
CONCERNS = {
    control.ControlSensitiveResponseMiddleware: CONTROL,
    control.ControlAuthenticationMiddleware: CONTROL,
    control.ControlLicenseMiddleware: CONTROL,
    control.ControlEventLogMiddleware: CONTROL,
    NodeAuthMiddleware: FLEET,
    FleetEventLogMiddleware: FLEET,
}
LAYERS_EXPECTED, MARKS_EXPECTED = "030c4f25a26d", "98e7fb627601"
OTHERS = {layer: tuple(path for path in PATHS if path != concern) for layer, concern in CONCERNS.items()}
PREDICATES = (control._is_control_path, sorted(control.CONTROL_SENSITIVE_ROUTE_KEYS))
TASKS = (SqlCoreState._cleanup_expired_task_tokens, SqlLinkState.get_run_status, SqlMixin.session)

full_call = BaseHTTPMiddleware.__call__
mark_tasks = SqlCoreState._cleanup_expired_task_tokens


async def call(layer: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
    """A middleware's `__call__`, which hands on at once what is for another of Flower's interfaces.

    With a path before the application's own Flower's middlewares and its routes may see different paths: then each
    middleware decides for itself.
    """
    if scope["type"] == "http" and not scope.get("root_path") and scope["path"].startswith(OTHERS[type(layer)]):
        await layer.app(scope, receive, send)
    else:
        await full_call(layer, scope, receive, send)


def mark_tasks_that_are_over(state: SqlCoreState) -> None:
    """Flower's `_cleanup_expired_task_tokens`, which writes only if there is something to write.

    Within a transaction it is Flower's own: what comes after it there may count on the lock that writing takes.
    """
    if state._session_scope not in (_current_sessions.get() or {}):
        with state.session() as session:
            over = session.query(Task.task_id).filter(Task.token.is_not(None), Task.active_until < now())
            if over.first() is None:
                return
    mark_tasks(state)


def shorten_calls() -> None:
    """Makes the SuperLink that this process becomes do so."""
    if applies("call_layers", *CONCERNS, *PREDICATES, expected=LAYERS_EXPECTED):
        for layer in CONCERNS:
            layer.__call__ = call  # type: ignore[method-assign]
    if applies("task_marks", *TASKS, expected=MARKS_EXPECTED):
        SqlCoreState._cleanup_expired_task_tokens = mark_tasks_that_are_over  # type: ignore[method-assign, assignment]
