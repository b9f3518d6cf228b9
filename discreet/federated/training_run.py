"""A whole training run at the server: budget, cohort, round, ledger, metrics, checkpoint, in that order."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, TextIO

from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.federated.guarantees import USER
from discreet.federated.messages import EPSILONS, TrainReply
from discreet.federated.progress import Progress
from discreet.federated.round import (
    CohortSampling,
    RoundMetrics,
    RoundSettings,
    ServerState,
    dp_fedavg_round,
)
from discreet.federated.run_folder import Checkpoint, RunFolder, RunStatus, read_status, write_status
from discreet.federated.transport import Failure, Replies, RoundReport, Transport
from discreet.privacy.accountants import exceeds
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import RandomSource
from discreet.settings import PrivacyConfig
from discreet.tasks.scores import SCORES, main_score

logger = logging.getLogger("discreet")

PATIENCE = 5  # rounds in a row: one bad round of a noisy run, or of its start, is not yet the end
FACTOR = 2.0  # times the loss of a model that gives 0 throughout


def _tell_nobody(row: Mapping[str, object]) -> None:
    """What a run does with a row beside writing it, if it is not tracked."""


@dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Attributes:
      source: of cohorts and noise; what round t draws depends on the source and t alone, so that a resumed run needs no
        stored random state.
      privacy: which guarantees are on, the delta, the accountant and the budget.
      chance_loss: of a model that gives 0 throughout: every class the same chance, or the middle of every range;
        infinity if it is not known.
      says: how a message calls the settings that it names.
      also: is told the row of metrics.csv of each round.
    """

    rounds: int
    settings: RoundSettings
    sampling: CohortSampling
    source: RandomSource
    privacy: PrivacyConfig
    chance_loss: float
    says: Callable[[str], str] = str
    also: Callable[[Mapping[str, object]], None] = _tell_nobody


class Scores(Protocol):
    """How good a model is on the server's public test set; None is what is not known."""

    @property
    def loss(self) -> float | None:
        """The lower the better."""

    @property
    def scores(self) -> Mapping[str, float | None]:
        """By their names in `discreet.tasks.scores.SCORES`; the higher the `main_score`, the better."""


