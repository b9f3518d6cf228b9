"""A run from its configuration to its last file: what the ServerApp and the simulation have in common."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

import discreet
from discreet.config import ConfigError, RunConfig
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.guarantees import count_stddev, guarantees_of, resolve_noise
from discreet.federated.noise_outlook import check_noise, noise_outlook
from discreet.federated.predictions import write_indicators, write_predictions
from discreet.federated.privacy_statement import epsilon_lines, privacy_facts
from discreet.federated.run_folder import (
    ASKED,
    Checkpoint,
    RunFolder,
    change_state,
    check_output,
    only_writer,
)
from discreet.federated.training_run import Outcome
from discreet.privacy.randomness import RandomSource, secure_source, seeded_source
from discreet.tasks.datasets import load_task
from discreet.tasks.examples import Examples, Task
from discreet.tasks.fixed_features import features_of, split_fixed
from discreet.tasks.metrics import Evaluation, evaluate
from discreet.tasks.model_check import check_fits, num_params_of
from discreet.tasks.models import build_model, flatten_parameters, load_parameters, named_parameters_of
from discreet.tasks.partition import SAMPLED, task_partition

logger = logging.getLogger("discreet")

COUNTED = ("natural", "shards")  # partitions that the data allow only for some numbers of clients


@dataclass(frozen=True, eq=False)
class Session:
    """A run that is ready to start: configuration resolved, data and model there, run folder open."""

    config: RunConfig
    folder: RunFolder
    ledger: DurableLedger
    task: Task
    model: nn.Module
    checkpoint: Checkpoint
    source: RandomSource

    def evaluation(self) -> Callable[[Tensor], Evaluation]:
        """Of parameters, on the test set, whose fixed features are computed once."""
        fixed, learned = split_fixed(self.model)
        return partial(_evaluate, learned, self.task.test if fixed is None else features_of(fixed, self.task.test))


def check_secure(config: RunConfig) -> None:
    """Raises ConfigError if a real federation would refuse the configuration."""
    if config.seed is not None:
        raise ConfigError("seed must be null in a real federation: noise that can be drawn again protects nobody")


def prepare(config: RunConfig, *, simulated: bool, held: ExitStack, resolved: RunConfig | None = None) -> Session:
    """Everything before the first round; what is wrong is said here, before anything starts. `simulated`: the clients
    are virtual, and have their ledger in the run folder. `held` holds that folder for this process alone.
    `resolved` is the configuration with its noise resolved, if that was done before.

    Raises:
      ConfigError: a setting does not fit the data or the model, or the target can't be reached.
      LedgerError: a run is resumed under other privacy settings, or its ledgers are not all that was spent.
    """
    asked, (config, task) = config, checked(resolved or config)
    seed = config.seed if config.seed is not None else secrets.randbits(31)
    model = build_model(config.model.name, task.input_shape, task.num_classes, seed=seed)
    folder = check_output(config)
    held.enter_context(only_writer(folder.path))
    if config.resume:
        folder.check_ledgers(config, simulated=simulated)
    else:
        folder.create_ledgers(config, simulated=simulated)
    checkpoint = _start_from(folder, model, config)
    folder.write_config(replace(config, output_dir=str(folder.path), resume=False))
    if not config.resume:
        folder.write_config(asked, name=ASKED)
    source = seeded_source(config.seed) if config.seed is not None else secure_source()
    _announce(config, folder, num_params=checkpoint.params.numel())
    return Session(config, folder, folder.ledger(config), task, model, checkpoint, source)


def checked(config: RunConfig) -> tuple[RunConfig, Task]:
    """The configuration with its noise resolved, and its data: all that is checked before a run folder is opened.

    Raises:
      ConfigError: a setting does not fit the data or the model, or the target can't be reached.
    """
    asked, config = config, resolve_noise(config)
    if config.privacy.user.enabled:
        count_stddev(config)
    try:
        task = load_task(config.data.name, path=config.data.path)
        check_fits(config.model.name, task)
        check_noise(asked, num_params=num_params_of(config.model.name, task), resolved=config)
        if config.data.partition in COUNTED:
            task_partition(task, config.data)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_shares(config, len(task.train))
    return config, task


def _check_shares(config: RunConfig, examples: int) -> None:
    for name, wanted in (
        ("num_clients", 0 if config.data.partition == SAMPLED else config.data.num_clients),
        ("examples_per_client", config.data.examples_per_client or 0),
    ):
        if wanted > examples:
            raise ConfigError(f"data.{name} must be at most the {examples} training examples (got {wanted})")


def _start_from(folder: RunFolder, model: nn.Module, config: RunConfig) -> Checkpoint:
    checkpoint = folder.load_checkpoint() if config.resume else None
    if checkpoint is None:
        params = flatten_parameters(model)
        checkpoint = Checkpoint(0, params, params.new_zeros(params.shape), first_clip_norm(config))
    if config.resume:
        # The rows of rounds that are done again.
        folder.replace_metrics([row for row in folder.read_metrics() if (row["round"] or 0) <= checkpoint.round])
        logger.info("resumed after round %d", checkpoint.round)
    return checkpoint


def first_clip_norm(config: RunConfig) -> float:
    """C_0; infinity if user-level privacy is off, and nothing is clipped at the server."""
    return config.privacy.user.clip.norm if config.privacy.user.enabled else math.inf


def _announce(config: RunConfig, folder: RunFolder, *, num_params: int) -> None:
    user = config.privacy.user
    if config.seed is not None:
        logger.warning(
            "seed=%d makes this run reproducible: its noise can be drawn again and protects nobody", config.seed
        )
    if user.enabled:
        logger.info(
            "user-level: noise multiplier %.4g, delta %g, accountant %s, budget epsilon %s",
            user.noise_multiplier,
            config.privacy.delta,
            config.privacy.accountant,
            "none" if user.max_epsilon is None else f"{user.max_epsilon:g}",
        )
        outlook = noise_outlook(config, num_params=num_params)
        logger.log(logging.WARNING if outlook.drowned else logging.INFO, "%s", outlook)
    for line in client_lines(config):
        logger.info("%s", line)
    off = [guarantee.name for guarantee in guarantees_of(config) if not guarantee.enabled]
    logger.info("guarantees that are off (epsilon = inf): %s", ", ".join(off) or "none")
    logger.info("run folder: %s", folder.path)


def client_lines(config: RunConfig) -> Iterator[str]:
    """What is on of the guarantees that clients give themselves, with its noise and its target."""
    example, local = config.privacy.example, config.privacy.local
    for name, on, target, part in (
        ("example", example.enabled, example.target_epsilon, example),
        (f"local ({local.kind})", local.kind != "none", local.epsilon, local),
    ):
        if on:
            noise = f"noise multiplier {part.noise_multiplier:.4g}" if part.noise_multiplier is not None else ""
            aim = f"noise for a target epsilon of {target:g}" if target is not None else ""
            limit = part.max_epsilon if part.max_epsilon is not None else target
            budget = "none" if limit is None else f"{limit:g}"
            yield f"{name}-level: {noise or aim}, delta {config.privacy.delta:g}, budget epsilon {budget}"


def _evaluate(model: nn.Module, test: Examples, params: Tensor) -> Evaluation:
    load_parameters(model, params)
    return evaluate(model, test)


def finish(session: Session, outcome: Outcome) -> None:
    """Writes the model, privacy.json and, last, that the run is over; says how it ended."""
    config, folder, checkpoint = session.config, session.folder, outcome.checkpoint
    tensors = named_parameters_of(session.model, outcome.model.params)
    metadata = {
        "discreet": discreet.__version__,
        "model": config.model.name,
        "data": config.data.name,
        "input_shape": json.dumps(session.task.input_shape),
        "num_classes": str(session.task.num_classes),
    }
    folder.write_model(tensors, metadata=metadata)
    folder.write_privacy(privacy_facts(config, session.ledger, outcome))
    if config.operations.predictions:
        write_predictions(folder.path)
        write_indicators(folder.path)
    change_state(folder, "stopped" if outcome.stopped else "finished", outcome.stopped)
    if outcome.stopped:
        logger.info("stopped after round %d: %s", checkpoint.round, outcome.stopped)
    for line in epsilon_lines(config, session.ledger, checkpoint):
        logger.info("%s", line)
    logger.info("run folder: %s", folder.path)
