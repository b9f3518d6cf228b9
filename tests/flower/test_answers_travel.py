"""Answers to a query on their way from a client to the server: beside an update, and alone."""

from __future__ import annotations

import math

import pytest
import torch
from flwr.app import RecordDict

from discreet.flower.server_messages import OwnMessages
from discreet.protocol.messages import MalformedMessage, TrainReply, Work, decode_request, encode_reply
from discreet.settings.settings import Settings, client_settings

MESSAGES = OwnMessages(client_settings(Settings()), {"evaluation": 2})
RATE = Work(trains=False, query="evaluation")


@pytest.mark.parametrize("trains", [True, False])
def test_what_is_asked_and_what_is_answered_survive_the_wire(trains: bool) -> None:
    asked = MESSAGES.of_round(3, torch.zeros(5), 0.5, Work(trains, "evaluation"))
    request, params = decode_request(asked.request(None))
    assert (request.work, len(params)) == (Work(trains, "evaluation"), 5)
    said = TrainReply(3, torch.ones(5 if trains else 0), below=False, answer=torch.tensor([0.5, -0.25]))
    read = asked.reply(encode_reply(said))
    assert read.answer is not None
    assert (read.answer.tolist(), len(read.update)) == ([0.5, -0.25], 5 if trains else 0)


def reply(answer: torch.Tensor | None) -> RecordDict:
    return encode_reply(TrainReply(3, torch.zeros(0), below=False, answer=answer))


WRONG = {"missing": None, "too long": torch.zeros(3), "NaN": torch.tensor([math.nan, 0.0]), "empty": torch.zeros(0)}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_an_answer_that_is_not_as_it_was_asked_is_refused(answer: torch.Tensor | None) -> None:
    with pytest.raises(MalformedMessage, match="answer"):
        MESSAGES.of_round(3, torch.zeros(5), 0.5, RATE).reply(reply(answer))