class BudgetSpentError(RuntimeError):
    """The next round would pass a budget. The message says which, and what is left."""


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
      transport: asks the clients.
      evaluate: loss and scores of the model after a round, on the server's public test set.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        *,
        ledger: DurableLedger,
        transport: Transport,
        evaluate: Callable[[Checkpoint], Scores],
    ) -> None:
        self.plan, self.folder, self.ledger = plan, folder, ledger
        self.transport, self.evaluate = transport, evaluate
        self.progress = Progress(None, plan.rounds)
        before = read_status(folder) or RunStatus("running", plan.rounds)
        self.status = replace(before, state="running", rounds=plan.rounds, reason=None)
        self.members: Sequence[int] = ()
        self.out: set[int] = set()
        self.at_ceiling = False
        rows = [(row["loss"], row[main_score(row)]) for row in folder.read_metrics()]
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
        self.progress = Progress(progress, self.plan.rounds)
        with self.progress.shown(checkpoint.round):
            return self._run_rounds(checkpoint)

    def _run_rounds(self, checkpoint: Checkpoint) -> Outcome:
        while (lost := divergence(self.losses, chance_loss=self.plan.chance_loss)) is None:
            if checkpoint.round >= self.plan.rounds:
                return Outcome(checkpoint, None)
            try:
                self.check_budget()
            except BudgetSpentError as spent:
                return Outcome(checkpoint, str(spent))
            self.wait_for_members()
            started, cohort = time.monotonic(), self.draw_cohort(checkpoint)
            replies = self.transport.ask(
                round_number=checkpoint.round + 1,
                params=checkpoint.params,
                clip_norm=checkpoint.clip_norm,
                cohort=cohort,
            )
            checkpoint, report = self.finish_round(checkpoint, replies, cohort_size=len(cohort), started=started)
            if self.plan.settings.user is None and report.refused and self.nobody_left():
                return Outcome(checkpoint, f"every client refuses; the last one: {report.reasons[-1]}")
        best = self.folder.load_checkpoint(best=True)
        assert best is not None
        kept = f"the one after round {best.round}" if best.round else "the untrained one"
        return Outcome(checkpoint, f"{lost}; the model is {kept}", best)

    def _epsilon(self, spent: PrivacyLedger) -> float:
        return spent.epsilon(self.plan.privacy.delta, self.plan.privacy.accountant)

    def check_budget(self) -> None:
        """Looks one round ahead.

        Raises:
          BudgetSpentError: the next round would pass the user-level budget; the message says what is left.
        """
        user, budget = self.plan.settings.user, self.plan.privacy.user.max_epsilon
        if user is None or budget is None:
            return
        spent = self.ledger.spent(USER)
        after = self._epsilon(spent.record(user.event))
        if exceeds(after, budget):
            left = max(0.0, budget - self._epsilon(spent))
            beyond = self.plan.says(f"privacy.user.max_epsilon={budget:g}")
            raise BudgetSpentError(
                f"the next round would reach a user-level epsilon of {after:.4g}, beyond {beyond}; {left:.4g} is left"
            )

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

    def finish_round(
        self,
        checkpoint: Checkpoint,
        replies: Iterable[TrainReply | Replies | Failure],
        *,
        cohort_size: int,
        started: float | None = None,
    ) -> tuple[Checkpoint, RoundReport]:
        """Does the round after `checkpoint` with these replies; writes ledger, metrics, checkpoint, in that order."""
        started = time.monotonic() if started is None else started
        report = RoundReport(cohort=cohort_size, finite=_finite_epsilons(self.plan.privacy))
        state, metrics = dp_fedavg_round(
            _state(checkpoint),
            report.accept(self.progress.counted(replies, cohort=cohort_size)),
            self.plan.settings,
            source=self._draw(checkpoint).child("noise"),
            charge=lambda event: self.ledger.charge([Charge(checkpoint.round + 1, USER, "", event)]),
        )
        self.out |= report.refused
        self._look_at_ceiling(state.clip_norm)
        after = _after(checkpoint, state, report)
        evaluation = self._report(after, metrics, report, started)
        # The checkpoint comes last: a crash before it does the round again, and the ledger then holds both.
        self.folder.save_checkpoint(after)
        score = _score(evaluation.loss, evaluation.scores.get(main_score(evaluation.scores)))
        if _is_finite(evaluation.loss) and score > self.best:
            self.best = score
            self.folder.save_checkpoint(after, best=True)
        return after, report

    def _look_at_ceiling(self, clip_norm: float) -> None:
        """Says once that the clip norm is as large as it may become."""
        user = self.plan.settings.user
        if self.at_ceiling or user is None or user.count_stddev is None or clip_norm < user.clip_max:
            return
        self.at_ceiling = True
        reached = (
            f"the clip norm has reached privacy.user.clip.max={user.clip_max:g} and grows no further: either noise "
            "drives the model, or privacy.user.clip.norm, the first one, was far too small"
        )
        logger.warning("%s", self.plan.says(reached))

    def _draw(self, checkpoint: Checkpoint) -> RandomSource:
        return self.plan.source.child("round", checkpoint.round + 1)

    def _report(self, after: Checkpoint, metrics: RoundMetrics, report: RoundReport, started: float) -> Scores:
        """Evaluates, and writes metrics, status and log."""
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
        self.plan.also(row)
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
        return evaluation

    def _epsilons(self, after: Checkpoint) -> dict[str, float]:
        """What is spent by now; infinity for a guarantee that is off."""
        privacy, off = self.plan.privacy, math.inf
        return {
            "epsilon_user": self._epsilon(self.ledger.spent(USER)) if privacy.user.enabled else off,
            "epsilon_example": largest_reported(after, "epsilon_example") if privacy.example.enabled else off,
            "epsilon_local": largest_reported(after, "epsilon_local") if privacy.local.kind != "none" else off,
        }


