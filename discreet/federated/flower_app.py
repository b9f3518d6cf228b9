"""Somebody else's Flower app, made private: its settings, its arrays, and the run that drives its clients."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.superlink.grid import InMemoryGrid
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import discreet
from discreet.client_settings import FLOWER_APP
from discreet.config import ConfigError, RunConfig
from discreet.federated.array_layout import ArrayLayout, layout_of
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.flower_messages import FlowerMessages
from discreet.federated.grid_transport import GridTransport
from discreet.federated.guarantees import count_stddev, resolve_noise
from discreet.federated.masked_transport import MaskedTransport, SumTerms
from discreet.federated.messages import VirtualClient
from discreet.federated.noise_outlook import check_noise
from discreet.federated.opened_run import OpenedRun, close_run, open_run, say_how_it_ended
from discreet.federated.private_evaluation import Unrated
from discreet.federated.query import Query
from discreet.federated.ready_run import EvaluateFn, ReadyRun, StartCall
from discreet.federated.resuming import same_settings
from discreet.federated.run_folder import Checkpoint, RunFolder, check_output, replace_file
from discreet.federated.run_plan import plan_of
from discreet.federated.session import check_secure
from discreet.federated.simulated_clients import set_up_simulation
from discreet.federated.strategy_settings import check_search
from discreet.federated.training_plan import OnRound, tell_nobody
from discreet.federated.training_run import Outcome, TrainingRun
from discreet.secure_settings import Sizes
from discreet.settings import client_settings
from discreet.tasks.examples import TaskShape
from discreet.tasks.metric_answers import metric_blocks

logger = logging.getLogger("discreet")


# What clients of another app rate by: one accuracy, whatever their examples are.
RATED = Query(metric_blocks(["accuracy"], TaskShape((1,), 2)))
UNSEEN = (
    "nobody will see whether the model learns: give start an evaluate_fn, on data of the server's own, or the strategy "
    "private_evaluation=discreet.PrivateEvaluation(...), by which clients rate the model, noised and paid for"
)
# How the constructor and `start` call the settings of conf/.
ARGUMENTS = {
    "sampling.kind": "sampling",
    "sampling.probability": "fraction_train",
    "sampling.population_size": "population_size",
    "sampling.population_name": "population_name",
    "sampling.min_nodes": "min_available_nodes",
    "data.num_clients": "population_size",
    "server.learning_rate": "server_learning_rate",
    "server.momentum": "server_momentum",
    "server.shrink_with_noise": "shrink_with_noise",
    "server.round_timeout": "timeout",
    "privacy.delta": "delta",
    "privacy.accountant": "accountant",
    "privacy.noise": "noise",
    "privacy.user.noise_multiplier": "noise_multiplier",
    "privacy.user.target_epsilon": "target_epsilon",
    "privacy.user.max_epsilon": "max_epsilon",
    "privacy.user.account": "account",
    "privacy.user.aggregation": "aggregation",
    "privacy.secure.dropouts": "dropouts",
    "privacy.secure.colluding": "colluding",
    "privacy.secure.threshold": "threshold",
    "privacy.user.too_noisy": "too_noisy",
    "privacy.user.clip.kind": "clipping",
    "privacy.user.clip.norm": "clip_norm",
    "privacy.user.clip.max": "clip_max",
    "privacy.user.clip.target_quantile": "target_quantile",
    "privacy.user.clip.learning_rate": "clip_learning_rate",
    "privacy.user.clip.count_stddev": "count_stddev",
    "evaluation.every": "private_evaluation.every",
    "evaluation.noise_multiplier": "private_evaluation.noise_multiplier",
    "resume=true": "resume=True",
    "rounds=": "num_rounds=",
    "rounds must": "num_rounds must",
}
_NAMES = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}" for name in sorted(ARGUMENTS, key=len, reverse=True)))


def in_arguments(text: str) -> str:
    """A message with settings under the names that the strategy's arguments have.

    >>> in_arguments("privacy.user.clip.norm must be within [1e-09, 1e+09] (got 0.0)")
    'clip_norm must be within [1e-09, 1e+09] (got 0.0)'
    """
    return _NAMES.sub(lambda found: ARGUMENTS[found[0]], text)


@contextmanager
def said_in_arguments() -> Iterator[None]:
    """What the block finds wrong with a setting is said of the argument."""
    try:
        yield
    except (ConfigError, LedgerError) as error:
        raise type(error)(in_arguments(str(error))) from error


@dataclass(frozen=True)
class Scores:
    """What a server's own evaluation says, if it does: see `scores_of`."""

    loss: float | None = None
    accuracy: float | None = None

    @property
    def scores(self) -> dict[str, float | None]:
        """As a row of metrics.csv has them."""
        return {"accuracy": self.accuracy}


