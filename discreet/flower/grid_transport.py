"""Asks clients through Flower's grid: nodes, messages, polling, deadlines, and replies read as they come."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from flwr.superlink.grid.http_grid import HttpGrid
from torch import Tensor

from discreet.flower.pulled_replies import pull_replies
from discreet.protocol.messages import REFUSED_CODE, TRAIN, MalformedMessage, TrainReply, VirtualClient, Work
from discreet.server.transport import Failure, MessagesTooLarge

logger = logging.getLogger("discreet")

# What a SuperLink says of a node that it has lost, and of messages and replies that have passed their deadline.
NO_REPLY_CODES = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 0.5
PULL_FLOATS = 2**24  # replies that are asked for at once hold at most so many: 64 MiB
MOST_BYTES_EACH, MORE_BYTES = 8, 2**20  # of a reply: for each value, as a float64, and for what is beside the values
PUSH_AT_ONCE = 4  # messages: Flower announces all of them first, and nodes ask for content again until it is there
POLL_SHARE = 0.05  # of the time waited so far: looking for replies costs a process, a late look costs the round


@dataclass(frozen=True)
class RoundMessages:
    """The messages of a round to clients, and the reading of their replies.

    Attributes:
      kind: Flower's type of the messages.
      reply_size: how many values a reply holds, at least 1: it limits the bytes of a reply, and how many are pulled at
        once.
      request: the content of a message; in a simulation of Discreet's own clients for the one to be.
      reply: a reply, checked before anything is computed from it; raises MalformedMessage.
    """

    kind: str
    reply_size: int
    request: Callable[[VirtualClient | None], RecordDict]
    reply: Callable[[RecordDict], TrainReply]


class Messages(Protocol):
    """The messages of a run to clients: Discreet's own, or those of another Flower app."""

    def of_round(self, number: int, params: Tensor, clip_norm: float, work: Work) -> RoundMessages:
        """The messages of one round."""


@dataclass(frozen=True)
class Sending:
    """Flower's type of messages, the round in their metadata, the values in a reply, and what they are, in words."""

    kind: str
    group: str
    reply_size: int
    what: str