def _finite_epsilons(privacy: PrivacyConfig) -> tuple[str, ...]:
    """Which of the epsilons that clients report this run keeps finite."""
    finite = {
        "epsilon_example": privacy.example.enabled and privacy.example.noise_multiplier != 0,
        "epsilon_local": privacy.local.kind != "none",
        "epsilon_local_pure": privacy.local.kind in ("laplace", "laplace_step"),
    }
    return tuple(name for name, is_finite in finite.items() if is_finite)


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
    # Cumulative by the clients' own accounts; a client that sits out a round still has what it spent before.
    spent = {name: max(getattr(before, name), report.epsilons[name]) for name in EPSILONS}
    unaccounted = sorted({*before.unaccounted, *report.unaccounted})
    moved = {field.name: getattr(state, field.name) for field in fields(ServerState)}
    return replace(before, **moved, **spent, unaccounted=unaccounted)


def _score(loss: float | None, score: float | None) -> tuple[float, float]:
    """What the best model is chosen by: accuracy or R2, and of equal ones the lesser loss."""
    return score or 0.0, -(loss or 0.0)


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _state(checkpoint: Checkpoint) -> ServerState:
    return ServerState(**{field.name: getattr(checkpoint, field.name) for field in fields(ServerState)})


def largest_reported(checkpoint: Checkpoint, name: str) -> float:
    """The largest epsilon over the clients that reported a finite one; infinity if only others have reported."""
    value: float = getattr(checkpoint, name)
    return math.inf if value == 0 and checkpoint.unaccounted else value


def round_line(row: dict[str, object], *, rounds: int) -> str:
    """A round in one line: what a person watches."""

    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None else format(value, form)

    spent = " ".join(f"{name} {_epsilon(row.get(f'epsilon_{name}'))}" for name in ("user", "example", "local"))
    good = "  ".join(f"{name} {number(name, '.4f')}" for name in SCORES if name in row)
    return (
        f"round {row['round']}/{rounds}  {good}  loss {number('loss', '.4f')}  "
        f"clip {number('clip_norm', '.4g')}  below {number('fraction_below', '.2f')}  "
        f"cohort {row['cohort']} replies {row['replies']}  epsilon {spent}  {number('seconds', '.2f')} s"
    )


def _epsilon(value: object) -> str:
    return "none" if not isinstance(value, float) or math.isinf(value) else f"{value:.3f}"


def divergence(losses: Sequence[float], *, chance_loss: float) -> str | None:
    """Why training is lost after rounds with these losses, in words; None while it is not.

    It is lost if the last loss is not finite, or if the last `PATIENCE` are all above `FACTOR` times `chance_loss` and
    the last of them is above the first: a model that starts badly and gets better is not lost. `chance_loss` is the
    loss of a model that gives 0 throughout: every class the same chance, or the middle of every range.

    A function of public numbers alone, so that a run that is resumed comes to the same end.

    >>> divergence([2.2, 1.9, 5.1, 9.7, 31.0, 44.0, 38.0], chance_loss=2.3)
    'the loss on the public test set diverged: 38 after round 7, 1.9 after round 2'
    >>> divergence([2.2, math.nan], chance_loss=2.3)
    'the loss on the public test set is nan after round 2'
    >>> divergence([50.0, 40.0, 30.0, 20.0, 10.0], chance_loss=2.3) is None
    True
    """
    last, best = losses[-PATIENCE:], min(losses, default=0.0)
    if last and not math.isfinite(last[-1]):
        return f"the loss on the public test set is {last[-1]} after round {len(losses)}"
    if len(last) < PATIENCE or min(last) <= FACTOR * chance_loss or last[-1] <= last[0]:
        return None
    return (
        f"the loss on the public test set diverged: {last[-1]:.4g} after round {len(losses)}, "
        f"{best:.4g} after round {losses.index(best) + 1}"
    )