def scores_of(metrics: MetricRecord | None) -> Scores:
    """Loss and accuracy among metrics: the first number whose name is or ends in `loss`, and in `accuracy` or `acc`.

    >>> scores_of(MetricRecord({"test_acc": 0.5, "num-examples": 10}))
    Scores(loss=None, accuracy=0.5)
    """
    numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}

    def ending(*ends: str) -> float | None:
        return next((float(value) for name, value in numbers.items() if name.lower().endswith(ends)), None)

    return Scores(ending("loss"), ending("accuracy", "acc"))


@dataclass(eq=False)
class ServerEvaluation:
    """Evaluates with the app's own function, on data of the server, and remembers what it said."""

    evaluate_fn: EvaluateFn | None
    layout: ArrayLayout
    found: dict[int, MetricRecord] = field(default_factory=dict)

    def of(self, number: int, arrays: ArrayRecord) -> Scores:
        """Of the arrays after round `number`."""
        metrics = None if self.evaluate_fn is None else self.evaluate_fn(number, arrays)
        if metrics is not None:
            self.found[number] = metrics
        return scores_of(metrics)

    def after(self, checkpoint: Checkpoint) -> Scores:
        """Of the model after a round."""
        return self.of(checkpoint.round, self.layout.record(checkpoint.params))


@dataclass(frozen=True)
class FlowerApp:
    """Clients that have never heard of Discreet: they get arrays and a config, and return arrays.

    Attributes:
      config: of the run, but for what `start` says: the rounds and the timeout.
      frozen: patterns of the arrays that stay as they are.
      arrays_key, config_key: of the records in a message.
      metric: by which clients rate models, if they do.
      on_round: gets the row of metrics.csv of each round; None if nobody wants it.
    """

    config: RunConfig
    frozen: tuple[str, ...] = ()
    arrays_key: str = "arrays"
    config_key: str = "config"
    metric: str = ""
    on_round: OnRound | None = None

    def ready(self, call: StartCall, held: ExitStack) -> ReadyRun:
        """See `discreet.federated.ready_run.App`."""
        with said_in_arguments():
            _refuse_evaluation(call, private=self.config.evaluation.private)
            layout, resumed = layout_of(call.initial_arrays, frozen=self.frozen), None
            config, asked = self._settings(call, Sizes(layout.num_params))
            folder = check_output(config)
            if config.resume:
                resumed = _read_arrays(folder, layout)
            check_noise(asked, num_params=layout.num_params, resolved=config)
            evaluation = ServerEvaluation(call.evaluate_fn, layout)
            layout, loss = resumed or (layout, evaluation.of(0, call.initial_arrays).loss)
            evaluation.layout = layout
            params = layout.vector(call.initial_arrays)
            simulated = isinstance(call.grid, InMemoryGrid) and config.privacy.user.secure
            run = open_run(config, asked=asked, params=params, simulated=simulated, held=held)
        if resumed is None:
            _write_arrays(run.folder, layout, loss)
        transport = self._masked(call, run, self._transport(call, run, evaluation.layout), held)
        training = self._training(run, evaluation, loss, transport)
        return ReadyRun(
            training,
            run,
            layout.record,
            lambda outcome: _close(run, outcome, layout),
            goes_on_by=f'resume=True, output_dir="{run.folder.path}"',
            evaluations=evaluation.found,
        )

    def _settings(self, call: StartCall, sizes: Sizes) -> tuple[RunConfig, RunConfig]:
        """The configuration, resolved and as it was asked for."""
        server = replace(self.config.server, round_timeout=call.timeout)
        asked = replace(self.config, rounds=call.num_rounds, server=server)
        if not isinstance(call.grid, InMemoryGrid):
            check_secure(asked)
        if asked.resume:
            return same_settings(asked), asked
        config = resolve_noise(asked, sizes)
        check_search(config, count_stddev(config))
        return config, asked

    def _transport(self, call: StartCall, run: OpenedRun, layout: ArrayLayout) -> GridTransport:
        config, frozen = run.config, self.frozen
        train_config = ConfigRecord() if call.train_config is None else call.train_config
        masked = (client_settings(config), frozen) if config.privacy.user.secure else None
        return GridTransport(
            call.grid,
            FlowerMessages(layout, train_config, self.arrays_key, self.config_key, self.metric, masked),
            timeout=config.server.round_timeout,
            population_size=config.population_size,
            min_nodes=config.sampling.min_nodes,
            in_every_round=True,
            says=in_arguments,
        )

    def _masked(
        self, call: StartCall, run: OpenedRun, transport: GridTransport, held: ExitStack
    ) -> GridTransport | MaskedTransport:
        """The transport of a run whose server reads masked sums alone, if it is one."""
        config, folder = run.config, run.folder.path
        if not config.privacy.user.secure:
            return transport
        terms = SumTerms.of(config, Sizes(run.checkpoint.params.numel()))
        if not isinstance(call.grid, InMemoryGrid):
            return MaskedTransport(transport, terms)
        ticket, numbers = set_up_simulation(config, folder, held), dict[int, int]()

        def virtual(node: int) -> VirtualClient:
            return VirtualClient(numbers.setdefault(node, len(numbers)), str(folder), ticket)

        return MaskedTransport(transport, terms, virtual)

    def _training(
        self,
        run: OpenedRun,
        evaluation: ServerEvaluation,
        loss: float | None,
        transport: GridTransport | MaskedTransport,
    ) -> TrainingRun:
        logger.info("metrics and numbers of examples that clients report are not read: they are not private")
        # An untrained model is the yardstick for a loss that runs away.
        query = RATED if run.config.evaluation.private else None
        chance = float("inf") if loss is None else loss
        plan = plan_of(run, chance_loss=chance, query=query, says=in_arguments, also=self.on_round or tell_nobody)
        if evaluation.evaluate_fn is None and query is None:
            logger.warning("%s", UNSEEN)
        after = (lambda _: Unrated(query.names())) if query else evaluation.after
        return TrainingRun(plan, run.folder, ledger=run.ledger, transport=transport, evaluate=after)


