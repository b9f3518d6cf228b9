"""What clients are asked beside training, the same for simulated clients and for nodes, noised and charged.

Models are rated on data that each client holds out of its own: when, at which price, and what is written of it, the
numbers in metrics.csv, and roc.csv, with a row a point, from the histograms that AUC is read from. Statistics of their
data are asked before the first round: everybody is asked once, and what comes back is noised at the server.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from discreet.data.description import read_description
from discreet.data.examples import SHAPES, Task
from discreet.data.folder import FOLDER, SCALE
from discreet.ledger.budget import BudgetSpent, require_room_for
from discreet.ledger.durable_ledger import Charge
from discreet.mechanisms.mechanism import expected_cohort
from discreet.mechanisms.mechanism_table import own_noise
from discreet.mechanisms.sums import AnswerRelease, AnswerSum, Replies, answer_round
from discreet.protocol.messages import TrainRequest, Work
from discreet.queries.answers import Estimate, NoisedBlock, rising
from discreet.queries.metrics import LARGEST_LOGIT, SCORE_BINS, both_kinds
from discreet.queries.query import NORMALISE, STATISTICS, Query, Sums, query_of, shape_of_data
from discreet.queries.scores import BY_NOISE, ERROR, Rated
from discreet.queries.statistic_answers import normaliser_from
from discreet.server.plan import Plan
from discreet.server.run_context import RunContext
from discreet.server.run_folder import RunFolder, csv_text, replace_file, write_json
from discreet.server.transport import NobodyAnswers, ReplyStats, Transport
from discreet.settings.data import EvaluationConfig, NormaliserConfig, StatisticsConfig
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings

if TYPE_CHECKING:
    from dp_accounting import DpEvent

BEFORE = 0  # the round that a ledger names for what is asked before the first one
LARGEST_ERROR = 0.02  # of an accuracy: with more, differences between models drown

logger = logging.getLogger("discreet")


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan by which clients rate the models of a run.

    Attributes:
      config: when.
      query: what they are asked.
      answers: how their answers are released.
      event: what it costs if a cohort is asked for nothing else, as after the last round; None if each client noises
        its own answer, and accounts it itself.
    """

    config: EvaluationConfig
    query: Query
    answers: AnswerRelease
    event: DpEvent | None

    def is_due(self, number: int, *, last: bool) -> bool:
        """True if a cohort of its own rates the model after a round."""
        return last or (self.config.cohort == "own" and number > 0 and number % self.config.every == 0)

    def left(self, done: int, *, rounds: int) -> int:
        """The number of ratings by cohorts of their own that are left after `done` of all rounds."""
        _, planned = self.config.ratings(rounds)
        return planned - (done // self.config.every if self.config.cohort == "own" else 0)

    def announce(self) -> None:
        """Logs how far off the estimates are expected to be, if that can be told before they are read; warns if the
        population is too small for them."""
        how, zeros = self.answers, [0.0] * self.query.length
        asked, everybody = (
            self.query.read(Sums(zeros, how.expected_cohort, how.stddev, probability))
            for probability in (1.0, how.probability)
        )
        known = {name: x.standard_error for name, x in asked.items() if math.isfinite(x.standard_error)}
        if how.own is not None and how.own.of_examples:
            each = "; ".join(f"{name} {error:.4g} / m" for name, error in known.items())
            logger.info("clients rate the model; standard errors by noise if each holds out m examples: %s", each)
            return
        in_all = {name: everybody[name].standard_error for name in known}
        said = "; ".join(f"{name} {error:.4g} by noise, {in_all[name]:.4g} in all" for name, error in known.items())
        poor = known.get("accuracy", 0.0) > LARGEST_ERROR
        if poor:
            said += f". The population is too small for a useful number: {LARGEST_ERROR:g} by noise would be one"
        level = logging.WARNING if poor else logging.INFO
        logger.log(level, "clients rate the model; standard errors: %s", said)

    def has_rated(self, folder: RunFolder, number: int) -> bool:
        """True if the row of a round holds a rating of the model after it. The untrained model has none."""
        rows = [row for row in folder.read_metrics() if row["round"] == number]
        return not rows or any(rows[-1].get(f"{name}{ERROR}") is not None for name in self.query.names())

    def write(
        self,
        folder: RunFolder,
        number: int,
        sums: Sums,
        *,
        answered: tuple[int, int],
        spent: Mapping[str, float] | None = None,
    ) -> dict[str, object]:
        """Adds to the row of round `number` how good the model after it is, says it, and returns it. `answered`: how
        many of how many clients did. `spent`: the epsilons, if the row is to include what this has cost."""
        noise_alone, found = self.query.read(replace(sums, probability=1.0)), self.query.read(sums)
        rated = [Rated(of, x.value, x.standard_error, noise_alone[of].standard_error) for of, x in found.items()]
        added = dict[str, float | None]()
        for each in rated:
            added |= {each.name: each.value, each.name + ERROR: each.error, each.name + BY_NOISE: each.by_noise}
        added |= spent or {}
        auc = [part for part in self.query.noised(sums) if part.block.name == "auc"]
        write_roc(folder.path / "roc.csv", number, [point for part in auc for point in roc_points(part)])
        folder.replace_metrics([row | added if row["round"] == number else row for row in folder.read_metrics()])
        fields, said = {"event": "evaluation", "round": number, **added}, ", ".join(map(str, rated))
        level = logging.INFO
        if not answered[0]:
            level = logging.WARNING
            said += ". Nobody gave a usable answer: these numbers are noise alone"
        facts = number, *answered, said
        logger.log(level, "the model after round %d, by %d of %d clients: %s", *facts, extra={"fields": fields})
        return {"round": number, **added}


def statistics_noise(plan: Plan, length: int) -> AnswerRelease:
    """The release of the sum of all clients' answers of `length` numbers about their data."""
    population, noise = plan.run.user.population_size, plan.run.statistics.noise_multiplier
    return AnswerRelease(length, float(population), noise, plan.run.noise, population)


def answers_of(plan: Plan, query: Query) -> AnswerRelease:
    """The release of answers to a query: noised at the server, or by each client."""
    run, user = plan.run, plan.run.user
    return AnswerRelease(
        query.length,
        expected_cohort(run),
        run.evaluation.noise_multiplier,
        run.noise,
        user.population_size,
        user.probability,
        own_noise(run, query.l1_norm),
    )


def evaluation_plan(plan: Plan) -> EvaluationPlan | None:
    """The plan by which clients rate models; None if they do not."""
    if plan.query is None:
        return None
    event = None
    if plan.mechanism is not None:
        event = plan.mechanism.event(plan.mechanism.noise_multiplier, trains=False, rates=True)
    return EvaluationPlan(plan.run.evaluation, plan.query, answers_of(plan, plan.query), event)


class RocPoint(NamedTuple):
    """The effect of a threshold: examples of a class or label with a score of at least `score`, in logits, are called
    positive. Rates are in [0, 1], with standard errors as those of all clients; at the lowest score they are 1."""

    of: str
    score: float
    false_positive_rate: float
    true_positive_rate: float
    false_positive_rate_error: float = 0.0
    true_positive_rate_error: float = 0.0


def roc_points(part: NoisedBlock) -> list[RocPoint]:
    """The points of the ROC curves of a block of AUC, from the highest threshold down, of each score in turn; none of a
    score of whose negatives or positives noise leaves nothing. Rates never fall as the threshold does."""
    edges, found = torch.linspace(LARGEST_LOGIT, -LARGEST_LOGIT, SCORE_BINS + 1, dtype=torch.float64).tolist(), []
    for place, known in enumerate(both_kinds(part).tolist()):
        if known:
            curves = zip(edges, *(_rates(part, 2 * place + kind) for kind in range(2)), strict=True)
            found += [
                RocPoint(part.block.of[place], edge, *rates, *errors)
                for edge, *pairs in curves
                for rates, errors in [zip(*pairs, strict=True)]
            ]
    return found


def _rates(part: NoisedBlock, kind: int) -> list[tuple[float, float]]:
    """From the highest edge down the share of one histogram that is not below it, and its standard error."""
    mean = part.mean.reshape(-1, SCORE_BINS)[kind]
    total, found = float(mean.sum()), []
    curve = rising(mean / total).tolist()
    for edge, below in enumerate([*curve[:-1], 1.0]):  # the last sum is 1, but for rounding
        gradient = torch.zeros_like(part.mean)
        chosen = (torch.arange(SCORE_BINS) < edge).double()
        gradient[kind * SCORE_BINS : (kind + 1) * SCORE_BINS] = (chosen - below) / total
        found.append((1 - below, part.error(gradient) if 0 < edge < SCORE_BINS else 0.0))
    return found[::-1]


def write_roc(path: Path, number: int, points: Sequence[RocPoint]) -> None:
    """Adds the curves of the model after a round, in place of those that are there of it; no file without points."""
    rows = list(csv.reader(path.open(encoding="utf-8", newline="")))[1:] if path.exists() else []
    kept = [row for row in rows if row[0] != str(number)]
    if kept or points:
        table = [("round", *RocPoint._fields), *kept, *((number, *point) for point in points)]
        replace_file(path, csv_text(table, end="\r\n").encode())


def with_range(asked: StatisticsConfig, data: str, path: str | None) -> StatisticsConfig:
    """The statistics that are asked for, with the public range in which the data declare that all inputs lie, as a
    model reads them, unless it is given; without one if they declare none."""
    shape, declared = SHAPES.get(data), None
    if data == FOLDER and path is not None:
        description = read_description(Path(path).expanduser().resolve())
        declared = SCALE if description.low is not None or description.columns else None
    elif shape is not None and not shape.num_tokens:
        declared = shape.scale
    return asked if asked.low is not None or declared is None else replace(asked, low=declared[0], high=declared[1])


def with_constants(config: Settings, task: Task) -> Settings:
    """The configuration with the public range, and with what `data.normalise=public` normalises by: the middle and half
    of that range, unless it is given. ConfigError: inputs can't be normalised so."""
    means, kind = config.normaliser.means, config.data.normalise
    config = replace(config, statistics=with_range(config.statistics, config.data.name, config.data.path))
    if kind == "none" and means is not None:
        raise ConfigError("normaliser.means must be left out with data.normalise=none, which does not read them")
    if kind == "none" and not config.statistics.only:
        return config
    if kind != "none" and config.model.name == "scattering":
        raise ConfigError("data.normalise must be none with model.name=scattering, whose transform reads plain pixels")
    shape = shape_of_data(config.statistics, task.shape)
    if means is not None and len(means) != shape.columns:
        raise ConfigError(f"normaliser.means must be {shape.columns} numbers, one a column (got {len(means)})")
    if kind == "private" and means is not None and not config.resume:
        raise ConfigError("normaliser.means must be left out with data.normalise=private: clients are asked for them")
    if kind != "public" or means is not None:
        return config
    middle, half = (shape.low + shape.high) / 2, (shape.high - shape.low) / 2
    return replace(config, normaliser=NormaliserConfig([middle] * shape.columns, [half] * shape.columns))


def answers_by(transport: Transport, plan: Plan, name: str) -> Replies:
    """Yields the answers of all available clients to a question about their data. They get no parameters.
    NobodyAnswers: none has answered; nothing is charged then."""
    available, stats = list(transport.available_clients()), ReplyStats()
    asked = TrainRequest(1, plan.first_clip_norm, plan.run, work=Work(trains=False, query=name))
    yield from stats.accept(transport.ask(asked, torch.zeros(0), available))
    stats.log_failures()
    logger.info("%d of %d clients answered what their data are like", stats.accepted, len(available))
    if available and not stats.accepted:
        raise NobodyAnswers(f"nobody gave a usable answer; the last: {stats.reasons[-1]}")


def found_normaliser(run: RunContext, task: Task, answers: Replies) -> NormaliserConfig:
    """The means and deviations that clients' answers to NORMALISE give. ConfigError as `ask`."""
    query = query_of(NORMALISE, run.plan.run, task.shape)
    found = query.read(ask(run, query, answers, name=NORMALISE))
    normaliser = normaliser_from(found, shape_of_data(run.plan.run.statistics, task.shape))
    count = shape_of_data(run.plan.run.statistics, task.shape).columns
    logger.info("inputs are normalised by %d means and deviations that clients were asked for", count)
    return normaliser


def ask(run: RunContext, query: Query, answers: Replies, *, name: str) -> Sums:
    """The noised sum of all clients' answers to a query; what it costs is on disk before noise is drawn. `name`: of
    what the query is for; each has draws of its own. ConfigError: it would pass the budget of the run, or of all runs
    if it charges an account; nobody is asked then."""
    event, ledger, what = run.plan.run.statistics.event, run.ledger, "asking clients about their data"
    charged = Charge(BEFORE, USER, "", event)
    try:
        require_room_for(charged, what, ledger=ledger, budget=run.plan.budget())
    except BudgetSpent as error:
        raise ConfigError(f"a larger statistics.noise_multiplier is needed: {error}") from error
    # What is asked again draws anew: the same noise on two sums would give their difference away.
    source = run.source.child(name, ledger.spent(USER).num_releases)
    how = statistics_noise(run.plan, query.length)
    return answer_round(answers, AnswerSum(how), event=event, source=source, charge=lambda _: ledger.charge([charged]))


def written_statistics(run: RunContext, task: Task, answers: Replies) -> str:
    """The statistics that clients' answers to STATISTICS give, as a text; `statistics.json` is written. ConfigError:
    asking would pass the budget; nobody is asked then."""
    query = query_of(STATISTICS, run.plan.run, task.shape)
    found = query.read(ask(run, query, answers, name=STATISTICS))
    told, user, path = run.plan.run, run.plan.guarantees[0], run.folder.path / "statistics.json"
    epsilon, seeded = run.ledger.spent(USER).epsilon(told.delta, told.accountant), run.plan.settings.seed is not None
    spent = {
        "noise_multiplier": told.statistics.noise_multiplier,
        "unit": user.unit,
        "adjacency": user.adjacency,
        "delta": told.delta,
        "epsilon": epsilon,
        "accountant": told.accountant,
        "protects_nobody": seeded,
    }
    numbers = {what: {of: asdict(one) for of, one in row.items()} for what, row in found.items()}
    write_json(path, {"statistics": numbers, "privacy": spent})
    nobody = "; seed is set, so that the noise protects nobody" if seeded else ""
    return (
        f"{_table(found)}\nuser-level: epsilon {epsilon:.4g} by {told.accountant} at delta {told.delta:g} spent by now "
        f"({user.unit}; {user.adjacency}){nobody}\nwritten to {path}\n"
    )


def _table(found: Mapping[str, Mapping[str, Estimate]]) -> str:
    rows = [("statistic", "of", "value", "standard error")]
    for what, row in found.items():
        rows += [(what, of, f"{one.value:.5g}", f"{one.standard_error:.2g}") for of, one in row.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)
