"""Asks clients through Flower's grid: nodes, messages, polling, deadlines, and replies read as they
arrive."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any

from flwr.app import Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from flwr.superlink.grid.http_grid import HttpGrid
from torch import Tensor

from discreet.flower.round_messages import Messages, RoundMessages
from discreet.flower.tested_flower import PULL_PLACES, refusal
from discreet.flower.untrusted_replies import strange
from discreet.protocol.messages import (
    REFUSED_CODE,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
)
from discreet.run_files.run_members import NEW_NUMBERS, RunMembers
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
      members: the nodes that take turns in the run; None if any node may take part.
      strangers: the numbers of other nodes that the log has named.
    """

    grid: Grid
    messages: Messages
    timeout: float
    population_size: int
    virtual: Sequence[VirtualClient] = ()
    min_nodes: int = 1
    in_every_round: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    members: RunMembers | None = None
    nodes: list[int] = field(default_factory=list)
    strangers: set[int] = field(default_factory=set)

    def available_clients(self) -> Sequence[int]:
        """Virtual clients, or the connected nodes, of `members` alone. A later round waits for one
        node only: a node that is gone for good must not stop the others. If more nodes are
        connected than clients declared, one may be a client's second node, and it waits. Raises
        TimeoutError: too few or too many nodes are connected, or no worker answers, for `timeout`;
        no client was asked. LedgerError: see `RunMembers.among`."""
        wanted = self._wanted()
        seen = -1
        for _ in looks(self.timeout):
            nodes, others = self._connected()
            fault = self._miscounted(len(nodes), wanted, others)
            if fault is None:
                if self.virtual and not self.nodes:
                    self._wait_for_workers(nodes[: os.cpu_count()])
                if self.members is not None:
                    self.members.keep(nodes)
                self._warn_of_few(len(nodes))
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

    def _wanted(self) -> int:
        """The number of nodes that must be connected."""
        is_first = not self.nodes or (self.members is not None and not self.members.numbers)
        if is_first or self.in_every_round:
            return self.min_nodes
        return 1

    def _connected(self) -> tuple[list[int], int]:
        """The connected nodes that may take part, and the number of others, which are logged
        once."""
        connected = sorted(self.grid.get_node_ids())
        if self.members is None:
            return connected, 0
        nodes = self.members.among(connected)
        others = set(connected).difference(nodes)
        if new := sorted(others - self.strangers):
            self.strangers |= others
            logger.warning("nodes %s have %s", new, NEW_NUMBERS.named(self.names))
        return nodes, len(others)

    def _miscounted(self, connected: int, wanted: int, others: int) -> Wording | None:
        if connected < wanted:
            there = f"{connected} of {wanted} nodes are connected ("
            short = Wording(there, Key("sampling.min_nodes"), ")")
            if others:
                return Wording(short, f"; {others} others have ", NEW_NUMBERS)
            return short
        if connected > self.population_size and not self.virtual:
            return Wording(
                f"{connected} nodes are connected, and ",
                Key(f"sampling.population_size={self.population_size}"),
                " clients are declared: disconnect nodes, or start with a larger ",
                Key("data.num_clients"),
            )
        return None

    def _warn_of_few(self, connected: int) -> None:
        """Warns, before the first cohort, of nodes that are less than half of the population."""
        if self.nodes or self.virtual or 2 * connected >= self.population_size:
            return
        few = Wording(
            f"{connected} nodes are connected, and ",
            Key(f"sampling.population_size={self.population_size}"),
            " is declared: the absent ones count as zero, so that steps have "
            f"{connected / self.population_size:.0%} of their size, and the noise stays",
        )
        logger.warning("%s", few.named(self.names))

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
            if isinstance(self.grid, HttpGrid) and not _unlimited():
                # Imported here: another version of Flower may lack what it imports.
                from discreet.flower.limited_pull import pull_replies

                yield from pull_replies(
                    self.grid, some, most=MOST_BYTES_EACH * reply_size + MORE_BYTES
                )
                continue
            arrived = deque(self.grid.pull_messages(some))
            while arrived:
                message = arrived.popleft()
                yield message.metadata.reply_to_message_id, message


@cache
def _unlimited() -> str:
    """The reason why replies are read by Flower's own grid, which has no limit of their size; empty
    if they are read here."""
    reason = refusal(PULL_PLACES, "a limit of a reply's size")
    if reason:
        logger.warning("%s: nodes can fill this machine's memory", reason)
    return reason


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
