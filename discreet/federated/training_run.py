"""A whole training run at the server: budget, cohort, round, ledger, metrics, checkpoint, in that order."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TextIO

from discreet.federated.budget import BudgetSpentError, require_room_for
from discreet.federated.divergence import ClipWatch, divergence
from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.federated.guarantees import EXAMPLE, USER
from discreet.federated.messages import TRAIN, TrainReply, Work
from discreet.federated.private_evaluation import RATE, TRAIN_AND_RATE, EvaluationPlan
from discreet.federated.progress import Progress
from discreet.federated.query import Sums
from discreet.federated.reported_epsilons import finite_epsilons, largest_reported, with_reported
from discreet.federated.round import RoundMetrics, RoundSettings, ServerState, dp_fedavg_round
from discreet.federated.round_line import round_line
from discreet.federated.run_folder import Checkpoint, RunFolder, RunStatus, read_status, write_status
from discreet.federated.sealed_sum import RoundAbandoned, Sealed, SealedTransport, check_sealed
from discreet.federated.secure_round import secure_answers, secure_round
from discreet.federated.training_plan import Plan
from discreet.federated.transport import Failure, Replies, RoundReport, Transport
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import RandomSource
from discreet.tasks.scores import main_score

if TYPE_CHECKING:
    from dp_accounting import DpEvent

MOST_ABANDONED = 3  # attempts in a row of one round under secure aggregation, before the run ends

logger = logging.getLogger("discreet")


class Scores(Protocol):
    """How good a model is on the server's public test set; None is what is not known."""

    @property
    def loss(self) -> float | None:
        """The lower the better."""

    @property
    def scores(self) -> Mapping[str, float | None]:
        """By their names in `discreet.tasks.scores.SCORES`; the higher the `main_score`, the better."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its last state, why it stopped if it did, and its model.

    Attributes:
      checkpoint: after the last round, with all that was spent.
      stopped: why the run ended other than by its last planned round, in words; None if it did not.
      best: of a run that was lost: its model in place of the last one; None otherwise.
    """

    checkpoint: Checkpoint
    stopped: str | None
    best: Checkpoint | None = None

    @property
    def model(self) -> Checkpoint:
        """What the run is to publish as its model."""
        return self.best or self.checkpoint


