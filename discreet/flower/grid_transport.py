"""Asks clients through Flower's grid: nodes, messages, polling, deadlines, and replies read as they
arrive.

Flower stores equal pieces of an array once and joins them when it unpacks a message, so a node can
turn ten megabytes into gigabytes. Here a reply's size is known before anything is unpacked, and
pulling stops at the limit. The SuperLink, which knows the node, states which message a reply
belongs to; the reply's own statement is not trusted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from flwr.app import Array, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
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
from flwr.superlink.grid import InMemoryGrid
from flwr.superlink.grid.http_grid import HttpGrid
from torch import Tensor

from discreet.flower.round_messages import Messages, RoundMessages
from discreet.masking.wire import MalformedBytes
from discreet.protocol.messages import (
    REFUSED_CODE,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
)
from discreet.server.transport import Failure, MessagesTooLarge, readable
from discreet.settings.wording import Key, Wording

logger = logging.getLogger("discreet")

# The SuperLink's codes for a lost node, and for messages and replies past their deadline.
NO_REPLY_CODES = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
# The start of Flower's report of an exception in a ClientApp: its class, before its text.
EXCEPTION = re.compile(r"<class '(?:[\w.]{0,200}\.)?(\w{1,60})'>:")
POLL_SECONDS = 0.05
LONGEST_POLL_SECONDS = 0.5
PULL_FLOATS = 2**24  # most values in replies that are pulled at once: 64 MiB
# most bytes of a reply for each value, stored as a float64, and for the rest of the reply
MOST_BYTES_EACH = 8
MORE_BYTES = 2**20
# messages: Flower announces all of them first, and nodes poll until their content is there
PUSH_AT_ONCE = 4
# pause between polls, as a share of the time waited so far: polls take CPU, late polls delay rounds
POLL_SHARE = 0.05


@dataclass
class GridTransport:
    """Asks clients through Flower's grid, and yields replies as they arrive.

    Attributes:
      timeout: seconds until a round's deadline; a client that has not replied by then is `late`.
      population_size: the declared number of clients. One node is one client, so no more nodes may
        be connected.
      virtual: the clients of a simulation, where client c runs on node c modulo the number of
        nodes.
      min_nodes: the number of nodes that must be connected before the first cohort is drawn; after
        that one is enough.
      in_every_round: wait for `min_nodes` before each cohort, as Flower's own strategies do.
      names: the names of settings in messages, by their keys.
    """

    grid: Grid
    messages: Messages
    timeout: float
    population_size: int
    virtual: Sequence[VirtualClient] = ()
    min_nodes: int = 1
    in_every_round: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)

    def available_clients(self) -> Sequence[int]:
        """Virtual clients, or the connected nodes. A later round waits for one node only: a node
        that is gone for good must not stop the others. If more nodes are connected than clients
        declared, one may be a client's second node, and it waits. Raises TimeoutError: too few or
        too many nodes are connected, or no worker answers, for `timeout`; no client was asked."""
        if self.nodes and not self.in_every_round:
            wanted = 1
        else:
            wanted = self.min_nodes
        seen = -1
        for _ in looks(self.timeout):
            nodes = sorted(self.grid.get_node_ids())
            fault = self._miscounted(len(nodes), wanted)
            if fault is None:
                if self.virtual and not self.nodes:
                    self._wait_for_workers(nodes[: os.cpu_count()])
                self.nodes = nodes
                if self.virtual:
                    return range(len(self.virtual))
                return nodes
            if len(nodes) > self.population_size and isinstance(self.grid, InMemoryGrid):
                # Nodes of a simulation never leave, so waiting is of no use.
                raise TimeoutError(fault.named(self.names))
            if len(nodes) != seen:
                seen = len(nodes)
                logger.info("waiting for nodes: %s", fault.named(self.names))
        assert fault is not None  # the loop runs at least once
        waited = Wording(f"after {self.timeout:g} s (", Key("server.round_timeout"), ") ", fault)
        raise TimeoutError(waited.named(self.names))

    def _miscounted(self, connected: int, wanted: int) -> Wording | None:
        if connected < wanted:
            there = f"{connected} of {wanted} nodes are connected ("
            return Wording(there, Key("sampling.min_nodes"), ")")
        if connected > self.population_size and not self.virtual:
            return Wording(
                f"{connected} nodes are connected, and ",
                Key(f"sampling.population_size={self.population_size}"),
                " clients are declared: disconnect nodes, or start with a larger ",
                Key("data.num_clients"),
            )
        return None

    def _wait_for_workers(self, nodes: Sequence[int]) -> None:
        """Waits until all of Flower's workers run: until one client for each has refused to
        evaluate."""
        logger.info("starting Ray, which trains the clients")
        asked = [
            Message(RecordDict(), node, MessageType.EVALUATE, ttl=self.timeout) for node in nodes
        ]
        waiting = set(self.grid.push_messages(asked))
        for waited in looks(self.timeout):
            waiting -= {
                reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(waiting)
            }
            if not waiting:
                logger.info("Ray has started, after %.0f s", waited)
                return
        raise TimeoutError(f"Ray has not started after {self.timeout:g} s (server.round_timeout)")

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterator[TrainReply | Failure]:
        """Sends each client its request, and decodes replies as they arrive, until all are there or
        the deadline has passed. Raises MessagesTooLarge: the SuperLink, or a proxy before it,
        refused the messages for their size."""
        messages = self.messages(asked, params)
        contents = ((client, messages.request(self.virtual_client(client))) for client in cohort)
        for client, answer in self.exchange(contents, str(asked.round), messages):
            yield replace(answer, client=client)

    def virtual_client(self, client: int) -> VirtualClient | None:
        """The virtual client that a message is for; None if it goes to a node."""
        if self.virtual:
            return self.virtual[client]
        return None

    def exchange(
        self,
        contents: Iterable[tuple[int, RecordDict]],
        group: str,
        asked: RoundMessages,
        *,
        needed: Collection[int] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Sends each client its content, and yields replies, decoded by `asked`, or failures, as
        they arrive, until all are there or the deadline has passed. `group`: the round, in the
        metadata of messages. `needed`: the clients that must be waited for; once they have
        answered, the others have the same time again. Raises MessagesTooLarge: the SuperLink, or a
        proxy before it, refused the messages for their size."""
        waiting = yield from self._push(contents, group, asked.kind)
        enough = math.inf
        for waited in looks(self.timeout):
            for number, reply in self._pull(list(waiting), asked.reply_size):
                # `pop`, so that a second reply to the same message is not counted.
                client = waiting.pop(number, None)
                if client is not None:
                    yield client, read(reply, client, asked)
            if not waiting:
                return
            if (
                needed is not None
                and enough == math.inf
                and not set(needed).intersection(waiting.values())
            ):
                enough = 2 * waited + LONGEST_POLL_SECONDS
            if waited > enough:
                break
        for client in waiting.values():
            yield (
                client,
                Failure(client, "late", f"no reply within {min(enough, self.timeout):.3g} s"),
            )

    def _push(
        self, contents: Iterable[tuple[int, RecordDict]], group: str, kind: str
    ) -> Generator[tuple[int, Failure], None, dict[str, int]]:
        """Sends the messages; returns the client of each by the number of the message."""
        waiting: dict[str, int] = {}
        contents = iter(contents)
        while some := list(islice(contents, PUSH_AT_ONCE)):
            messages = []
            for client, content in some:
                if self.virtual:
                    node = self.nodes[client % len(self.nodes)]
                else:
                    node = client
                messages.append(Message(content, node, kind, ttl=self.timeout, group_id=group))
            numbers = list(self.grid.push_messages(messages))
            # Flower's grid returns an empty list for HTTP 413, and lists None for a message that
            # was not accepted.
            if len(numbers) != len(messages):
                how = "raise the limit of what stands before the SuperLink, or take a smaller model"
                raise MessagesTooLarge(
                    f"the messages of round {group} were refused as too large (HTTP 413): {how}"
                )
            for number, (client, _) in zip(numbers, some, strict=True):
                if number:
                    waiting[number] = client
                else:
                    yield (
                        client,
                        Failure(
                            client,
                            "error",
                            "the SuperLink accepted no message for it: the node has left",
                        ),
                    )
        return waiting

    def _pull(
        self, numbers: Sequence[str], reply_size: int
    ) -> Iterator[tuple[str, Message | Failure]]:
        """The available replies, each with the number of its message; only a few are held at a
        time."""
        at_once = max(1, PULL_FLOATS // reply_size)
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            if isinstance(self.grid, HttpGrid):
                yield from pull_replies(
                    self.grid, some, most=MOST_BYTES_EACH * reply_size + MORE_BYTES
                )
                continue
            arrived = deque(self.grid.pull_messages(some))
            while arrived:
                message = arrived.popleft()
                yield message.metadata.reply_to_message_id, message


def pull_replies(
    grid: HttpGrid, numbers: Sequence[str], *, most: int
) -> Iterator[tuple[str, Message | Failure]]:
    """The available replies to these messages, each with the number of its message, as
    `HttpGrid.pull_messages` gives them. A reply of more than `most` bytes, packed or unpacked, is a
    failure, with the client number 0."""
    client = grid._runtime_client
    run_id = grid.run.run_id
    answer = client.PullMessages(PullAppMessagesRequest(message_ids=numbers))
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


def looks(timeout: float) -> Iterator[float]:
    """Yields the seconds waited so far, with a pause before each further poll, until the deadline
    has passed."""
    started = time.monotonic()
    waited = 0.0
    while waited <= timeout:
        waited = time.monotonic() - started
        yield waited
        pause = min(max(POLL_SECONDS, POLL_SHARE * waited), LONGEST_POLL_SECONDS)
        time.sleep(min(pause, max(0.0, timeout - waited)))


@contextmanager
def strange() -> Iterator[None]:
    """A context for reading untrusted contents: any exception in it becomes MalformedMessage."""
    try:
        yield
    except (MalformedMessage, MalformedBytes) as error:
        raise MalformedMessage(readable(str(error))) from error
    except Exception as error:  # Flower, protobuf and NumPy raise errors of many classes
        raise MalformedMessage(f"the reply can't be decoded: {type(error).__name__}") from error


def read(reply: Message | Failure, client: int, asked: RoundMessages) -> Any:
    """The decoded reply, or the failure that came in its place."""
    try:
        with strange():
            if isinstance(reply, Failure):
                answer = reply
            else:
                answer = _failure(reply) or asked.reply(reply.content)
    except MalformedMessage as error:
        answer = Failure(client, "malformed", str(error))
    if isinstance(answer, Failure):
        return replace(answer, client=client)
    return answer


def _failure(reply: Message) -> Failure | None:
    """The failure that a client reports; None if it has answered."""
    if not reply.has_error():
        return None
    code = reply.error.code
    said = reply.error.reason or ""
    if code == REFUSED_CODE:
        lines = said.strip().splitlines()
        return Failure(0, "refused", readable(lines[-1]) if lines else "")
    if code in NO_REPLY_CODES:
        return Failure(0, "late", f"no reply came in time (code {code})")
    # Flower sends the whole text of an exception, which may contain a value of the client's data.
    # Only its class is read.
    found = EXCEPTION.match(said)
    if found is None:
        kind = "an error"
    else:
        kind = found[1]
    return Failure(0, "error", f"{kind} (code {code}); the client's own log says why")
