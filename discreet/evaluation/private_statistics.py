"""The settings of statistics of clients' data: the public range of inputs, what normalises them, and the noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from discreet.data.description import read_description
from discreet.data.examples import SHAPES, Task
from discreet.data.folder import FOLDER, SCALE
from discreet.data.normalising import Normaliser, normaliser_of
from discreet.evaluation.answer_sum import AnswerNoise
from discreet.queries.query import Query, query_of, shape_of_data
from discreet.server.plan import Plan
from discreet.server.run_plan import server_noise
from discreet.settings.data import NormaliserConfig, StatisticsConfig
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings


def with_range(asked: StatisticsConfig, data: str, path: str | None) -> StatisticsConfig:
    """The statistics that are asked for, with the public range of inputs, which clients are told: that of the data,
    unless it is given. Without one if the data declare none."""
    declared = declared_range(data, path) if asked.low is None else None
    return asked if declared is None else replace(asked, low=declared[0], high=declared[1])


def declared_range(data: str, path: str | None) -> tuple[float, float] | None:
    """In which the data declare that all inputs lie, as a model reads them; None if they do not."""
    if data == FOLDER and path is not None:
        return SCALE if read_description(Path(path).expanduser().resolve()).low is not None else None
    shape = SHAPES.get(data)
    return None if shape is None or shape.num_tokens else shape.scale


def with_constants(config: Settings, task: Task) -> Settings:
    """The configuration with what `data.normalise=public` normalises by: the middle and half of the public range,
    unless it is given. With what clients are told of the range, if they are asked.

    Raises:
      ConfigError: inputs can't be normalised so.
    """
    means, kind = config.normaliser.means, config.data.normalise
    if kind == "none" and means is not None:
        raise ConfigError("normaliser.means must be left out with data.normalise=none, which does not read them")
    if kind == "none" and not config.statistics.only:
        return config
    if kind != "none" and config.model.name == "scattering":
        raise ConfigError("data.normalise must be none with model.name=scattering, whose transform reads plain pixels")
    statistics = with_range(config.statistics, config.data.name, config.data.path)
    shape = shape_of_data(statistics, task.shape)
    if means is not None and len(means) != shape.columns:
        raise ConfigError(f"normaliser.means must be {shape.columns} numbers, one a column (got {len(means)})")
    if kind == "private" and means is not None and not config.resume:
        raise ConfigError("normaliser.means must be left out with data.normalise=private: clients are asked for them")
    if kind != "public" or means is not None:
        return replace(config, statistics=statistics)
    middle, half = (shape.low + shape.high) / 2, (shape.high - shape.low) / 2
    return replace(config, normaliser=NormaliserConfig([middle] * shape.columns, [half] * shape.columns))


def normaliser_in(found: NormaliserConfig) -> Normaliser:
    """The means and deviations that inputs are normalised by, if they are known."""
    return normaliser_of(found.means, found.deviations)


def needs_normaliser(plan: Plan) -> bool:
    """True if clients have to be asked before the first round."""
    return plan.run.data.normalise == "private" and plan.run.normaliser.means is None


def statistics_noise(plan: Plan, length: int) -> AnswerNoise:
    """The release of the sum of all clients' answers of `length` numbers."""
    everybody, noise_multiplier = float(plan.run.user.population_size), plan.run.statistics.noise_multiplier
    return server_noise(plan, length, expected_cohort=everybody, noise_multiplier=noise_multiplier)


def data_query(name: str, plan: Plan, task: Task) -> Query:
    """The query about clients' data with a name of `OF_DATA`.

    Raises:
      ConfigError: such data have no such statistics, or no range.
    """
    ranged = with_range(plan.run.statistics, plan.run.data.name, plan.data_path)
    return query_of(name, replace(plan.run, statistics=ranged), task.shape)
