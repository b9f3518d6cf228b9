"""What clients are asked of their data before the first round of a run, by simulated clients and by nodes alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from discreet.evaluation.private_statistics import data_query, needs_normaliser, normaliser_in, with_normaliser
from discreet.mechanisms.sums import Replies
from discreet.protocol.messages import Work
from discreet.queries.query import NORMALISE, Query
from discreet.server.session import Session
from discreet.server.transport import RoundReport, Transport

Answers = Callable[[Query], Replies]

logger = logging.getLogger("discreet")


def answers_by(transport: Transport, session: Session, name: str) -> Replies:
    """What all clients that can be asked answer to a question about their data, as it comes. They get no parameters."""
    members, report = list(transport.members()), RoundReport()
    asked = Work(trains=False, query=name)
    clip_norm, nothing = session.plan.first_clip_norm, torch.zeros(0)
    replies = transport.ask(round_number=1, params=nothing, clip_norm=clip_norm, cohort=members, work=asked)
    yield from report.accept(replies)
    report.log_failures()
    answered = len(members) - sum(report.failures.values())
    logger.info("%d of %d clients answered what their data are like", answered, len(members))


def normalised(session: Session, answers: Answers) -> Session:
    """The session of a run with `data.normalise=private`, whose clients have been asked what inputs are normalised by;
    any other session as it is, and one that goes on.

    Raises:
      ConfigError: asking would pass the budget; nobody is asked then.
    """
    plan, task = session.plan, session.task
    if not needs_normaliser(plan):
        return session
    plan = with_normaliser(session.context, task, answers(data_query(NORMALISE, plan, task)))
    task = normaliser_in(plan.run.normaliser).task(task)
    return replace(session, context=replace(session.context, plan=plan), task=task)
