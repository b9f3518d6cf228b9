"""Runs a whole app in one block, on public rows, for `discreet site try`.

Its ServerApp uses a grid whose nodes are its own ClientApp, in the same process. Nothing is
clipped, noised or charged, and every error is shown. Server and client run inside the sandbox, so a
site can try an app that it has not reviewed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

NODES = 4  # that the grid says it has


class OwnGrid:
    """A grid whose nodes are one ClientApp on one table. The app starts anew for each message."""

    def __init__(self, app: Any, context: Any) -> None:
        self.app = app
        self.context = context
        self.replies: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        """The numbers of the nodes."""
        return list(range(1, NODES + 1))

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Answers messages at once and keeps the answers."""
        numbers = []
        for message in messages:
            number = f"m{len(self.replies)}"
            message.metadata.__dict__["_message_id"] = number
            self.replies[number] = self.app(message=message, context=self.context)
            _say_norm(message, self.replies[number])
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """The answers to some messages."""
        return [self.replies[number] for number in message_ids]

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> list[Any]:
        """The answers to messages."""
        return self.pull_messages(self.push_messages(messages))


def run_whole(app: tuple[str, str, str], context: Any) -> None:
    """Loads both parts of an installed app, and runs its ServerApp with a grid of its ClientApp."""
    from flwr.clientapp.utils import get_load_client_app_fn
    from flwr.common.config import get_project_config, get_project_dir
    from flwr.serverapp import ServerApp
    from flwr.supercore.object_ref import load_app

    client = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)(*app)
    folder = get_project_dir(*app)
    components = get_project_config(folder)["tool"]["flwr"]["app"]["components"]
    server = load_app(components["serverapp"], ImportError, folder)
    if not isinstance(server, ServerApp):
        raise TypeError(f"{components['serverapp']} is not a ServerApp")
    server(OwnGrid(client, context), context)  # type: ignore[arg-type]


def _say_norm(message: Any, reply: Any) -> None:
    """Prints the norm of the difference between a reply's arrays and those that were sent, which a
    guard would clip."""
    if reply.has_error() or not message.has_content():
        return
    sent = {
        name: each
        for record in message.content.array_records.values()
        for name, each in record.items()
    }
    square = 0.0
    size = 0
    for record in reply.content.array_records.values():
        for name, each in record.items():
            if name in sent:
                moved = np.asarray(each.numpy(), np.float64) - np.asarray(
                    sent[name].numpy(), np.float64
                )
                square = square + float((moved**2).sum())
                size = size + moved.size
    if size:
        print(
            f"guard: {size} values, an update of norm {square**0.5:.4g} before clipping", flush=True
        )
