"""A whole training run at the server: budget, cohort, round, ledger, metrics, checkpoint, in that order."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TextIO

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.evaluation.private_evaluation import RATE, TRAIN_AND_RATE, EvaluationPlan
from discreet.ledger.budget import BudgetSpent, require_room_for
from discreet.ledger.durable_ledger import Charge
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TRAIN, Work
from discreet.queries.scores import main_score
from discreet.server.divergence import ClipWatch, divergence
from discreet.server.progress import Progress, round_line
from discreet.server.round import RoundMetrics, RoundSettings, dp_fedavg_round
from discreet.server.run_context import RunContext
from discreet.server.run_folder import RunStatus, read_status, write_status
from discreet.server.run_plan import cohort_sampling, evaluation_plan, round_settings
from discreet.server.state import Outcome, State
from discreet.server.transport import Brought, RoundAbandoned, RoundReport, Transport, check_exchange
from discreet.settings.privacy import GUARANTEES, USER

if TYPE_CHECKING:
    from dp_accounting import DpEvent

OnRound = Callable[[Mapping[str, object]], None]

MOST_ABANDONED = 3  # attempts in a row of one round under secure aggregation, before the run ends

logger = logging.getLogger("discreet")


class Scores(Protocol):
    """How good a model is on the server's public test set; None is what is not known."""

    @property
    def loss(self) -> float | None:
        """The lower the better."""

    @property
    def scores(self) -> Mapping[str, float | None]:
        """By their names in `discreet.queries.scores.SCORES`; the higher the `main_score`, the better."""


