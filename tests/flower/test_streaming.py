"""The server holds a few replies at a time, however many come. Reference counts decide: no collection of garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from flwr.app import Array, Message
from flwr.supercore.task_identity import TaskIdentity

import discreet.flower.grid_transport
from discreet.flower.grid_transport import GridTransport
from discreet.flower.server_messages import OwnMessages
from discreet.mechanisms.mechanism import PlainSum
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply, encode_reply
from discreet.server.round import RoundSettings, dp_fedavg_round
from discreet.server.server_optimizer import ServerSGD
from discreet.server.state import initial_state
from discreet.server.transport import ReplyStats
from discreet.settings.settings import Settings, client_settings

SIZE, AT_ONCE = 100, 4


@dataclass
class EagerGrid:
    """Every client has replied before the server looks for the first time."""

    clients: int
    sent: dict[str, Message] = field(default_factory=dict)
    made: list[weakref.ref[Array]] = field(default_factory=list)
    most: int = 0

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.clients + 1)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        new = {f"m{number}": message for number, message in enumerate(messages, len(self.sent))}
        for name, message in new.items():
            message.metadata.__dict__["_message_id"] = name
        self.sent |= new
        return list(new)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.reply(self.sent[name]) for name in message_ids]

    def reply(self, message: Message) -> Message:
        content = encode_reply(TrainReply(1, torch.full((SIZE,), 0.01), below=True))
        record = content["update"]
        self.made.append(weakref.ref(record["update"]))  # type: ignore[arg-type]
        self.most = max(self.most, sum(array() is not None for array in self.made))
        return Message(content, reply_to=message)


@pytest.fixture(autouse=True)
def _without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(discreet.flower.grid_transport, "PULL_FLOATS", AT_ONCE * SIZE)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("clients", [10, 50])
def test_a_round_holds_a_few_replies_however_many_come(clients: int) -> None:
    grid = EagerGrid(clients)
    transport = GridTransport(grid, OwnMessages(client_settings(Settings())), timeout=60, population_size=clients)  # type: ignore[arg-type]
    state = initial_state(torch.zeros(SIZE), clip_norm=1.0)
    replies = transport.ask(
        round_number=1, params=state.params, clip_norm=1.0, cohort=list(transport.available_clients())
    )
    settings = RoundSettings(clients, ServerSGD(), PlainSum())
    after, metrics = dp_fedavg_round(
        state, ReplyStats().accept(replies), settings, source=seeded_source(76493), charge=lambda _: None
    )
    assert metrics.replies == len(grid.made) == clients
    assert torch.allclose(after.params, torch.full((SIZE,), 0.01))
    # Those of one look, and the last one of the look before.
    assert grid.most <= AT_ONCE + 1