class TrainingRun:
    """Runs the rounds of a plan in a run folder.

    Args:
      plan: what to do.
      folder: where everything is written.
      ledger: of the server.
      transport: asks the clients; for sealed sums under secure aggregation, and only then.
      evaluate: loss and scores of the model after a round, on the server's public test set.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        *,
        ledger: DurableLedger,
        transport: Transport | SealedTransport,
        evaluate: Callable[[Checkpoint], Scores],
    ) -> None:
        check_sealed(transport, secure=plan.settings.secure is not None)
        self.plan, self.folder, self.ledger = plan, folder, ledger
        self.transport, self.evaluate = transport, evaluate
        self.progress = Progress(None, plan.rounds)
        before = read_status(folder) or RunStatus("running", plan.rounds)
        self.status = replace(before, state="running", rounds=plan.rounds, reason=None)
        self.members: Sequence[int] = ()
        self.out: set[int] = set()
        self.abandoned, before_now = 0, folder.read_metrics()
        shares = [row["fraction_below"] for row in before_now]
        self.clip_watch = ClipWatch(plan.settings.user, [share for share in shares if share is not None])
        rows = [(row["loss"], row[main_score(row)]) for row in before_now]
        self.losses = [loss for loss, _ in rows if loss is not None]
        self.best = max((_score(*row) for row in rows if _is_finite(row[0])), default=(-math.inf, -math.inf))

    def announce(self) -> None:
        """Logs what is about to run."""
        logger.info("%d rounds, expected cohort %g", self.plan.rounds, self.plan.settings.expected_cohort)

    def run(self, checkpoint: Checkpoint, *, progress: TextIO | None = None) -> Outcome:
        """Goes on from a checkpoint to the planned number of rounds, or until a budget is spent or training is lost.

        A run that is lost stays lost: resumed, it ends again before anything is spent. The run counts as running until
        whoever called this has written its last files: see `discreet.federated.session.finish`. `progress` is the
        terminal to show on how far the run is.
        """
        if self.folder.load_checkpoint(best=True) is None:
            self.folder.save_checkpoint(checkpoint, best=True)
        write_status(self.folder, self.status)
        if self.plan.evaluation:
            self.plan.evaluation.announce()
        self.progress = Progress(progress, self.plan.rounds)
        self._look_at_account(checkpoint)
        with self.progress.shown(checkpoint.round):
            outcome = self._run_rounds(checkpoint)
        return replace(outcome, checkpoint=self.rate(outcome.checkpoint, is_last=True))

    def _look_at_account(self, checkpoint: Checkpoint) -> None:
        """Says what the population has spent before this run, and how far its budget reaches."""
        settings = [self.plan.settings_of(number + 1) for number in range(checkpoint.round, self.plan.rounds)]
        if self.ledger.account is not None:
            charges = [Charge(0, USER, "", each.user.event) for each in settings if each.user is not None]
            plan, planned = self.plan.evaluation, self.plan.rounds
            ratings = (
                [Charge(0, USER, "", plan.event, plan.left(checkpoint.round, rounds=planned))]
                if plan and plan.event
                else []
            )
            logger.info("%s", self.plan.says(self.ledger.account.outlook(charges, ratings)))

    def rate(self, last: Checkpoint, *, is_last: bool) -> Checkpoint:
        """If it is due, a cohort drawn anew rates the model after a round: an event of its own. It is left out, in
        words, if it would pass the budget. Returns `last` with what clients have reported of their accounts."""
        plan = self.plan.evaluation
        if plan is None or not plan.is_due(last.round, last=is_last) or plan.has_rated(self.folder, last.round):
            return last
        try:
            if plan.event is not None:
                self._check_event(plan.event, "rating the model")
            return self._rate(plan, last)
        except (BudgetSpentError, RoundAbandoned) as reason:
            logger.warning("the model after round %d is not rated: %s", last.round, self.plan.says(str(reason)))
            return last

    def _rate(self, plan: EvaluationPlan, last: Checkpoint) -> Checkpoint:
        self.wait_for_members()
        source = self.plan.source.child("evaluation", last.round)
        report = RoundReport(finite=finite_epsilons(self.plan.privacy))
        cohort = self.plan.sampling.draw(self.members, source.child("cohort"))
        replies = self._ask(last, cohort, RATE)
        sums = self._released(plan, replies, report, last=last, source=source.child("noise"))
        report.log_failures()
        rated = with_reported(last, report)
        # Before the row: a crash in between rates the model again, and what clients have spent is not forgotten.
        if plan.event is None:
            self.folder.save_checkpoint(rated)
        plan.write(self.folder, last.round, sums, also=self.plan.also, spent=self._epsilons(rated))
        return rated

    def _ask(
        self, last: Checkpoint, cohort: Sequence[int], work: Work
    ) -> Iterable[TrainReply | Replies | Failure] | Sealed:
        """What the clients of a cohort say of a model, or the sealed sum of it."""
        ask = self.transport.ask_sealed if isinstance(self.transport, SealedTransport) else self.transport.ask
        return ask(round_number=last.round + 1, params=last.params, clip_norm=last.clip_norm, cohort=cohort, work=work)

    def _released(
        self,
        plan: EvaluationPlan,
        replies: Iterable[TrainReply | Replies | Failure] | Sealed,
        report: RoundReport,
        *,
        last: Checkpoint,
        source: RandomSource,
    ) -> Sums:
        charge = partial(self._charge, last.round, USER)
        if not isinstance(replies, Sealed):
            return plan.released(report.accept(replies), source=source, charge=charge)
        report.miss(replies.failures)
        assert plan.event is not None
        return secure_answers(replies, plan.joined, event=plan.event, charge=charge)

    def _run_rounds(self, checkpoint: Checkpoint) -> Outcome:
        while (lost := divergence(self.losses, chance_loss=self.plan.chance_loss)) is None:
            if checkpoint.round >= self.plan.rounds:
                return Outcome(checkpoint, None)
            try:
                self.check_budget(self.plan.settings_of(checkpoint.round + 1))
                checkpoint, report = self._next_round(checkpoint)
            except BudgetSpentError as spent:
                return Outcome(checkpoint, self.plan.says(str(spent)))
            except RoundAbandoned as loss:
                if self._gives_up(checkpoint.round + 1, loss):
                    return Outcome(
                        checkpoint, f"round {checkpoint.round + 1} was abandoned {MOST_ABANDONED} times: {loss}"
                    )
                continue
            self.abandoned = 0
            checkpoint = self.rate(checkpoint, is_last=False)
            if self.plan.settings.user is None and report.refused and self.nobody_left():
                return Outcome(checkpoint, f"every client refuses; the last one: {report.reasons[-1]}")
        best = self.folder.load_checkpoint(best=True)
        assert best is not None
        kept = f"the one after round {best.round}" if best.round else "the untrained one"
        return Outcome(checkpoint, f"{lost}; the model is {kept}", best)

    def _next_round(self, checkpoint: Checkpoint) -> tuple[Checkpoint, RoundReport]:
        self.wait_for_members()
        started, cohort = time.monotonic(), self.draw_cohort(checkpoint)
        replies = self._ask(checkpoint, cohort, TRAIN_AND_RATE if self.plan.joins(checkpoint.round + 1) else TRAIN)
        return self.finish_round(checkpoint, replies, cohort_size=len(cohort), started=started)

    def _epsilon(self, spent: PrivacyLedger) -> float:
        return spent.epsilon(self.plan.privacy.delta, self.plan.privacy.accountant)

    def check_budget(self, settings: RoundSettings) -> None:
        """Looks one round ahead.

        Raises:
          BudgetSpentError: a round with these settings would pass the user-level budget, of this run or, if it charges
            an account, of all runs over the same population; the message says what is left.
        """
        if settings.charged is not None:
            guarantee, event = settings.charged
            self._check_event(event, "the next round", guarantee)

    def _check_event(self, event: DpEvent, what: str, guarantee: str = USER) -> None:
        require_room_for(Charge(0, guarantee, "", event), what, ledger=self.ledger, privacy=self.plan.privacy)

    def wait_for_members(self) -> None:
        """Until there are clients that can be asked. The time that it takes is no round's."""
        self.members = self.transport.members()

    def draw_cohort(self, checkpoint: Checkpoint) -> list[int]:
        """The next round's cohort of the clients that can be asked."""
        return self.plan.sampling.draw(self.members, self._draw(checkpoint).child("cohort"))

    def nobody_left(self) -> bool:
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

    def finish_round(
        self,
        checkpoint: Checkpoint,
        replies: Iterable[TrainReply | Replies | Failure] | Sealed,
        *,
        cohort_size: int,
        started: float | None = None,
    ) -> tuple[Checkpoint, RoundReport]:
        """Does the round after `checkpoint` with these replies; writes ledger, metrics, checkpoint, in that order."""
        started = time.monotonic() if started is None else started
        report = RoundReport(cohort=cohort_size, finite=finite_epsilons(self.plan.privacy))
        state, metrics = self._round(checkpoint, replies, report)
        self.out |= report.refused
        if self.plan.evaluation and metrics.answers:
            self.plan.evaluation.write(self.folder, checkpoint.round, metrics.answers, also=self.plan.also)
        for note in self.clip_watch.notes(state.clip_norm, metrics.fraction_below):
            logger.warning("%s", self.plan.says(note))
        after = _after(checkpoint, state, report)
        evaluation, row = self._report(after, metrics, report, started)
        # The checkpoint comes last: a crash before it does the round again, and the ledger then holds both.
        self.folder.save_checkpoint(after, account=self.ledger.account.mark() if self.ledger.account else None)
        score = _score(evaluation.loss, evaluation.scores.get(main_score(evaluation.scores)))
        if _is_finite(evaluation.loss) and score > self.best:
            self.best = score
            self.folder.save_checkpoint(after, best=True)
        self.plan.also(row)  # after the checkpoint: a hook that fails costs no round
        return after, report

    def _round(
        self, checkpoint: Checkpoint, replies: Iterable[TrainReply | Replies | Failure] | Sealed, report: RoundReport
    ) -> tuple[ServerState, RoundMetrics]:
        number, state = checkpoint.round + 1, _state(checkpoint)
        settings = self.plan.settings_of(number)
        guarantee = settings.charged[0] if settings.charged else USER
        charge = partial(self._charge, number, guarantee)
        if isinstance(replies, Sealed):
            report.miss(replies.failures)
            done = secure_round(state, replies, settings, charge=charge)
            if guarantee == EXAMPLE:  # what every client's own account says too: the event is the same for all of them
                report.epsilons["epsilon_example"] = self._epsilon(self.ledger.spent(EXAMPLE))
            return done
        accepted = report.accept(self.progress.counted(replies, cohort=report.cohort))
        return dp_fedavg_round(state, accepted, settings, source=self._draw(checkpoint).child("noise"), charge=charge)

    def _charge(self, number: int, guarantee: str, event: DpEvent) -> None:
        self.ledger.charge([Charge(number, guarantee, "", event)])

    def _draw(self, checkpoint: Checkpoint) -> RandomSource:
        return self.plan.source.child("round", checkpoint.round + 1)

    def _report(
        self, after: Checkpoint, metrics: RoundMetrics, report: RoundReport, started: float
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
        last_failure = report.reasons[-1] if report.reasons else None
        self.status = after_round(
            self.status,
            number=after.round,
            nodes=len(self.members),
            failures=report.failures,
            last_failure=last_failure,
        )
        write_status(self.folder, self.status)
        fields = {"event": "round", **row, "failures": dict(report.failures)}
        logger.info(round_line(row, rounds=self.plan.rounds), extra={"fields": fields})
        report.log_failures()
        return evaluation, row

    def _epsilons(self, after: Checkpoint) -> dict[str, float]:
        """What is spent by now; infinity for a guarantee that is off."""
        privacy, off = self.plan.privacy, math.inf
        return {
            "epsilon_user": self._epsilon(self.ledger.spent(USER)) if privacy.user.enabled else off,
            "epsilon_example": largest_reported(after, "epsilon_example") if privacy.example.enabled else off,
            "epsilon_local": largest_reported(after, "epsilon_local") if privacy.local.kind != "none" else off,
        }


def after_round(
    status: RunStatus, *, number: int, nodes: int, failures: Mapping[str, int], last_failure: str | None
) -> RunStatus:
    """The status with a round's failures added."""
    kinds = {*status.failures, *failures}
    total = {kind: status.failures.get(kind, 0) + failures.get(kind, 0) for kind in sorted(kinds)}
    if last_failure is None:
        return replace(status, nodes=nodes, failures=total)
    return replace(status, nodes=nodes, failures=total, last_failure=last_failure, last_failure_round=number)


def _after(before: Checkpoint, state: ServerState, report: RoundReport) -> Checkpoint:
    moved = {field.name: getattr(state, field.name) for field in fields(ServerState)}
    return replace(with_reported(before, report), **moved)


def _score(loss: float | None, score: float | None) -> tuple[float, float]:
    """What the best model is chosen by: accuracy or R2, and of equal ones the lesser loss."""
    return score or 0.0, -(loss or 0.0)


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _state(checkpoint: Checkpoint) -> ServerState:
    return ServerState(**{field.name: getattr(checkpoint, field.name) for field in fields(ServerState)})
