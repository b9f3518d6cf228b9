"""Masked sums through Flower's grid: exchanges with deadlines, replies added up as they arrive, and
missing nodes.

A round takes three exchanges: masked vectors, signatures of the list of nodes in the sum, and
shares that unmask it. The keys of the next round are made along with the last two. The first round
is preceded by three more, one of which asks nodes for their names. A node that does not answer an
exchange in time is missing from this round, and asked again in the next one."""

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

from discreet.flower.grid_transport import GridTransport
from discreet.flower.round_messages import RoundMessages
from discreet.flower.untrusted_replies import strange
from discreet.masking.wire import Abandoned, Stage, read_request
from discreet.mechanisms.sums import UnopenedSum
from discreet.planning.plan import Plan
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.masked_messages import (
    MASKING_REPLY,
    NAME,
    PEERS,
    WHO,
    Member,
    asked_bytes,
    masking_record,
    terms_of,
)
from discreet.protocol.messages import MASKING, MalformedMessage, TrainRequest, VirtualClient
from discreet.server.masking_server import Exchange, MaskingServer
from discreet.server.transport import Failure, NobodyAnswers, RoundAbandoned
from discreet.settings.client_settings import ClientSettings

logger = logging.getLogger("discreet")

SMALL = 2**14  # most values in a reply that is not a masked vector
FLOAT_BITS = 32
SAME_LIST = "give all of them the same"
NO_MOD = (
    "none of {count} clients takes part in secure aggregation: their app must be Discreet's, or a "
    "ClientApp(mods=[discreet.secure_sum_mod]). One of them: {reason}"
)
OTHER_LIST = f"it has another list of peers than the other nodes: {SAME_LIST}"
NAMED = "other nodes refuse what it sent"

Missing = dict[int, Failure]


@dataclass
class MaskedTransport:
    """Asks nodes for masked vectors, and returns their unopened sum.

    Attributes:
      asking: the transport that knows the nodes, their messages, and the deadline of an exchange.
      vector: the secure sum of the round.
      virtual: maps a client to the virtual client of a simulation; gives None in a real federation.
      members_of: each client's own name and peers.
      number: number of the next masked sum. A server that restarts draws another name for its run,
        so that nothing of the earlier one can be requested: an unopened sum stays unopened.
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
        """The missing clients, and the sum of the others: of at least n - d clients, or of none.
        Raises RoundAbandoned: fewer are left, or their lists of peers differ; NobodyAnswers: no
        client's app knows secure aggregation; MessagesTooLarge: see `GridTransport.exchange`.
        """
        messages = self.asking.messages(asked, params)
        missing = {client: Failure(client, "malformed", NAMED) for client in self.left_out}
        cohort = [client for client in cohort if client not in self.left_out]
        alive = 0
        self._meet(cohort, str(asked.round), missing)
        server = self._masking(asked.run, missing)
        # In the last planned round no keys for a next one are made.
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
        """Collects the shares of the remaining clients, and opens the sum with them. The number of
        this sum is used up in any case."""
        self.number += 1
        self._send(exchange, None, cohort=cohort, missing=missing)
        return self.vector.centred(torch.from_numpy(self._closed(exchange, missing).total))

    def _closed(self, exchange: Exchange, missing: Mapping[int, Failure]) -> Any:
        """The next exchange, or after the last one the `Opened` sum."""
        try:
            return exchange.close()
        except Abandoned as error:
            self._leave_out(missing)
            raise RoundAbandoned(str(error), tuple(missing.values())) from error

    def _leave_out(self, missing: Mapping[int, Failure]) -> None:
        """Leaves out clients whose keys, shares or signature were refused by name by more nodes
        than may be dishonest, so that the round is not abandoned again for the same reason."""
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
        """The server's side of all sums of this run, made when the names of all nodes are known.
        The list of peers is the one that at least as many nodes share as a sum needs; a node with
        another list is missing."""
        if self._server is None:
            terms = terms_of(secrets.token_hex(16), run, self.vector)
            lists = Counter(member.peers for member in self.members_of.values())
            peers, holders = max(lists.items(), key=lambda each: each[1], default=((), 0))
            if holders < terms.survivors:
                raise self._too_few(len(lists), terms.survivors, missing)
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

    def _too_few(self, lists: int, needed: int, missing: Missing) -> Exception:
        """The error for fewer nodes with one list of peers than a sum needs."""
        if lists > 1:
            return RoundAbandoned(f"the nodes have {lists} different lists of peers: {SAME_LIST}")
        wrong = [failure for failure in missing.values() if failure.kind in ("error", "malformed")]
        if wrong and not self.members_of:
            return NobodyAnswers(NO_MOD.format(count=len(wrong), reason=wrong[0].reason))
        return RoundAbandoned(
            f"{len(self.members_of)} nodes take part, of at least {needed}",
            tuple(missing.values()),
        )

    def _meet(self, cohort: Sequence[int], group: str, missing: Missing) -> None:
        """Asks clients whose names are not known yet for their names."""
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
        """One exchange with the available clients; returns the number of accepted replies. Clients
        that only make keys are not waited for."""
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
    """The transport of a run: `asking`, or one of masked sums. `virtual` as in `MaskedTransport`;
    None: that of `asking`."""
    vector = plan.mechanism.participation.vector
    if vector is None:
        return asking
    return MaskedTransport(asking, vector, virtual or asking.virtual_client)


def read_masking_reply(content: RecordDict) -> bytes:
    """Reads a node's answer to a masking request, as `masked_messages.reply_content` wrote it.
    Raises MalformedMessage for any other content."""
    record = content.get(MASKING)
    if isinstance(record, ConfigRecord) and len(record) == 1:
        reply = record.get(MASKING_REPLY)
    else:
        reply = None
    if len(content) != 1 or not isinstance(reply, bytes):
        raise MalformedMessage("the reply does not hold the answer to a masking request")
    return reply


def read_member(content: RecordDict) -> Member:
    """Reads the name of a node and its peers, as `masked_messages.member_content` wrote them.
    Raises MalformedMessage for any other content."""
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
