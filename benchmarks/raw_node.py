"""A node with arbitrary replies, for tests and benchmarks: it speaks Flower's protocol, and a
function computes its answers.

It runs in a thread of the calling process, over the same TLS connection and with the same kind of
key as a SuperNode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

Behaviour = Callable[[Message], RecordDict | None]
PAUSE = 0.1
START_SECONDS = 60.0


@contextmanager
def raw_node(
    address: str, *, authority: Path, key: Path, behaviour: Behaviour, pause: float = PAUSE
) -> Iterator[None]:
    """A context in which every message is answered with the result of `behaviour`; for None there
    is no answer. `pause`: the seconds between two polls. Raises TimeoutError if the node can't
    connect."""
    ended = threading.Event()
    connected = threading.Event()
    private = load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)

    def serve() -> None:
        keys = (private, private.public_key())
        with http_request_response(
            address, False, authority.read_bytes(), keys, max_retries=3
        ) as connection:
            connected.set()
            while not ended.wait(pause):
                try:
                    _answer_one(connection, behaviour)
                except RunNotRunningException:
                    continue  # the run is over, and nobody waits for this answer

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        if not connected.wait(START_SECONDS):
            raise TimeoutError(f"{key.stem} was not accepted within {START_SECONDS:g} s")
        yield
    finally:
        ended.set()
        thread.join(30)


def _answer_one(connection: tuple[Any, ...], behaviour: Behaviour) -> None:
    _, receive, send, _, _, pull_object, push_object, confirm = connection
    received = receive()
    if received is None:
        return
    head, tree = received
    run_id = head.metadata.run_id
    message_id = head.metadata.message_id
    names = [part.object_id for part in iterate_object_tree(tree)]
    contents = pull_objects(names, pull_object_fn=lambda name: pull_object(run_id, name))
    message = inflate_object_from_contents(message_id, contents)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = message_id
    confirm(run_id, message_id)
    content = behaviour(message)
    if content is None:
        return
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    wanted, session = send(reply, get_object_tree(reply), 0.0)
    for name, part in get_all_nested_objects(reply).items():
        if name in wanted:
            push_object(run_id, session, name, part.deflate())
