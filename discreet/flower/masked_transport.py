"""Masked sums through Flower's grid: exchanges with deadlines, replies added up as they come, and
who is missing.

A round costs three exchanges: masked vectors, signatures of who is in the sum, and shares that
unmask it. The keys of the next round are made along with the last two; the first round is preceded
by three more, one of which asks nodes who they are. A node that does not answer an exchange in time
is missing from this round, and asked again in the next one."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from flwr.app import ConfigRecord, MessageType, RecordDict
from torch import Tensor

from discreet.flower.grid_transport import GridTransport, RoundMessages, strange
from discreet.masking.server import Exchange, MaskingServer
from discreet.masking.wire import Abandoned, Stage, read_request
from discreet.mechanisms.sums import UnopenedSum
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.masked_messages import (
    MASKING,
    MASKING_REPLY,
    NAME,
    PEERS,
    WHO,
    Member,
    asked_bytes,
    masking_record,
    terms_of,
)
from discreet.protocol.messages import MalformedMessage, TrainRequest, VirtualClient
from discreet.server.plan import Plan
from discreet.server.transport import Failure, RoundAbandoned
from discreet.settings.client_settings import ClientSettings

logger = logging.getLogger("discreet")

SMALL = 2**14  # values: what a reply holds that is no masked vector, at most
FLOAT_BITS = 32
SAME_LIST = "give all of them the same"
OTHER_LIST = f"it has another list of peers than the other nodes: {SAME_LIST}"
NAMED = "other nodes refuse what it sent"

Missing = dict[int, Failure]


@dataclass
class MaskedTransport:
    """Asks nodes for masked vectors, and returns their unopened sum.

    Attributes:
      asking: knows the nodes, what they are asked to do, and the deadline of an exchange.
      vector: what is added up.
      virtual: which client of a simulation one is to be; gives None in a real federation.
      members_of: by client, who each one says that it is.
      number: of the masked sum that comes next. A server that starts anew draws another name for
        its run, so that nothing of before can be asked for: a sum that was not opened stays so.
    """

    asking: GridTransport
    vector: SecureSum
    virtual: Callable[[int], VirtualClient | None]
    members_of: dict[int, Member] = field(default_factory=dict)
    number: int = 1
    left_out: set[int] = field(default_factory=set)
    makes_sums: ClassVar[bool] = True
    _server: MaskingServer | None = field(default=None, repr=False)

    def available_clients(self) -> Sequence[int]:
        """As `GridTransport.available_clients`."""
        return self.asking.available_clients()

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterator[Failure | UnopenedSum]:
        """The clients that are missing, and the sum of the others: of at least n - d of them, or of
        none. Raises RoundAbandoned: fewer are left, or their lists of peers differ;
        MessagesTooLarge: see `GridTransport.exchange`.
        """
        messages = self.asking.messages(asked, params)
        missing = {client: Failure(client, "malformed", NAMED) for client in self.left_out}
        cohort = [client for client in cohort if client not in self.left_out]
        alive = 0
        self._meet(cohort, str(asked.round), missing)
        server = self._masking(asked.run, missing)
        # With the last round that the run plans no keys for a next one are made.
        if asked.work.trains and asked.round < asked.run.rounds:
            then = self.number + 1
        else:
            then = None
        exchange = server.begin(self.number, then=then, asked=asked_bytes(asked))
        while exchange.stage is not Stage.UNMASK:
            masked = exchange.stage is Stage.MASKED
            taken = self._send(
                exchange, messages if masked else None, cohort=cohort, missing=missing
            )
            if masked:
                alive = taken
            exchange = self._closed(exchange, missing)
        known = {*cohort, *self.left_out}
        yield from [failure for client, failure in missing.items() if client in known]
        yield UnopenedSum(partial(self._open, exchange, cohort, missing), alive)

    def _open(self, exchange: Exchange, cohort: Sequence[int], missing: Missing) -> Tensor:
        """The shares of who is left, and what they open. Whatever comes of it, this sum's number is
        used up."""
        self.number += 1
        self._send(exchange, None, cohort=cohort, missing=missing)
        return self.vector.centred(torch.from_numpy(self._closed(exchange, missing).total))

    def _closed(self, exchange: Exchange, missing: Mapping[int, Failure]) -> Any:
        """The exchange that follows, or after the last one what was `Opened`."""
        try:
            return exchange.close()
        except Abandoned as error:
            self._leave_out(missing)
            raise RoundAbandoned(str(error), tuple(missing.values())) from error

    def _leave_out(self, missing: Mapping[int, Failure]) -> None:
        """Leaves out clients whose keys, shares or signature were refused by name by more nodes
        than may lie, so that the round is not abandoned for the same reason again."""
        assert self._server is not None
        for client, member in [*self.members_of.items()]:
            said = repr(member.name)
            naming = [
                failure.kind == "refused" and said in failure.reason
                for other, failure in missing.items()
                if other != client
            ]
            if sum(naming) > self._server.terms.colluding:
                logger.warning("client %d, %s, is asked no more: %s", client, said, NAMED)
                self.members_of.pop(client)
                self.left_out.add(client)

    def _masking(self, run: ClientSettings, missing: Missing) -> MaskingServer:
        """The server's side of all sums of this run, made when the names of all nodes are known:
        those of the list of peers that as many nodes have as a sum needs. A node with another list
        is missing."""
        if self._server is None:
            terms = terms_of(secrets.token_hex(16), run, self.vector)
            lists = Counter(member.peers for member in self.members_of.values())
            peers, holders = max(lists.items(), key=lambda each: each[1], default=((), 0))
            if holders < terms.survivors:
                raise RoundAbandoned(
                    f"the nodes have {len(lists)} different lists of peers: {SAME_LIST}"
                )
            for client in [
                client for client, member in self.members_of.items() if member.peers != peers
            ]:
                self.members_of.pop(client)
                missing[client] = Failure(client, "malformed", OTHER_LIST)
            logger.info(
                "a masked vector has %d values modulo 2^%d", self.vector.length, self.vector.bits
            )
            self._server = MaskingServer(terms, peers)
        return self._server

    def _meet(self, cohort: Sequence[int], group: str, missing: Missing) -> None:
        """Asks clients that are not known yet who they are."""
        new = [client for client in cohort if client not in self.members_of]
        contents = (
            (client, RecordDict({MASKING: masking_record(WHO, self.virtual(client))}))
            for client in new
        )
        for client, member in self.asking.exchange(contents, group, _small(self._member)):
            if isinstance(member, Failure):
                missing[client] = member
            else:
                self.members_of[client] = member

    def _member(self, content: RecordDict) -> Member:
        member = read_member(content)
        nodes = self.vector.nodes
        if len(member.peers) != nodes:
            raise MalformedMessage(
                f"{member.name!r} has a list of {len(member.peers)} peers, of {nodes} nodes"
            )
        if self._server is not None and member.peers != self._server.names:
            raise MalformedMessage(OTHER_LIST)
        if member.name in {other.name for other in self.members_of.values()}:
            raise MalformedMessage(f"{member.name!r} is the name of another node, too")
        return member

    def _send(
        self,
        exchange: Exchange,
        asked: RoundMessages | None,
        *,
        cohort: Sequence[int],
        missing: Missing,
    ) -> int:
        """One exchange with the clients that are there; how many replies were taken. Who has keys
        to make alone is not waited for."""
        clients = {
            self.members_of[client].name: client for client in cohort if client in self.members_of
        }
        names = {client: name for name, client in clients.items()}
        requests = {
            clients[name]: each for name, each in exchange.requests.items() if name in clients
        }
        needed = [
            client
            for client, each in requests.items()
            if exchange.round in {part.round for part in read_request(each)[1]}
        ]
        messages = (
            (client, self._content(each, client, asked)) for client, each in requests.items()
        )
        size = SMALL
        if asked is not None:
            size += self.vector.length * self.vector.bits // FLOAT_BITS
        taken = 0
        reading = replace(_small(read_masking_reply), reply_size=size)
        for client, reply in self.asking.exchange(
            messages, str(exchange.round), reading, needed=needed
        ):
            if isinstance(reply, Failure):
                missing[client] = reply
                continue
            try:
                with strange():
                    exchange.take(names[client], reply)
                taken += 1
            except MalformedMessage as error:
                missing[client] = Failure(client, "malformed", str(error))
        return taken

    def _content(self, request: bytes, client: int, asked: RoundMessages | None) -> RecordDict:
        virtual = self.virtual(client)
        if asked is None:
            content = RecordDict()
        else:
            content = asked.request(virtual)
        return RecordDict({**content, MASKING: masking_record(request, virtual)})


def members_of(plan: Plan) -> int:
    """The number of nodes that make masked sums; 0 if the server reads replies."""
    if plan.run.masked:
        return plan.run.user.population_size
    return 0


def transport_of(
    plan: Plan, asking: GridTransport, virtual: Callable[[int], VirtualClient | None] | None = None
) -> GridTransport | MaskedTransport:
    """The transport of a run: `asking`, or one of masked sums. `virtual`: as of that; None:
    `asking` knows."""
    vector = plan.mechanism.participation.vector
    if vector is None:
        return asking
    return MaskedTransport(asking, vector, virtual or asking.virtual_client)


def read_masking_reply(content: RecordDict) -> bytes:
    """A node's answer to a masking request, or MalformedMessage: what
    `masked_messages.reply_content` wrote."""
    record = content.get(MASKING)
    if isinstance(record, ConfigRecord) and len(record) == 1:
        reply = record.get(MASKING_REPLY)
    else:
        reply = None
    if len(content) != 1 or not isinstance(reply, bytes):
        raise MalformedMessage("the reply does not hold the answer to a masking request")
    return reply


def read_member(content: RecordDict) -> Member:
    """The node that answers and its peers, as `masked_messages.member_content` wrote them, or
    MalformedMessage."""
    record = content.get(MASKING)
    name, peers = (
        (record.get(NAME), record.get(PEERS)) if isinstance(record, ConfigRecord) else (None, None)
    )
    if (
        not isinstance(name, str)
        or not isinstance(peers, list)
        or not all(isinstance(each, str) for each in peers)
    ):
        raise MalformedMessage("the reply does not say which node it is, and among whom")
    member = Member(name, tuple(sorted(str(each) for each in peers)))
    if name not in member.peers or len(set(member.peers)) != len(member.peers):
        raise MalformedMessage("the node's list of peers does not hold itself, or a name twice")
    return member


def _small(reply: Callable[[RecordDict], object]) -> RoundMessages:
    return RoundMessages(MessageType.TRAIN, SMALL, lambda _: RecordDict(), reply)