class TrainingRun:
    """Runs the rounds of a plan in a run folder.

    Args:
      context: the run.
      transport: asks the clients; for a sum that nobody has read under secure aggregation, and only then.
      evaluate: loss and scores of the model after a round, on the server's public test set.
      on_round: is told the row of metrics.csv of each round.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        transport: Transport,
        evaluate: Callable[[State], Scores],
        on_round: OnRound | None = None,
    ) -> None:
        plan = context.plan
        self.settings, self.sampling = round_settings(plan), cohort_sampling(plan)
        self.evaluation = evaluation_plan(plan)
        check_exchange(transport, masked=self.settings.release.masked)
        self.context, self.plan, self.transport, self.evaluate = context, plan, transport, evaluate
        self.folder, self.ledger, self.rounds = context.folder, context.ledger, plan.run.rounds
        self.on_round, self.mechanisms = on_round, plan.mechanisms
        self.finite = tuple(name for each in self.mechanisms.values() for name in each.finite)
        self.progress = Progress(None, self.rounds)
        before = read_status(self.folder) or RunStatus("running", self.rounds)
        self.status = replace(before, state="running", rounds=self.rounds, reason=None)
        self.members: Sequence[int] = ()
        self.out: set[int] = set()
        self.abandoned, before_now = 0, self.folder.read_metrics()
        shares = [row["fraction_below"] for row in before_now]
        self.clip_watch = ClipWatch(self.settings.release.clipping, [share for share in shares if share is not None])
        rows = [(row["loss"], row[main_score(row)]) for row in before_now]
        self.losses = [loss for loss, _ in rows if loss is not None]
        self.best = max((_score(*row) for row in rows if _is_finite(row[0])), default=(-math.inf, -math.inf))

    def run(self, *, progress: TextIO | None = None) -> Outcome:
        """Goes on from the context's state to the planned number of rounds, or until a budget is spent or training is
        lost.

        A run that is lost stays lost: resumed, it ends again before anything is spent. The run counts as running until
        whoever called this has written its last files: see `discreet.server.session.finish`. `progress` is the
        terminal to show on how far the run is.
        """
        checkpoint = self.context.state
        if self.folder.load_checkpoint(best=True) is None:
            self.folder.save_checkpoint(checkpoint, best=True)
        write_status(self.folder, self.status)
        logger.info("%d rounds, expected cohort %g", self.rounds, self.settings.expected_cohort)
        if self.evaluation:
            self.evaluation.announce()
        self.progress = Progress(progress, self.rounds)
        self._look_at_account(checkpoint)
        with self.progress.shown(checkpoint.round):
            outcome = self._run_rounds(checkpoint)
        return replace(outcome, checkpoint=self.rate(outcome.checkpoint, is_last=True))

    def _look_at_account(self, checkpoint: State) -> None:
        """Says what the population has spent before this run, and how far its budget reaches."""
        if self.ledger.account is None:
            return
        rounds = [self._settings_of(number + 1).release for number in range(checkpoint.round, self.rounds)]
        charges = [Charge(0, USER, "", each.event) for each in rounds if each.event is not None]
        plan, ratings = self.evaluation, list[Charge]()
        if plan and plan.event:
            ratings.append(Charge(0, USER, "", plan.event, plan.left(checkpoint.round, rounds=self.rounds)))
        logger.info("%s", self.context.says(self.ledger.account.outlook(charges, ratings)))

    def rate(self, last: State, *, is_last: bool) -> State:
        """If it is due, a cohort drawn anew rates the model after a round: an event of its own. It is left out, in
        words, if it would pass the budget. Returns `last` with what clients have reported of their accounts."""
        plan = self.evaluation
        if plan is None or not plan.is_due(last.round, last=is_last) or plan.has_rated(self.folder, last.round):
            return last
        try:
            if plan.event is not None:
                self._check_room(USER, plan.event, "rating the model")
            return self._rate(plan, last)
        except (BudgetSpent, RoundAbandoned) as reason:
            logger.warning("the model after round %d is not rated: %s", last.round, self.context.says(str(reason)))
            return last

    def _rate(self, plan: EvaluationPlan, last: State) -> State:
        self.members = self.transport.members()
        source = self.context.source.child("evaluation", last.round)
        report = RoundReport(finite=self.finite)
        cohort = self.sampling.draw(self.members, source.child("cohort"))
        replies = self._ask(last, cohort, RATE)
        charge, noise = partial(self._charge, last.round, USER), source.child("noise")
        at = plan.joined.of_round(last, noise, charge)
        sums = plan.joined.release.rate(report.accept(replies), at, plan.event)
        report.log_failures()
        rated = report.added_to(last)
        # Before the row: a crash in between rates the model again, and what clients have spent is not forgotten.
        if plan.event is None:
            self.folder.save_checkpoint(rated)
        plan.write(self.folder, last.round, sums, also=self._tell, spent=self._epsilons(rated))
        return rated

    def _ask(self, last: State, cohort: Sequence[int], work: Work) -> Iterable[Brought]:
        """What the clients of a cohort say of a model."""
        number, params = last.round + 1, last.params
        return self.transport.ask(
            round_number=number, params=params, clip_norm=last.clip_norm, cohort=cohort, work=work
        )

    def _run_rounds(self, checkpoint: State) -> Outcome:
        while (lost := divergence(self.losses, chance_loss=self.plan.chance_loss)) is None:
            if checkpoint.round >= self.rounds:
                return Outcome(checkpoint, None)
            try:
                release = self._settings_of(checkpoint.round + 1).release
                if release.guarantee is not None and release.event is not None:
                    self._check_room(release.guarantee, release.event, "the next round")
                checkpoint, report = self._next_round(checkpoint)
            except BudgetSpent as spent:
                return Outcome(checkpoint, self.context.says(str(spent)))
            except RoundAbandoned as loss:
                if self._gives_up(checkpoint.round + 1, loss):
                    return Outcome(
                        checkpoint, f"round {checkpoint.round + 1} was abandoned {MOST_ABANDONED} times: {loss}"
                    )
                continue
            self.abandoned = 0
            checkpoint = self.rate(checkpoint, is_last=False)
            if USER not in self.mechanisms and report.refused and self._nobody_left():
                return Outcome(checkpoint, f"every client refuses; the last one: {report.reasons[-1]}")
        best = self.folder.load_checkpoint(best=True)
        assert best is not None
        kept = f"the one after round {best.round}" if best.round else "the untrained one"
        return Outcome(checkpoint, f"{lost}; the model is {kept}", best)

    def _joins(self, number: int) -> bool:
        """True if the cohort of a round also rates the model that it starts from."""
        return self.evaluation is not None and self.evaluation.config.joins(number)

    def _settings_of(self, number: int) -> RoundSettings:
        return self.evaluation.joined if self.evaluation and self._joins(number) else self.settings

    def _epsilon(self, spent: PrivacyLedger) -> float:
        return spent.epsilon(self.plan.run.delta, self.plan.run.accountant)

    def _check_room(self, guarantee: str, event: DpEvent, what: str) -> None:
        """Raises BudgetSpent if an event would pass the budget of this run or, if it charges an account, of all
        runs over the same population; the message says what is left."""
        require_room_for(Charge(0, guarantee, "", event), what, ledger=self.ledger, budget=self.plan.budget(guarantee))

    def draw_cohort(self, checkpoint: State) -> list[int]:
        """The next round's cohort of the clients that can be asked."""
        return self.sampling.draw(self.members, self._draw(checkpoint).child("cohort"))

    def _nobody_left(self) -> bool:
        """Whether every client that can be asked has refused in this run. A spent budget or a policy stays what it is,
        so that a client that refused once stays out; the others go on without it."""
        return len(self.out) >= len(self.members) > 0 and self.out.issuperset(self.members)

    def _gives_up(self, number: int, lost: RoundAbandoned) -> bool:
        """Counts an attempt of a round that was abandoned, and says whether it was the last one."""
        report = RoundReport()
        report.miss(lost.failures)
        logger.warning("round %d is abandoned, unread: %s", number, lost)
        report.log_failures()
        self.abandoned += 1
        return self.abandoned == MOST_ABANDONED

    def _next_round(self, checkpoint: State) -> tuple[State, RoundReport]:
        """Does the round after `checkpoint`; writes ledger, metrics, checkpoint, in that order."""
        self.members = self.transport.members()  # the time that it waits for clients is no round's
        started, cohort = time.monotonic(), self.draw_cohort(checkpoint)
        work = TRAIN_AND_RATE if self._joins(checkpoint.round + 1) else TRAIN
        replies = self.progress.counted(self._ask(checkpoint, cohort, work), cohort=len(cohort))
        report = RoundReport(cohort=len(cohort), finite=self.finite)
        state, metrics = self._round(checkpoint, replies, report)
        self.out |= report.refused
        if self.evaluation and metrics.answers:
            self.evaluation.write(self.folder, checkpoint.round, metrics.answers, also=self._tell)
        for note in self.clip_watch.notes(state.clip_norm, metrics.fraction_below):
            logger.warning("%s", self.context.says(note))
        after = report.added_to(state)
        evaluation, row = self._report(after, metrics, report, started)
        # The checkpoint comes last: a crash before it does the round again, and the ledger then holds both.
        self.folder.save_checkpoint(after, account=self.ledger.account.mark() if self.ledger.account else None)
        score = _score(evaluation.loss, evaluation.scores.get(main_score(evaluation.scores)))
        if _is_finite(evaluation.loss) and score > self.best:
            self.best = score
            self.folder.save_checkpoint(after, best=True)
        self._tell(row)  # after the checkpoint: a hook that fails costs no round
        return after, report

    def _round(self, checkpoint: State, replies: Iterable[Brought], report: RoundReport) -> tuple[State, RoundMetrics]:
        number = checkpoint.round + 1
        settings = self._settings_of(number)
        charge = partial(self._charge, number, settings.release.guarantee or USER)
        accepted, noise = report.accept(replies), self._draw(checkpoint).child("noise")
        done = dp_fedavg_round(checkpoint, accepted, settings, source=noise, charge=charge)
        for name, each in self.mechanisms.items():
            if (
                each.at_server and each.reported
            ):  # of what clients account too, each for itself: the event is the same for all of them
                report.epsilons |= dict.fromkeys(each.reported, self._epsilon(self.ledger.spent(name)))
        return done

    def _tell(self, row: Mapping[str, object]) -> None:
        if self.on_round is not None:
            self.on_round(row)

    def _charge(self, number: int, guarantee: str, event: DpEvent) -> None:
        self.ledger.charge([Charge(number, guarantee, "", event)])

    def _draw(self, checkpoint: State) -> RandomSource:
        return self.context.source.child("round", checkpoint.round + 1)

    def _report(
        self, after: State, metrics: RoundMetrics, report: RoundReport, started: float
    ) -> tuple[Scores, dict[str, object]]:
        """Evaluates, and writes metrics, status and log. Returns the row too."""
        evaluation = self.evaluate(after)
        row: dict[str, object] = {
            "round": after.round,
            "loss": evaluation.loss,
            **evaluation.scores,
            "clip_norm": metrics.clip_norm,
            "fraction_below": metrics.fraction_below,
            "cohort": report.cohort,
            "replies": metrics.replies,
            **self._epsilons(after),
            "seconds": time.monotonic() - started,
        }
        self.folder.append_metrics(row)
        self.losses += [] if evaluation.loss is None else [evaluation.loss]
        self.status = after_round(self.status, report, number=after.round, nodes=len(self.members))
        write_status(self.folder, self.status)
        fields = {"event": "round", **row, "failures": dict(report.failures)}
        logger.info(round_line(row, rounds=self.rounds), extra={"fields": fields})
        report.log_failures()
        return evaluation, row

    def _epsilons(self, after: State) -> dict[str, float]:
        """What is spent by now; infinity for a guarantee that is off."""
        spent = dict.fromkeys((f"epsilon_{name}" for name in GUARANTEES), math.inf)
        for name, each in self.mechanisms.items():
            key = f"epsilon_{name}"
            spent[key] = after.largest_reported(key) if each.reported else self._epsilon(self.ledger.spent(name))
        return spent


def after_round(status: RunStatus, report: RoundReport, *, number: int, nodes: int) -> RunStatus:
    """The status with a round's failures added."""
    failures = Counter(status.failures) + report.failures
    status = replace(status, nodes=nodes, failures=dict(sorted(failures.items())))
    return replace(status, last_failure=report.reasons[-1], last_failure_round=number) if report.reasons else status


def _score(loss: float | None, score: float | None) -> tuple[float, float]:
    """What the best model is chosen by: accuracy or R2, and of equal ones the lesser loss."""
    return score or 0.0, -(loss or 0.0)


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)
