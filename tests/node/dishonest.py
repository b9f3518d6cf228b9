"""A server that tells each node at each stage what it likes, and asks Discreet's ClientApp, or an
app with the mod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from discreet.flower.masked_transport import read_masking_reply
from discreet.flower.serving import encode_request, parameters_record
from discreet.masking.wire import Part, Stage, Terms, read_request, write_request
from discreet.mechanisms.masked_sums import MaskedGaussian
from discreet.mechanisms.mechanism_table import server_mechanism
from discreet.models.models import flatten_parameters
from discreet.node.app import train
from discreet.node.nodes import model_of, shape_of
from discreet.protocol.masked_messages import ASKED, FROZEN, asked_bytes, masking_record, terms_of
from discreet.protocol.messages import MASKING, TrainRequest, request_items
from discreet.server.masking_server import Exchange, MaskingServer, Opened
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import Sizes
from discreet.settings.settings import client_settings
from tests.flower.masked_grid import MASKED, TINY, nodes
from tests.node.clients import config

RUN = "0123456789abcdef" * 2
TRAIN = str(MessageType.TRAIN)
NAMES = tuple(f"node-{number}" for number in range(5))
Door = Callable[[Message, Context], Message]


class NotGiven(Exception):
    """A node does not answer. The message is its reason."""


@dataclass(frozen=True)
class Told:
    """What a node is told of a run and of its first round. `arrays`: of an app that has the mod."""

    run: ClientSettings
    clip_norm: float = 0.5
    arrays: ArrayRecord | None = None

    @classmethod
    def of(cls, *words: str) -> Told:
        base = (
            *TINY,
            *MASKED,
            f"data.num_clients={len(NAMES)}",
            "rounds=3",
            "privacy.user.too_noisy=warn",
        )
        return cls(
            client_settings(
                config(*base, "privacy.user.target_epsilon=null", "privacy.noise=grid", *words)
            )
        )

    @property
    def terms(self) -> Terms:
        size = (
            flatten_parameters(model_of(self.run.model, shape_of(self.run))).numel()
            if self.arrays is None
            else SIZE
        )
        sizes = Sizes(size)
        found = server_mechanism(self.run, sizes=sizes) if self.run.masked else None
        sums: Any = found or MaskedGaussian(self.run, sizes=sizes)
        return terms_of(RUN, self.run, sums.vector)

    @property
    def request(self) -> TrainRequest:
        return TrainRequest(1, self.clip_norm, self.run)

    def content(self, parts: tuple[Part, ...]) -> RecordDict:
        """The message that asks for these stages on these terms."""
        masking = RecordDict({MASKING: masking_record(write_request(self.terms, parts), None)})
        if Stage.MASKED not in {part.stage for part in parts}:
            return masking
        if self.arrays is not None:
            asked = ConfigRecord({**request_items(self.request), FROZEN: list[str]()})
            return RecordDict({ASKED: asked, "arrays": self.arrays, **masking})
        params = parameters_record(flatten_parameters(model_of(self.run.model, shape_of(self.run))))
        return RecordDict({**encode_request(self.request, params), **masking})


SIZE = 6
ARRAYS = ArrayRecord({"weight": Array(np.zeros((2, 3), np.float32))})


def answer_of(
    door: Door, content: RecordDict, node_config: Mapping[str, str | int], kind: str = TRAIN
) -> RecordDict:
    """What an app answers.

    Raises:
      NotGiven: an error.
    """
    reply = door(Message(content, 1, kind), Context(1, 1, dict(node_config), RecordDict(), {}))
    if reply.has_error():
        raise NotGiven(reply.error.reason)
    return reply.content


@dataclass
class Dishonest:
    """The server, and the nodes' configurations by their names. `given` are the parts that each
    node has answered, each with what it was told."""

    configs: dict[str, dict[str, str | int]]
    told: Told
    door: Door = train
    given: list[tuple[str, Part, Told]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.server = MaskingServer(self.told.terms, tuple(self.configs))

    def begin(self, number: int = 1) -> Exchange:
        return self.server.begin(number, asked=asked_bytes(self.told.request))

    def ask(self, name: str, request: bytes, told: Told | None = None) -> bytes:
        """A node's answer to a request, on the terms that it is told."""
        _, parts = read_request(request)
        told = told or self.told
        answer = read_masking_reply(answer_of(self.door, told.content(parts), self.configs[name]))
        self.given += [(name, part, told) for part in parts]
        return answer

    def go_on(
        self, exchange: Exchange, lies: Mapping[str, Told] | None = None
    ) -> Exchange | Opened:
        for name, request in exchange.requests.items():
            exchange.take(name, self.ask(name, request, (lies or {}).get(name)))
        return exchange.close()

    def until(self, stage: Stage, lies: Mapping[str, Told] | None = None) -> Exchange:
        """The exchange of a stage, not yet sent."""
        found: Exchange | Opened = self.begin()
        while isinstance(found, Exchange) and found.stage is not stage:
            found = self.go_on(found, lies)
        assert isinstance(found, Exchange)
        return found


def server_of(
    folder: Path, told: Told, policy: Mapping[str, str] | None = None, *, door: Door = train
) -> Dishonest:
    """A server, and nodes whose owners have the same policy."""
    found = nodes(folder, len(NAMES), **policy or {}).configs.values()
    return Dishonest({str(each["name"]): each for each in found}, told, door)
