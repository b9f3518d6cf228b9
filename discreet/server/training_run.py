"""A whole training run at the server: budget, cohort, round, ledger, metrics, checkpoint, in that
order."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TextIO

from discreet.accounting.privacy_ledger import epsilon_of
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.durable_ledger import Charge
from discreet.mechanisms.mechanism import REPORTED, SERVER, finite_epsilons
from discreet.mechanisms.round_state import Released
from discreet.planning.constant_guess import FILE as CONSTANT
from discreet.planning.constant_guess import last_warning
from discreet.planning.round_cost import RoundCost, duration, peak_memory
from discreet.planning.state import Outcome, State
from discreet.protocol.messages import RATE
from discreet.queries.evaluation_result import EvaluationResult
from discreet.run_files.metrics_table import main_score, round_line
from discreet.run_files.run_folder import RunStatus, read_status, write_status
from discreet.run_files.whole_files import write_json
from discreet.server.model_ratings import RatingPlan, rating_plan
from discreet.server.progress import Progress
from discreet.server.round import EndsLater, RunLedger, one_query, one_round, request_after, stepped
from discreet.server.run_context import RunContext
from discreet.server.transport import (
    AskedClients,
    NobodyAnswers,
    ReplyStats,
    RoundAbandoned,
    Silence,
    Transport,
    check_exchange,
)
from discreet.settings.adjacency import GUARANTEES, USER
from discreet.settings.clip_choice import ClipConfig
from discreet.settings.wording import Key, Wording, in_words

if TYPE_CHECKING:
    from torch import Tensor

    from discreet.privacy.randomness import RandomSource

Rows = list[Mapping[str, Any]]
OnRound = Callable[[Mapping[str, object]], None]

MOST_ABANDONED = 3  # attempts in a row of one round under secure aggregation, before the run ends
PATIENCE = 5  # rounds in a row: one bad round of a noisy run, or of its start, is not yet the end
FACTOR = 2.0  # times the loss of a model that gives 0 throughout
# rounds in a row with a smaller share of norms within the clip norm
CUT_ROUNDS = 3
CUT_SHARE = 0.2
TIMED = 3  # rounds after which the time that is left is said
FIRST_NORM = Key("privacy.user.clip.norm")
UNRANKED = (-math.inf, -math.inf)
OFF = {f"epsilon_{name}": math.inf for name in GUARANTEES}  # of disabled guarantees

logger = logging.getLogger("discreet")


class TrainingRun:
    """Runs the rounds of a plan in a run folder. `transport` asks the clients. `evaluate` takes a
    round's number and the parameters after it, and returns the loss and scores on the server's
    public test set. `on_round` is called with each round's row of metrics.csv."""

    def __init__(
        self,
        context: RunContext,
        *,
        transport: Transport,
        evaluate: Callable[[int, Tensor], EvaluationResult],
        on_round: OnRound | None = None,
    ) -> None:
        self.context = context
        self.plan = context.plan
        self.folder = context.folder
        self.ledger = context.ledger
        self.ends = EndsLater()
        self.charges = RunLedger.of(self.ledger, self.plan, context.state)
        if not self.plan.run.masked:  # clients, who may be slow, open a masked sum after its charge
            self.charges.at_charge = self.ends.begin
        self.evaluation = rating_plan(self.plan)
        check_exchange(transport, masked=self.plan.run.masked)
        self.evaluate = evaluate
        self.on_round = on_round
        finite = (finite_epsilons(each, self.plan.run) for each in self.plan.mechanisms.values())
        self.clients = AskedClients(transport, tuple(name for names in finite for name in names))
        self.warned: set[str] = set()
        server_pays = USER in self.plan.mechanisms
        self.silent_rounds = Silence("rounds", server_pays)
        self.silent_ratings = Silence("ratings", server_pays)
        self.released = _released_before(context.state)
        self.abandoned = 0  # attempts in a row of the next round
        self.rows: list[Mapping[str, Any]] = [*self.folder.read_metrics()]
        self.keeps_best = self.plan.keeps_best
        self.best = max(map(self._rank, self.rows), default=UNRANKED)
        rounds = self.plan.run.rounds
        before = read_status(self.folder) or RunStatus("running", rounds)
        self.status = replace(before, state="running", rounds=rounds, reason=None)

    def run(self, *, progress: TextIO | None = None) -> Outcome:
        """Runs from the context's state to the planned number of rounds, or until a budget is spent
        or training fails. A failed run that is resumed ends again before it spends anything. The
        run's state is running until the caller has written its last files
        (`discreet.server.session.finish`). `progress`: the terminal for the progress line."""
        state = self.context.state
        self._begin(state, progress)
        shown = self.clients.progress
        with nullcontext() if shown is None else shown.shown(state.round):
            if self.evaluation and self._ended(state) is None:
                state = self._rate_if_due(state, is_last=False)  # a kill may have swallowed it
            while (outcome := self._ended(state)) is None:
                try:
                    state, rows = self._next(state)
                except BudgetSpent as spent:
                    outcome = Outcome(state, in_words(spent, self.context.names))
                    break
                except RoundAbandoned as loss:
                    self._note_abandoned(state.round + 1, loss)
                    continue
                self._tell(state, rows)
                if self.evaluation and self._ended(state) is None:
                    state = self._rate_if_due(state, is_last=False)
        outcome = self._chosen(outcome)
        rated = [row for row in self.rows if row["round"] <= outcome.model.round]
        by_clients = self.plan.run.evaluation.private  # about other data than the guess, and noised
        if not by_clients and (note := last_warning(self.plan.constant, rated)):
            logger.warning("%s", note)
        return replace(outcome, checkpoint=self._rate_if_due(outcome.checkpoint, is_last=True))

    def _chosen(self, outcome: Outcome) -> Outcome:
        """The outcome with the best round's model, if the run keeps that. The test set is public,
        so the choice costs nothing."""
        best = self.folder.load_checkpoint(best=True)
        if not self.keeps_best or outcome.best is not None or best is None or not best.round:
            return outcome
        said = "the model is the one after round %d, with the least loss on the public test set"
        logger.info(said, best.round)
        return replace(outcome, best=best)

    def _rank(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """The key that ranks models: accuracy or R2, then the lower loss; or the loss alone."""
        loss = row["loss"]
        if loss is None or not math.isfinite(loss):
            return UNRANKED
        if self.keeps_best:
            return (-loss, 0.0)
        return (row.get(main_score(row)) or 0.0, -loss)

    def _begin(self, state: State, progress: TextIO | None) -> None:
        """Writes the first files of the run, and logs what it is about to do."""
        rounds = self.plan.run.rounds
        if self.folder.load_checkpoint(best=True) is None:
            self.folder.save_checkpoint(state, best=True)
        write_status(self.folder, self.status)
        if self.plan.constant is not None:
            write_json(self.folder.path / CONSTANT, asdict(self.plan.constant))
            logger.info("%s", self.plan.constant)
        logger.info("%d rounds, expected cohort %g", rounds, self.plan.denominator)
        if self.evaluation:
            self.evaluation.announce()
        self._look_at_account(state)
        if progress is not None and progress.isatty():
            self.clients.progress = Progress(progress, rounds)

    def _look_at_account(self, state: State) -> None:
        """Logs what the population has spent before this run, and how many rounds its budget
        allows."""
        if self.ledger.account is None:
            return
        plan = self.evaluation
        rounds = self.plan.run.rounds
        ratings = list[Charge]()
        events = self.charges.events.values()
        charges = [Charge(0, USER, "", event) for event in events if event is not None]
        if plan and plan.event:
            ratings.append(Charge(0, USER, "", plan.event, plan.left(state.round, rounds=rounds)))
        outlook = self.ledger.account.outlook(charges, ratings)
        logger.info("%s", outlook.named(self.context.names))

    def _ended(self, state: State) -> Outcome | None:
        """The end of the run after `state`; None if it has a next round.

        Raises:
          NobodyAnswers: every client refuses, and none has ever trained.
        """
        # The usual end once clients' own budgets are spent.
        if USER not in self.plan.mechanisms and self.clients.all_refuse:
            reason = f"every client refuses; the last reason: {self.clients.stats.reasons[-1]}"
            if not any(row["replies"] for row in self.rows):
                raise NobodyAnswers(reason)
            return Outcome(state, reason)
        losses = public_numbers(self.rows, "loss")
        failure = stopping_reason(losses, chance_loss=self.plan.chance_loss)
        if failure is None:
            if state.round < self.plan.run.rounds:
                return None
            return Outcome(state, None)
        best = self.folder.load_checkpoint(best=True)
        assert best is not None
        if best.round:
            kept = f"the one after round {best.round}"
        else:
            kept = "the untrained one"
        return Outcome(state, f"{failure}; the model is {kept}", best)

    def _note_abandoned(self, number: int, loss: RoundAbandoned) -> None:
        """Logs an attempt of a round that released nothing. NobodyAnswers: it is the last one."""
        self.abandoned += 1
        logger.warning("round %d is abandoned without opening its sum: %s", number, loss)
        lacking = ReplyStats()
        lacking.miss(loss.failures)
        lacking.log_failures()
        if self.abandoned == MOST_ABANDONED:
            raise NobodyAnswers(
                f"round {number} was abandoned {MOST_ABANDONED} times: {loss}"
            ) from loss

    def _next(self, state: State) -> tuple[State, Rows]:
        """The state after the next round, and the rows about it. Signals that ask this process to
        end wait from the charge until the round is kept: it is not paid for again.

        Raises:
          BudgetSpent: the budget has no room for the round. RoundAbandoned: as `one_round`.
        """
        number = state.round + 1
        source = self.context.source.child("round", number)
        event = self.charges.events[number]
        self.charges.require_room(self.charges.guarantee, event, "the next round")
        with self.ends:
            if self.released is None:
                after, released = one_round(state, self.plan, self.clients, self.charges, source)
            else:
                after, released = self._round_after_crash(state, self.released, source)
            self.ends.begin()
            return self._keep(state, after, released)

    def _keep(self, before: State, after: State, released: Released) -> tuple[State, Rows]:
        """Writes metrics and checkpoint after a round, in that order. Returns the state with the
        epsilons that clients have reported, and the rows about the round."""
        stats = self.clients.stats
        self.clients.refused |= stats.refused
        run = self.plan.run
        for name, each in self.plan.mechanisms.items():
            # Each client accounts it too: the event is the same for all of them.
            if SERVER in each.charged_at and REPORTED[name]:
                spent = epsilon_of(self.ledger.spent(name), run.delta, run.accountant)
                stats.epsilons |= dict.fromkeys(REPORTED[name], spent)
        rows: Rows = []
        if self.evaluation and released.answers:
            count = released.replies, self.clients.cohort
            rows.append(
                self.evaluation.write(self.folder, before.round, released.answers, answered=count)
            )
        after = stats.added_to(after)
        row = self._write(before, after, released)
        # The checkpoint is written last. After a crash before it, the round is repeated, and the
        # ledger then has both charges.
        account = self.ledger.account
        paid = account.ledger.position() if account else None
        self.folder.save_checkpoint(after, charged=self.charges.position, account=paid)
        if (rank := self._rank(row)) > self.best:
            self.best = rank
            self.folder.save_checkpoint(after, best=True, charged=self.charges.position)
        return after, [*rows, row]

    def _tell(self, after: State, rows: Rows) -> None:
        """Logs a round that is kept, and calls the hook with its rows: what fails here, such as
        output that nobody reads, costs no round.

        Raises:
          NobodyAnswers: no client has answered for several rounds.
        """
        self._log(after, rows[-1])
        if self.on_round is not None:
            for row in rows:
                self.on_round(row)
        self.abandoned = 0
        self.silent_rounds.note(self.clients.stats, asked=self.clients.cohort)

    def _round_after_crash(
        self, before: State, released: Released, source: RandomSource
    ) -> tuple[State, Released]:
        """The round after `before`, whose release left before a crash."""
        self.released = None
        self.clients.draw(self.plan.sampling, before.round + 1, source)
        self.clients.stats.accepted = released.replies
        return stepped(before, self.plan, released), released

    def _rate_if_due(self, last: State, *, is_last: bool) -> State:
        """Asks a new cohort to rate the model after a round, if a rating is due and fits the
        budget, as a separate event. Returns `last` with the epsilons that clients have reported."""
        plan = self.evaluation
        if (
            plan is None
            or not plan.is_due(last.round, last=is_last)
            or plan.has_rated(self.folder, last.round)
        ):
            return last
        try:
            self.charges.require_room(USER, plan.event, "rating the model")
            with self.ends:
                rated, row = self._rate(plan, last)
        except (BudgetSpent, RoundAbandoned) as reason:
            logger.warning(
                "the model after round %d is not rated: %s",
                last.round,
                in_words(reason, self.context.names),
            )
            return last
        stats = self.clients.stats
        stats.log_failures()
        if self.on_round is not None:
            self.on_round(row)
        if last.round < self.plan.run.rounds:
            self.silent_ratings.note(stats, asked=self.clients.cohort)
        return rated

    def _rate(self, plan: RatingPlan, last: State) -> tuple[State, Mapping[str, Any]]:
        """Asks a new cohort to rate a model, and writes what they say. Returns the state and the
        row about it.

        Raises:
          RoundAbandoned: as `one_query`.
        """
        source = self.context.source.child("evaluation", last.round)
        cohort = self.clients.draw(self.plan.sampling, last.round + 1, source)
        asked = replace(request_after(last, self.plan), work=RATE)
        replies = self.clients.ask(asked, last.params, cohort)
        sums = one_query(last, plan.mechanism, replies, self.charges, source.child("noise"))
        self.ends.begin()
        stats = self.clients.stats
        rated = stats.added_to(last)
        # Before the row: after a crash in between, the model is rated again, and the clients'
        # spending is not forgotten.
        if plan.event is None:
            self.folder.save_checkpoint(rated, charged=self.charges.position)
        count = (stats.accepted, len(cohort))
        spent = self._epsilons(rated)
        return rated, plan.write(self.folder, last.round, sums, answered=count, spent=spent)

    def _write(self, before: State, after: State, released: Released) -> dict[str, object]:
        """Evaluates the model after a round; writes metrics and status. Returns the row."""
        stats = self.clients.stats
        evaluation = self.evaluate(after.round, after.params)
        seconds = time.monotonic() - self.clients.started
        row: dict[str, object] = {
            "round": after.round,
            "loss": evaluation.loss,
            **evaluation.scores,
            "clip_norm": before.clip_norm,
            "fraction_below": released.fraction_below,
            "cohort": self.clients.cohort,
            "replies": released.replies,
            **self._epsilons(after),
            "seconds": seconds,
        }
        self.folder.append_metrics(row)
        self.rows.append(row)
        failures = dict(sorted((Counter(self.status.failures) + stats.failures).items()))
        self.status = replace(self.status, nodes=len(self.clients.available), failures=failures)
        if stats.reasons:
            self.status = replace(
                self.status, last_failure=stats.reasons[-1], last_failure_round=after.round
            )
        write_status(self.folder, self.status)
        return row

    def _log(self, after: State, row: Mapping[str, Any]) -> None:
        """Logs a round."""
        stats = self.clients.stats
        fields = {"event": "round", **row, "failures": dict(stats.failures)}
        if after.round == self.context.state.round + 1:
            logger.info("%s", RoundCost(row["seconds"], peak_memory()).memory_line)
        logger.info(round_line(row, rounds=self.plan.run.rounds), extra={"fields": fields})
        if len(self.rows) == TIMED:
            self._say_time_left(after.round)
        if stats.reasons:
            stats.log_failures()
        notes = clip_notes(self.plan.clip, self.rows, after.clip_norm)
        for name, note in notes.items():
            if name not in self.warned:
                logger.warning("%s", note.named(self.context.names))
        self.warned |= notes.keys()

    def _say_time_left(self, done: int) -> None:
        """Logs an estimate of the time left from the last round: the first rounds of a process also
        load and compile."""
        left = self.plan.run.rounds - done
        if left > 1:
            seconds = self.rows[-1]["seconds"]
            whole = duration(left * seconds)
            logger.info("%d rounds are left: about %s, %s a round", left, whole, duration(seconds))

    def _epsilons(self, after: State) -> dict[str, float]:
        """The current epsilon of each guarantee; infinity for a disabled one."""
        run = self.plan.run
        spent = dict(OFF)
        for name in self.plan.mechanisms:
            key = f"epsilon_{name}"
            if REPORTED[name]:
                spent[key] = after.largest_reported(key)
            else:
                spent[key] = epsilon_of(self.ledger.spent(name), run.delta, run.accountant)
        return spent


def _released_before(state: State) -> Released | None:
    """The release of the round after `state`, if it is on disk already and may have left before a
    crash. The round then has no other release."""
    kept = state.carried.load()
    if not kept or int(kept["round"]) != state.round + 1:
        return None
    return Released(kept["total"], state.clip_norm, None, int(kept["replies"]))


def stopping_reason(losses: Sequence[float], *, chance_loss: float) -> str | None:
    """The reason, in words, to end training after rounds with these losses; None to continue.

    Training has failed if the last loss is not finite, or if the last `PATIENCE` losses are all
    above `FACTOR` times `chance_loss` (that of a model whose outputs are all 0) and the last of
    them is above the first. A model that starts badly and improves has not failed. The rule uses
    public numbers only, so a resumed run ends in the same way.

    >>> stopping_reason([2.2, 1.9, 5.1, 9.7, 31.0, 44.0, 38.0], chance_loss=2.3)
    'the loss on the public test set diverged: 38 after round 7, 1.9 after round 2'
    >>> stopping_reason([2.2, math.nan], chance_loss=2.3)
    'the loss on the public test set is nan after round 2'
    >>> stopping_reason([50.0, 40.0, 30.0, 20.0, 10.0], chance_loss=2.3) is None
    True
    """
    last = losses[-PATIENCE:]
    best = min(losses, default=0.0)
    if last and not math.isfinite(last[-1]):
        return f"the loss on the public test set is {last[-1]} after round {len(losses)}"
    if len(last) < PATIENCE or min(last) <= FACTOR * chance_loss or last[-1] <= last[0]:
        return None
    return (
        f"the loss on the public test set diverged: {last[-1]:.4g} after round {len(losses)}, "
        f"{best:.4g} after round {losses.index(best) + 1}"
    )


def public_numbers(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """The numbers in a column of rows of metrics.csv, without the rounds that have none."""
    return [row[column] for row in rows if row[column] is not None]


def improves(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """True if the model improved over the last rated rounds, by public numbers only: its loss is 1
    % lower, or its score is 0.01 higher. None if fewer than two of these rounds were rated."""
    last = rows[-CUT_ROUNDS:]
    losses = public_numbers(last, "loss")
    scores = [row[main_score(row)] for row in last if row.get(main_score(row)) is not None]
    if max(len(losses), len(scores)) < 2:
        return None
    is_better = len(losses) > 1 and losses[-1] < 0.99 * losses[0]
    return is_better or (len(scores) > 1 and scores[-1] > scores[0] + 0.01)


def clip_notes(
    clip: ClipConfig, rows: Sequence[Mapping[str, Any]], clip_norm: float
) -> dict[str, Wording]:
    """Warnings of an adaptive clip norm that slows learning, by topic. They use the noised share of
    norms within the clip norm in each round so far, and the clip norm of the next round. A model
    that improves gets no warning about clipping."""
    last = public_numbers(rows, "fraction_below")[-CUT_ROUNDS:]
    notes: dict[str, Wording] = {}
    if not last:
        return notes
    least = min(CUT_SHARE, clip.target_quantile / 2)
    if len(last) == CUT_ROUNDS and max(last) < least:
        learns = improves(rows)
        if learns is None:
            seen = ""
        else:
            seen = ", and the model does not improve"
        if not learns:
            notes["cut"] = Wording(
                f"more than {100 * (1 - least):g} % of the updates were clipped in each of "
                f"the last {CUT_ROUNDS} rounds{seen}. The clip norm is now "
                f"{clip_norm:.3g}: consider a larger ",
                FIRST_NORM,
            )
    if clip_norm >= clip.ceiling:
        notes["ceiling"] = Wording(
            "the clip norm has reached its maximum, ",
            Key(f"privacy.user.clip.max={clip.ceiling:g}"),
            ": either noise dominates the updates, or the first clip norm, ",
            FIRST_NORM,
            ", was far too small",
        )
    return notes
