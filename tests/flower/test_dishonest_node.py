"""A node that spoils its part of a masked round is asked no more, and the run goes on without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from discreet.flower.masked_transport import read_masking_reply
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import (
    Part,
    Stage,
    join,
    join_named,
    read_reply,
    split,
    split_named,
    write_reply,
)
from discreet.protocol.masked_messages import MASKING_REPLY, NAME, WHO, read_masking
from discreet.protocol.messages import MASKING
from discreet.run_files.run_folder import RunFolder
from tests.flower.masked_grid import Nodes, federated, nodes, words_of

Answer = RecordDict | Error | None


def unsigned_keys(body: bytes) -> bytes:
    return join(*split(body)[:-1], b"not signed")


def shares_that_nobody_can_open(body: bytes) -> bytes:
    return join_named({name: bytes(len(share)) for name, share in split_named(body).items()})


def another_signature(body: bytes) -> bytes:
    return body[::-1]


SPOILT = {  # the stage, what is said at it, and how many charges are lost by it
    "keys": (Stage.KEYS, unsigned_keys, 0),
    "shares": (Stage.SHARES, shares_that_nobody_can_open, 0),
    "signature": (Stage.CONFIRM, another_signature, 1),
}


class Spoiling(Nodes):
    """Node 1 says something else at one stage."""

    stage = Stage.KEYS
    spoil: Callable[[bytes], bytes] = staticmethod(unsigned_keys)

    def _reply(self, node: int, message: Message) -> Answer:
        content = super()._reply(node, message)
        if node != 1 or not isinstance(content, RecordDict):
            return content
        if read_masking(message.content)[0] == WHO:
            return content
        parts = read_reply(read_masking_reply(content))
        told = write_reply([self._spoilt(part) for part in parts])
        return RecordDict({MASKING: ConfigRecord({MASKING_REPLY: told})})

    def _spoilt(self, part: Part) -> Part:
        return part.answered(self.spoil(part.body)) if part.stage is self.stage else part


class Squatting(Nodes):
    """Node 1 says that it is the one of node 2's name."""

    def _reply(self, node: int, message: Message) -> Answer:
        content = super()._reply(node, message)
        asked_who = read_masking(message.content)[0] == WHO
        if node == 1 and asked_who and isinstance(content, RecordDict):
            record = content[MASKING]
            assert isinstance(record, ConfigRecord)
            return RecordDict({MASKING: ConfigRecord({**record, NAME: "node-1"})})
        return content


@pytest.mark.parametrize("kind", SPOILT)
def test_a_node_that_spoils_a_stage_is_left_out_and_the_run_goes_on(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Spoiling(configs=nodes(tmp_path).configs)
    grid.stage, spoil, lost = SPOILT[kind]
    grid.spoil = spoil
    federated(words_of(tmp_path / "run"), grid)
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [3, 3]
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 2 + lost
    assert caplog.text.count("is asked no more: other nodes refuse what it sent") == 1


def test_a_node_that_takes_the_name_of_another_is_left_out(tmp_path: Path) -> None:
    grid = Squatting(configs=nodes(tmp_path).configs)
    federated(words_of(tmp_path / "run"), grid)
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [3, 3]


def test_one_node_that_refuses_by_name_leaves_nobody_out(tmp_path: Path) -> None:
    class Accusing(Nodes):
        def _reply(self, node: int, message: Message) -> Answer:
            content = super()._reply(node, message)
            if node != 1 or read_masking(message.content)[0] == WHO:
                return content
            return Error(code=451, reason="'node-1', 'node-2', 'node-3' did not sign")

    grid = Accusing(configs=nodes(tmp_path).configs)
    federated(words_of(tmp_path / "run"), grid)
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [3, 3]
