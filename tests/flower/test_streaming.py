"""The server holds a few replies at a time, however many come. Reference counts decide: no collection of garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from flwr.app import Array, Message, RecordDict

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
from tests.flower.flower_apps import FakeGrid

SIZE, AT_ONCE = 100, 4


class Replies:
    """Every client has replied before the server looks for the first time; `most` were in memory at once."""

    def __init__(self) -> None:
        self.made, self.most = list[weakref.ref[Array]](), 0

    def __call__(self, message: Message) -> RecordDict:
        content = encode_reply(TrainReply(1, torch.full((SIZE,), 0.01), below=True))
        self.made.append(weakref.ref(content["update"]["update"]))  # type: ignore[arg-type, index]
        self.most = max(self.most, sum(array() is not None for array in self.made))
        return content


@pytest.fixture(autouse=True)
def _without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(discreet.flower.grid_transport, "PULL_FLOATS", AT_ONCE * SIZE)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("clients", [10, 50])
def test_a_round_holds_a_few_replies_however_many_come(clients: int) -> None:
    replied = Replies()
    grid = FakeGrid(dict.fromkeys(range(1, clients + 1), replied))
    transport = GridTransport(grid, OwnMessages(client_settings(Settings())), timeout=60, population_size=clients)  # type: ignore[arg-type]
    state = initial_state(torch.zeros(SIZE), clip_norm=1.0)
    replies = transport.ask(
        round_number=1, params=state.params, clip_norm=1.0, cohort=list(transport.available_clients())
    )
    settings = RoundSettings(clients, ServerSGD(), PlainSum())
    after, metrics = dp_fedavg_round(
        state, ReplyStats().accept(replies), settings, source=seeded_source(76493), charge=lambda _: None
    )
    assert metrics.replies == len(replied.made) == clients
    assert torch.allclose(after.params, torch.full((SIZE,), 0.01))
    # Those of one look, and the last one of the look before.
    assert replied.most <= AT_ONCE + 1
