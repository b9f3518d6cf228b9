"""What travels for a masked sum: bytes of `discreet.masking` in a record of their own.

The stage that asks for a masked vector goes with the train request and the parameters; the other stages go alone. An
empty request asks a node who it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from discreet.federated.messages import MalformedMessage, VirtualClient, take_virtual, virtual_items

MASKING = "masking"  # the record's name
WHO = b""
ASKED, FROZEN = (
    "masking-train-request",
    "frozen-arrays",
)  # a train request beside another app's records, and what is in it
_REQUEST, _REPLY, _NAME, _PEERS = "request", "reply", "name", "peers"


@dataclass(frozen=True)
class Member:
    """Who a node is among whom: what it says when it is asked."""

    name: str
    peers: tuple[str, ...]


def masking_record(request: bytes, virtual: VirtualClient | None) -> ConfigRecord:
    """What a node is asked; in a simulation with which client to be."""
    return ConfigRecord({_REQUEST: request, **virtual_items(virtual)})


def read_masking(content: RecordDict) -> tuple[bytes, VirtualClient | None]:
    """What `masking_record` wrote.

    Raises:
      MalformedMessage: it holds something else.
    """
    record = content.get(MASKING)
    left: dict[str, object] = dict(record) if isinstance(record, ConfigRecord) else {}
    request = left.pop(_REQUEST, None)
    try:
        virtual = take_virtual(left)
    except MalformedMessage:
        raise
    except ValueError as error:
        raise MalformedMessage(f"the masking request can't be followed: {error}") from error
    if not isinstance(request, bytes) or left:
        raise MalformedMessage("the message holds no masking request of this version of Discreet")
    return request, virtual


def reply_content(reply: bytes) -> RecordDict:
    """What a node answers."""
    return RecordDict({MASKING: ConfigRecord({_REPLY: reply})})


def read_reply_content(content: RecordDict) -> bytes:
    """What `reply_content` wrote.

    Raises:
      MalformedMessage: it holds something else.
    """
    record = content.get(MASKING)
    reply = record.get(_REPLY) if isinstance(record, ConfigRecord) and len(record) == 1 else None
    if len(content) != 1 or not isinstance(reply, bytes):
        raise MalformedMessage("the reply does not hold the answer to a masking request")
    return reply


def member_content(member: Member) -> RecordDict:
    """What a node says that is asked who it is."""
    return RecordDict({MASKING: ConfigRecord({_NAME: member.name, _PEERS: list(member.peers)})})


def read_member(content: RecordDict) -> Member:
    """What `member_content` wrote.

    Raises:
      MalformedMessage: it holds something else, or a name that is not among the peers.
    """
    record = content.get(MASKING)
    name, peers = (record.get(_NAME), record.get(_PEERS)) if isinstance(record, ConfigRecord) else (None, None)
    if not isinstance(name, str) or not isinstance(peers, list) or not all(isinstance(each, str) for each in peers):
        raise MalformedMessage("the reply does not say which node it is, and among whom")
    member = Member(name, tuple(str(each) for each in peers))
    if name not in member.peers or len(set(member.peers)) != len(member.peers):
        raise MalformedMessage("the node's list of peers does not hold itself, or a name twice")
    return member