def _refuse_evaluation(call: StartCall, *, private: bool) -> None:
    if private and call.evaluate_fn is not None:
        raise ConfigError("evaluate_fn must be left out with private_evaluation: a row has place for one accuracy")
    if not isinstance(call.initial_arrays, ArrayRecord):
        raise ConfigError(f"initial_arrays must be an ArrayRecord (got {type(call.initial_arrays).__name__})")
    if call.evaluate_config:
        raise ConfigError(
            "evaluate_config must be left out: clients are not asked to evaluate, for what they would report is not "
            "private. Evaluate on data of the server's own by evaluate_fn"
        )


def _write_arrays(folder: RunFolder, layout: ArrayLayout, loss: float | None) -> None:
    """What a run that goes on needs beside its checkpoint: the arrays that stay, and the loss it started from."""
    folder.arrays_path.parent.mkdir(exist_ok=True)
    metadata = {"layout": layout.described(), "loss": json.dumps(loss)}
    replace_file(folder.arrays_path, save(layout.kept_tensors(), metadata=metadata))


def _read_arrays(folder: RunFolder, layout: ArrayLayout) -> tuple[ArrayLayout, float | None] | None:
    """The layout with the values that stay since the run began, and the loss; None if it ended before it began.

    Raises:
      ConfigError: the run has other arrays.
      LedgerError: the file is damaged.
    """
    path = folder.arrays_path
    if not path.exists():
        if folder.checkpoint_path.exists():
            raise LedgerError(f"{path} is missing: put back the one that belongs to the checkpoint beside it")
        return None
    try:
        with safe_open(path, framework="np") as file:
            facts, kept = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["layout"] != layout.described():
            raise ConfigError(f"initial_arrays must have the names, shapes, dtypes and frozen arrays of {folder.path}")
        return ArrayLayout(layout.parts, kept), json.loads(facts["loss"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise LedgerError(f"{path} is damaged: {error}") from error


def _close(run: OpenedRun, outcome: Outcome, layout: ArrayLayout) -> None:
    metadata = {"discreet": discreet.__version__, "model": FLOWER_APP, "data": FLOWER_APP}
    close_run(run, outcome, layout.tensors(outcome.model.params), metadata)
    say_how_it_ended(run, outcome)
