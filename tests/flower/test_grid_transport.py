"""The transport over Flower's grid: whatever a client sends, the round goes on and its noise
stays."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.app.message import array
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.message_pb2 import Message as PulledMessage
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid
from numpy.typing import NDArray

import discreet.flower.grid_transport
from discreet.flower.grid_transport import GridTransport
from discreet.flower.limited_pull import FIELDS
from discreet.flower.serving import own_messages
from discreet.mechanisms.unprotected import Unprotected
from discreet.planning.state import initial_state
from discreet.privacy.randomness import seeded_source
from discreet.privacy.sampling import CohortSampling
from discreet.protocol.messages import (
    REFUSED_CODE,
    Assignment,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
    decode_request,
)
from discreet.server.transport import Failure, MessagesTooLarge, ReplyStats
from discreet.settings.settings import Settings, client_settings
from tests.flower.flower_apps import Answer, FakeGrid
from tests.node.clients import encode_reply
from tests.rounds import round_of

RUN = client_settings(Settings())
VIRTUAL = [VirtualClient(number, "folder") for number in range(5)]


def good(message: Message) -> RecordDict:
    request, params = decode_request(message.content)
    return encode_reply(TrainReply(request.round, params + 1, below=True, epsilon_example=0.5))


def refused(message: Message) -> Error:
    return Error(REFUSED_CODE, "the policy of this client requires more")


def worker(message: Message) -> RecordDict | Error:
    return (
        refused(message) if message.metadata.message_type == MessageType.EVALUATE else good(message)
    )


def garbage(message: Message) -> RecordDict:
    return RecordDict(
        {"update": ArrayRecord({"update": Array(np.array([np.nan, 1.0]))}), "reply": MetricRecord()}
    )


def silent(message: Message) -> None:
    return None


def ask(
    grid: FakeGrid | LinkGrid, cohort: list[int], *, timeout: float = 5.0
) -> list[TrainReply | Failure]:
    transport = GridTransport(
        grid, own_messages, timeout=timeout, population_size=len(grid.answers)
    )  # type: ignore[arg-type]
    transport.available_clients()
    return list(transport.ask(TrainRequest(4, math.inf, RUN), torch.zeros(2), cohort))


def kinds(replies: list[TrainReply | Failure]) -> list[str]:
    return sorted(reply.kind if isinstance(reply, Failure) else "good" for reply in replies)


@pytest.mark.usefixtures("quick_grid")
def test_every_kind_of_failure_is_counted_and_none_stops_the_round() -> None:
    answers: dict[int, Answer] = {
        1: good,
        2: refused,
        3: lambda _: Error(2, "it crashed"),
        4: garbage,
        5: silent,
    }
    grid = FakeGrid(answers)
    assert kinds(ask(grid, [1, 2, 3, 4, 5], timeout=0.3)) == [
        "error",
        "good",
        "late",
        "malformed",
        "refused",
    ]
    request, _ = decode_request(next(iter(grid.sent.values())).content)
    assert request.virtual is None  # a real federation is told no client and no folder


RAISED = "<class 'builtins.ValueError'>:<'patient 4711 has no weight'>"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (Error(9, RAISED), "error", "ValueError (code 9); the client's own log says why"),
        (Error(9, "patient 4711"), "error", "an error (code 9); the client's own log says why"),
        (Error(500, "patient 4711"), "error", "an error (code 500); the client's own log says why"),
        (Error(3, "patient 4711"), "late", "no reply came in time (code 3)"),
    ],
)
def test_no_word_of_a_clients_exception_is_kept_at_the_server(
    error: Error, kind: str, reason: str
) -> None:
    (failure,) = ask(FakeGrid({1: lambda _: error}), [1])
    assert (failure.kind, failure.reason) == (kind, reason)


def test_a_duplicate_reply_counts_once() -> None:
    assert kinds(ask(FakeGrid({1: good}, times=2), [1])) == ["good"]


def test_messages_that_are_too_large_are_one_clear_error() -> None:
    class FullGrid(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            return []  # what Flower's grid makes of HTTP 413

    with pytest.raises(MessagesTooLarge, match=r"round 4 .*too large \(HTTP 413\)"):
        ask(FullGrid({1: good, 2: good}), [1, 2])


def asked_for(request: PullAppMessagesRequest) -> Iterable[str]:
    """The messages whose replies are wanted, by the name that this Flower has for them."""
    before, now = FIELDS
    wanted: Iterable[str] = getattr(request, before, None) or getattr(request, now).vals
    return wanted


class LinkGrid(HttpGrid):
    """Flower's own grid, and the calls of a SuperLink that it pulls replies by.

    Attributes:
      claims: by client, whose message its reply itself says that it answers.
      spoil: changes the parts of what the client 1 replies.
    """

    def __init__(self, answers: dict[int, Callable[[Message], RecordDict]]) -> None:
        super().__init__(token="any")
        self.set_run(Run.create_empty(1))
        self._client = self  # type: ignore[assignment]
        self.answers, self.claims = answers, dict[int, int]()
        self.spoil: Callable[[dict[str, bytes]], None] = lambda _: None
        self.sent, self.objects, self.pulled = dict[str, Message](), dict[str, bytes](), 0

    def get_node_ids(self) -> Iterable[int]:
        return list(self.answers)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            number = str(message.metadata.dst_node_id)
            message.metadata.__dict__["_message_id"] = number
            self.sent[number] = message
        return [str(message.metadata.dst_node_id) for message in messages]

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:  # noqa: N802
        response = PullAppMessagesResponse()
        for number in asked_for(request):
            client = int(number)
            answered = self.sent[str(self.claims.get(client, client))]
            reply = Message(self.answers[client](self.sent[number]), reply_to=answered)
            parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
            if client == 1:
                self.spoil(parts)
            self.objects |= parts
            metadata = Metadata(message_id=reply.object_id, reply_to_message_id=number)
            response.messages_list.append(PulledMessage(metadata=metadata))
            response.message_object_trees.append(get_object_tree(reply))
        return response

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:  # noqa: N802
        self.pulled += 1
        return PullObjectResponse(
            object_found=True, object_available=True, object_content=self.objects[request.object_id]
        )

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> None:  # noqa: N802
        pass


def large(values: NDArray[np.float32]) -> Callable[[Message], RecordDict]:
    return lambda message: RecordDict(
        {"update": ArrayRecord({"update": Array(values)}), "reply": MetricRecord()}
    )


def test_a_reply_that_would_unpack_to_more_than_asked_is_refused_before_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 2**16)
    grid = LinkGrid({1: large(np.zeros(2**24, np.float32)), 2: good})
    malformed, reply = ask(grid, [1, 2])
    assert isinstance(malformed, Failure)
    assert re.fullmatch(r"the reply unpacks to 6\d{7} bytes, of 1048592 that .*", malformed.reason)
    assert sum(map(len, grid.objects.values())) < 2**18
    assert isinstance(reply, TrainReply)


def test_what_is_pulled_of_a_reply_stops_at_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(array, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 2**16)
    grid = LinkGrid({1: large(np.arange(2**21, dtype=np.float32))})  # 128 pieces, all different
    (malformed,) = ask(grid, [1])
    assert isinstance(malformed, Failure)
    assert re.match(r"the reply has more than 1048592 bytes", malformed.reason)
    assert grid.pulled < 64


def test_a_reply_that_can_not_be_unpacked_costs_one_reply() -> None:
    def spoil(parts: dict[str, bytes]) -> None:
        for name, content in parts.items():
            parts[name] = content.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": {"1": 2}')

    grid = LinkGrid({1: large(np.ones(3, np.float32)), 2: good})
    grid.spoil = spoil
    malformed, reply = ask(grid, [1, 2])
    assert isinstance(malformed, Failure)
    assert malformed.reason.startswith("the reply can't be decoded")
    assert isinstance(reply, TrainReply)


def test_a_reply_counts_for_the_node_that_sent_it_whatever_it_says_that_it_answers() -> None:
    grid = LinkGrid({1: garbage, 2: good})
    grid.claims[1] = 2
    replies = {reply.client: reply for reply in ask(grid, [1, 2])}
    assert isinstance(replies[1], Failure)
    assert isinstance(replies[2], TrainReply)


@pytest.mark.usefixtures("quick_grid")
def test_nobody_is_asked_while_more_nodes_are_connected_than_clients_are_declared() -> None:
    grid = FakeGrid({1: good, 2: good, 3: good})
    transport = GridTransport(grid, own_messages, timeout=0.1, population_size=2)  # type: ignore[arg-type]
    with pytest.raises(
        TimeoutError,
        match=r"3 nodes are connected, .*sampling\.population_size=2\b",
    ):
        transport.available_clients()
    grid.answers.pop(3)
    assert transport.available_clients() == [1, 2]


@pytest.mark.usefixtures("quick_grid")
def test_nodes_that_are_few_for_their_population_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = FakeGrid(dict.fromkeys(range(4), good))
    for population, warnings in ((8, 0), (100, 1)):
        transport = GridTransport(
            grid,  # type: ignore[arg-type]
            own_messages,
            timeout=5,
            population_size=population,
            names={"sampling.population_size": "population_size"},
        )
        caplog.clear()
        for _ in range(2):
            assert transport.available_clients() == [0, 1, 2, 3]
        assert len(caplog.messages) == warnings
    assert "4 nodes are connected, and population_size=100 is declared" in caplog.messages[0]
    assert "steps have 4% of their size, and the noise stays" in caplog.messages[0]


def test_no_cohort_is_drawn_of_more_clients_than_are_declared() -> None:
    for sampling in (CohortSampling(kind, 1.0, 2) for kind in ("poisson", "fixed", "everyone")):
        assert sampling.draw([1, 2], seeded_source(90127)) == [1, 2]
        with pytest.raises(
            ValueError, match=r"sampling\.population_size=2, but 3 clients are connected"
        ):
            sampling.draw([1, 2, 3], seeded_source(90127))


def test_virtual_clients_share_the_nodes_that_there_are() -> None:
    grid = FakeGrid({10: worker, 20: worker})
    transport = GridTransport(grid, own_messages, timeout=5, population_size=5, virtual=VIRTUAL)  # type: ignore[arg-type]
    assert list(transport.available_clients()) == [0, 1, 2, 3, 4]
    grid.sent.clear()
    list(transport.ask(TrainRequest(1, 1.0, RUN), torch.zeros(2), [0, 3, 4]))
    sent = [
        (decode_request(m.content)[0].virtual, m.metadata.dst_node_id) for m in grid.sent.values()
    ]
    assert [(virtual.client_id, node) for virtual, node in sent if virtual] == [
        (0, 10),
        (3, 20),
        (4, 10),
    ]


@pytest.mark.usefixtures("quick_grid")
def test_no_virtual_client_is_asked_before_a_worker_answers() -> None:
    grid = FakeGrid({10: silent})
    transport = GridTransport(grid, own_messages, timeout=0.1, population_size=5, virtual=VIRTUAL)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"0\.1 s \(server\.round_timeout\)"):
        transport.available_clients()
    assert [message.metadata.message_type for message in grid.sent.values()] == [
        MessageType.EVALUATE
    ]
    grid.answers[10] = worker
    assert list(transport.available_clients()) == [0, 1, 2, 3, 4]


def test_an_answer_that_is_not_as_it_was_asked_is_refused() -> None:
    asked = TrainRequest(3, 0.5, RUN, work=Assignment(trains=False, query="evaluation"))
    for answer in (None, torch.zeros(3), torch.tensor([math.nan, 0.0]), torch.zeros(0)):
        reply = encode_reply(TrainReply(3, torch.zeros(0), below=False, answer=answer))
        with pytest.raises(MalformedMessage, match="answer"):
            own_messages(asked, torch.zeros(5), lengths={"evaluation": 2}).reply(reply)


SIZE, AT_ONCE = 100, 4


class Replies:
    """Every client has replied before the server looks for the first time; `most` were in memory at
    once."""

    def __init__(self) -> None:
        self.made, self.most = list[weakref.ref[Array]](), 0

    def __call__(self, message: Message) -> RecordDict:
        content = encode_reply(TrainReply(1, torch.full((SIZE,), 0.01), below=True))
        self.made.append(weakref.ref(content["update"]["update"]))  # type: ignore[arg-type, index]
        self.most = max(self.most, sum(array() is not None for array in self.made))
        return content


@pytest.fixture
def _without_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(discreet.flower.grid_transport, "PULL_FLOATS", AT_ONCE * SIZE)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_garbage_collection")
@pytest.mark.parametrize("clients", [10, 50])
def test_a_round_holds_a_few_replies_however_many_come(clients: int) -> None:
    replied = Replies()
    grid = FakeGrid(dict.fromkeys(range(1, clients + 1), replied))
    transport = GridTransport(grid, own_messages, timeout=60, population_size=clients)  # type: ignore[arg-type]
    state = initial_state(torch.zeros(SIZE), clip_norm=1.0)
    replies = transport.ask(TrainRequest(1, 1.0, RUN), state.params, transport.available_clients())
    run = replace(
        RUN, user=replace(RUN.user, enabled=False, probability=1.0, population_size=clients)
    )
    after, metrics = round_of(
        Unprotected(run),
        state,
        filter(None, map(ReplyStats().count, replies)),
        seeded_source(76493),
    )
    assert metrics.replies == len(replied.made) == clients
    assert torch.allclose(after.params, torch.full((SIZE,), 0.01))
    # Those of one look, and the last one of the look before.
    assert replied.most <= AT_ONCE + 1
