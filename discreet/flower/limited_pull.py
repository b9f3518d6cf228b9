"""Pulls replies from a SuperLink, each up to a limit.

Flower stores equal pieces of an array once and joins them when it unpacks a message, so a node can
turn ten megabytes into gigabytes. Here a reply's size is known before anything is unpacked, and
pulling stops at the limit. The SuperLink, which knows the node, states which message a reply
belongs to; the reply's own statement is not trusted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid.http_grid import HttpGrid

from discreet.flower.untrusted_replies import strange
from discreet.protocol.messages import MalformedMessage
from discreet.server.transport import Failure

# The field that names the messages whose replies are wanted; the second one since Flower 1.43.
FIELDS = ("message_ids", "reply_to_message_ids")


def pull_replies(
    grid: HttpGrid, numbers: Sequence[str], *, most: int
) -> Iterator[tuple[str, Message | Failure]]:
    """The available replies to these messages, each with the number of its message, as
    `HttpGrid.pull_messages` gives them. A reply of more than `most` bytes, packed or unpacked, is a
    failure, with the client number 0."""
    client = grid._runtime_client
    run_id = grid.run.run_id
    answer = client.PullMessages(_request(numbers))
    pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, run_id)
    for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
        number = head.metadata.reply_to_message_id
        name = head.metadata.message_id
        try:
            reply: Message | Failure = _unpacked(name, _pulled(tree, pull, most), most)
        except ObjectPullError as error:
            yield number, Failure(0, "late", f"its content never came: {error}")
            continue
        except MalformedMessage as error:
            reply = Failure(0, "malformed", str(error))
        received = ConfirmMessageReceivedRequest(
            node=grid.node, run_id=run_id, message_object_id=name
        )
        client.ConfirmMessageReceived(received)
        yield number, reply


def _request(numbers: Sequence[str]) -> PullAppMessagesRequest:
    before, now = FIELDS
    if before in PullAppMessagesRequest.DESCRIPTOR.fields_by_name:
        return PullAppMessagesRequest(**{before: numbers})
    return PullAppMessagesRequest(**{now: {"vals": numbers}})


def _pulled(tree: ObjectTree, pull: Callable[[str], bytes], most: int) -> dict[str, bytes]:
    """The contents of a message's objects by their numbers. Raises MalformedMessage as soon as they
    exceed `most` bytes."""
    # `counted` runs in several threads of Flower.
    size = 0
    lock = threading.Lock()

    def counted(name: str) -> bytes:
        nonlocal size
        content = pull(name)
        with lock:
            size += len(content)
        if size > most:
            raise MalformedMessage(
                f"the reply has more than {most} bytes, the most that what was asked can take"
            )
        return content

    with strange():
        names = [*{part.object_id: None for part in iterate_object_tree(tree)}]
    return pull_objects(names, counted)


def _unpacked(name: str, contents: dict[str, bytes], most: int) -> Message:
    with strange():
        size = sum(_unpacked_size(content, contents) for content in contents.values())
        if size > most:
            raise MalformedMessage(
                f"the reply unpacks to {size} bytes, of {most} that what was asked can take"
            )
        message = inflate_object_from_contents(name, contents)
        if not isinstance(message, Message):
            raise MalformedMessage(f"the reply is a {type(message).__name__}, no message")
        message.metadata.__dict__["_message_id"] = name
        return message


def _unpacked_size(content: bytes, contents: Mapping[str, bytes]) -> int:
    """The unpacked size of an object in bytes. An array names a piece once for each occurrence."""
    kind, children, _ = get_object_head_values_from_object_content(content)
    if kind != Array.__qualname__:
        return len(content)
    places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return len(content) + sum(len(contents[children[place]]) for place in places)