@dataclass
class GridTransport:
    """Asks clients through Flower's grid, and yields replies as they arrive.

    Attributes:
      timeout: seconds until a round's deadline; who has not replied by then is `late`.
      population_size: the declared number of clients. One node is one client, so that no more may be connected.
      virtual: the clients of a simulation, where client c runs on node c modulo the number of nodes.
      min_nodes: how many nodes to wait for before the first cohort is drawn; after that one is enough.
      in_every_round: wait for `min_nodes` before each cohort, as Flower's own strategies do.
      says: names settings in a message.
    """

    grid: Grid
    messages: Messages
    timeout: float
    population_size: int
    virtual: Sequence[VirtualClient] = ()
    min_nodes: int = 1
    in_every_round: bool = False
    says: Callable[[str], str] = str
    nodes: list[int] = field(default_factory=list)

    def available_clients(self) -> Sequence[int]:
        """Virtual clients, or the connected nodes.

        A later round waits for one node only: one without anybody would spend budget on nothing, and a node that is
        gone for good must not stop the others. While more nodes are connected than clients are declared it waits too:
        one may be a client's second, and delta is for the declared number.

        Raises:
          TimeoutError: too few or too many nodes are connected, or no worker answers, for `timeout`. Nobody is asked.
        """
        wanted, seen = 1 if self.nodes and not self.in_every_round else self.min_nodes, -1
        for _ in looks(self.timeout):
            nodes = sorted(self.grid.get_node_ids())
            fault = self._miscounted(len(nodes), wanted)
            if fault is None:
                if self.virtual and not self.nodes:
                    self._wait_for_workers(nodes[: os.cpu_count()])
                self.nodes = nodes
                return range(len(self.virtual)) if self.virtual else nodes
            if len(nodes) > self.population_size and isinstance(self.grid, InMemoryGrid):
                raise TimeoutError(fault)  # the nodes of a simulation never leave
            if len(nodes) != seen:
                seen = len(nodes)
                logger.info("waiting for nodes: %s", fault)
        raise TimeoutError(self.says(f"after {self.timeout:g} s (server.round_timeout) {fault}"))

    def _miscounted(self, connected: int, wanted: int) -> str | None:
        if connected < wanted:
            return self.says(f"{connected} of {wanted} nodes are connected (sampling.min_nodes)")
        if connected > self.population_size and not self.virtual:
            return self.says(
                f"{connected} nodes are connected, and sampling.population_size={self.population_size} clients are "
                "declared: disconnect nodes, or start a run with a larger data.num_clients"
            )
        return None

    def _wait_for_workers(self, nodes: Sequence[int]) -> None:
        """Until one client for each of Flower's workers has refused to evaluate: that tells that they are there."""
        logger.info("starting Ray, which trains the clients")
        asked = [Message(RecordDict(), node, MessageType.EVALUATE, ttl=self.timeout) for node in nodes]
        waiting = set(self.grid.push_messages(asked))
        for waited in looks(self.timeout):
            waiting -= {reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(waiting)}
            if not waiting:
                logger.info("Ray has started, after %.0f s", waited)
                return
        raise TimeoutError(f"Ray has not started after {self.timeout:g} s (server.round_timeout)")

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int], work: Work = TRAIN
    ) -> Iterator[TrainReply | Failure]:
        """Sends each client its request, and decodes replies as they come: until all are there, or the deadline.

        Raises:
          MessagesTooLarge: the SuperLink, or a proxy before it, refused the messages for their size.
        """
        asked = self.messages.of_round(round_number, params, clip_norm, work)
        contents = ((client, asked.request(self.virtual_client(client))) for client in cohort)
        what = f"round {round_number} to {len(cohort)} nodes, {params.numel()} parameters each"
        for client, answer in self.exchange(contents, Sending(asked.kind, str(round_number), asked.reply_size, what)):
            if not isinstance(answer, Failure):
                try:
                    yield replace(asked.reply(answer), client=client)
                    continue
                except MalformedMessage as error:
                    answer = Failure(client, "malformed", str(error))
            yield answer

    def virtual_client(self, client: int) -> VirtualClient | None:
        """The virtual client that a message is for; None if it goes to a node."""
        return self.virtual[client] if self.virtual else None

    def exchange(
        self, contents: Iterable[tuple[int, RecordDict]], sending: Sending, *, needed: Collection[int] | None = None
    ) -> Iterator[tuple[int, RecordDict | Failure]]:
        """Sends each client its content, and yields the replies as they come: until all are there, or the deadline.

        `needed`: the clients that are worth the wait; once they have answered, the others have as long again.

        Raises:
          MessagesTooLarge: the SuperLink, or a proxy before it, refused the messages for their size.
        """
        waiting = yield from self._push(contents, sending)
        enough = math.inf
        for waited in looks(self.timeout):
            for number, reply in self._pull(list(waiting), sending.reply_size):
                # Popped: a second reply to the same message is not counted again.
                client = waiting.pop(number, None)
                if client is not None:
                    yield client, replace(reply, client=client) if isinstance(reply, Failure) else read(reply, client)
            if not waiting:
                return
            if needed is not None and enough == math.inf and not set(needed).intersection(waiting.values()):
                enough = 2 * waited + LONGEST_POLL_SECONDS
            if waited > enough:
                break
        for client in waiting.values():
            yield client, Failure(client, "late", f"no reply within {min(enough, self.timeout):.3g} s")

    def _push(
        self, contents: Iterable[tuple[int, RecordDict]], sending: Sending
    ) -> Generator[tuple[int, Failure], None, dict[str, int]]:
        """Sends the messages; returns whose reply is waited for, by the number of the message."""
        waiting: dict[str, int] = {}
        contents = iter(contents)
        while some := list(islice(contents, PUSH_AT_ONCE)):
            messages = []
            for client, content in some:
                node = self.nodes[client % len(self.nodes)] if self.virtual else client
                messages.append(Message(content, node, sending.kind, ttl=self.timeout, group_id=sending.group))
            numbers = list(self.grid.push_messages(messages))
            # Flower's grid makes an empty list of HTTP 413, and lists None for a message that was not taken.
            if len(numbers) != len(messages):
                raise MessagesTooLarge(
                    f"the messages of {sending.what}, were refused as too large (HTTP 413): raise the limit of what "
                    "stands before the SuperLink, or take a smaller model"
                )
            for number, (client, _) in zip(numbers, some, strict=True):
                if number:
                    waiting[number] = client
                else:
                    yield client, Failure(client, "error", "the SuperLink took no message for it: it has left")
        return waiting

    def _pull(self, numbers: Sequence[str], reply_size: int) -> Iterator[tuple[str, Message | Failure]]:
        """The replies that are there, with the numbers of what they reply to, by a few messages at a time: what is held
        does not grow with the cohort, nor with what a node sends."""
        at_once = max(1, PULL_FLOATS // reply_size)
        for start in range(0, len(numbers), at_once):
            some = numbers[start : start + at_once]
            if isinstance(self.grid, HttpGrid):
                yield from pull_replies(self.grid, some, most=MOST_BYTES_EACH * reply_size + MORE_BYTES)
                continue
            arrived = deque(self.grid.pull_messages(some))
            while arrived:
                message = arrived.popleft()
                yield message.metadata.reply_to_message_id, message


def looks(timeout: float) -> Iterator[float]:
    """When to look: the seconds waited so far, with pauses between, until the deadline has passed."""
    started, waited = time.monotonic(), 0.0
    while waited <= timeout:
        waited = time.monotonic() - started
        yield waited
        time.sleep(min(pause_after(waited), max(0.0, timeout - waited)))


def pause_after(waited: float) -> float:
    """Seconds until the next look, after so many of waiting.

    >>> pause_after(0.0), pause_after(4.0), pause_after(600.0)
    (0.05, 0.2, 0.5)
    """
    return min(max(POLL_SECONDS, POLL_SHARE * waited), LONGEST_POLL_SECONDS)


def read(message: Message, client: int) -> RecordDict | Failure:
    """The content of a reply, or the error that came in its place."""
    if not message.has_error():
        return message.content
    code, lines = message.error.code, (message.error.reason or "").strip().splitlines()
    kind = "refused" if code == REFUSED_CODE else "late" if code in NO_REPLY_CODES else "error"
    # Written by a client, read on a terminal: only what can be printed, and not much of it.
    said = "".join(character for character in lines[-1] if character.isprintable())[:300] if lines else ""
    return Failure(client, kind, said)
