"""DPClient: a Flower NumPyClient that trains privately on the examples of one client."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor, nn

from client_app.account import ClientAccount, Refused
from client_app.local_privacy import LocalPrivacy, check_pure_total, release_step, release_update, round_privacy
from client_app.policy import ClientPolicy, as_declared, budgets_of, check_policy
from discreet.config import RunConfig, config_from_json
from discreet.federated.guarantees import EXAMPLE, LOCAL, PRIVACY_DRAWS, USER
from discreet.federated.messages import MalformedMessage, Order, Reply, order_from_config
from discreet.privacy.calibration import noise_multiplier_for_epsilon
from discreet.privacy.clipping import clip_by_norm
from discreet.privacy.events import poisson_round_event
from discreet.privacy.randomness import RandomSource
from discreet.tasks.examples import Examples
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    counted_examples,
    example_event,
    local_update,
    sampling_probability,
    steps_of,
)

UNIFORM_WEIGHT = 1  # NumPyClient.fit must return a number of examples; the real one does not leave the client

logger = logging.getLogger("discreet.client")

Scalar = bool | bytes | float | int | str


@dataclass(frozen=True, eq=False)
class DPClient(NumPyClient):
    """Local training under a client's own guarantees, policy and account.

    Attributes:
      model: the architecture; parameters are overwritten.
      examples: the client's own.
      account: where its example-level and local guarantees are charged; None where neither is on.
      policy: what its owner allows.
      source: of all random numbers of this message.
    """

    model: nn.Module
    examples: Examples
    account: ClientAccount | None
    policy: ClientPolicy
    source: RandomSource

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        """One round's work.

        Args:
          parameters: one array (num_params,).
          config: an `Order` as `wire.order_config` writes it.

        Returns:
          The update as one array (num_params,), float32; the constant 1; and `round`, `below`, `epsilon_example`,
          `epsilon_local`, `epsilon_local_pure`.

        Raises:
          Refused: a policy or a budget forbids the work.
          MalformedMessage, ConfigError: the order can't be read.
        """
        order = order_from_config(config)
        reply = self.answer(order, torch.from_numpy(np.array(parameters[0], dtype=np.float32)))
        numbers: dict[str, Scalar] = {
            "round": reply.round,
            "below": reply.below,
            "epsilon_example": reply.epsilon_example,
            "epsilon_local": reply.epsilon_local,
            "epsilon_local_pure": reply.epsilon_local_pure,
        }
        return [reply.update.numpy()], UNIFORM_WEIGHT, numbers

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        """Refused: a client's loss and accuracy are not private. The server evaluates on its public test set.

        Raises:
          Refused: always.
        """
        raise Refused("a client's loss and accuracy are not private, and do not leave it")

    def answer(self, order: Order, params: Tensor) -> Reply:
        """`fit` on typed values."""
        run = as_declared(settings_of(order.settings), self.policy)
        self._check_order(order, run, params)
        local = round_privacy(run, round_number=order.round)
        settings = local_settings(run, len(self.examples))
        check_asked(run, settings, local, num_examples=len(self.examples), policy=self.policy)
        # Charged, and on disk, before anything is computed that could leave.
        spent_example = self._charge_example(run, settings, order.round)
        spent_local = self._charge_local(run, local, order.round)
        pure = self.account.pure_epsilon(LOCAL) if self.account and local else 0.0
        update = self._update(params, settings, local)
        clipped, norms = clip_by_norm(update.unsqueeze(0), order.clip_norm)
        below = bool(norms[0] <= order.clip_norm)
        return Reply(order.round, clipped[0], below, spent_example, spent_local, pure)

    def _update(self, params: Tensor, settings: LocalSettings, local: LocalPrivacy | None) -> Tensor:
        if local is not None and local.kind == "laplace_step":
            rate, source = settings.learning_rate, self.source.child("local")
            return release_step(self.model, params, self.examples, learning_rate=rate, privacy=local, source=source)
        update = local_update(self.model, params, self.examples, settings=settings, source=self.source)
        return release_update(update, local, source=self.source.child("local")) if local else update

    def _check_order(self, order: Order, run: RunConfig, params: Tensor) -> None:
        # Looked at before anything is charged.
        check_round(run, order.round)
        size = sum(parameter.numel() for parameter in self.model.parameters())
        if params.shape != (size,):
            raise MalformedMessage(
                f"the model {run.model.name} has {size} parameters, the order holds {params.numel()}"
            )

    def _charge_example(self, run: RunConfig, settings: LocalSettings, round_number: int) -> float:
        steps = steps_of(len(self.examples), settings)
        if settings.example is None or steps == 0:
            return 0.0
        return self._account().charge(
            EXAMPLE,
            example_event(len(self.examples), settings),
            count=steps,
            round_number=round_number,
            budgets=budgets_of(self.policy, run, EXAMPLE),
        )

    def _charge_local(self, run: RunConfig, local: LocalPrivacy | None, round_number: int) -> float:
        if local is None:
            return 0.0
        account, budgets = self._account(), budgets_of(self.policy, run, LOCAL)
        check_pure_total(run, local, spent=account.ledger.spent(LOCAL, holder=account.holder))
        return account.charge(LOCAL, local.event, count=1, round_number=round_number, budgets=budgets)

    def _account(self) -> ClientAccount:
        if self.account is None:
            raise Refused("this client has no ledger, and spends nothing it can't write down: start it with one")
        return self.account


def check_round(run: RunConfig, round_number: int) -> None:
    """Raises Refused for a round beyond those of the run, which its settings do not account for."""
    if round_number > run.rounds:
        raise Refused(f"the order is for round {round_number}, and the run has rounds={run.rounds}")


def check_asked(
    run: RunConfig, settings: LocalSettings, local: LocalPrivacy | None, *, num_examples: int, policy: ClientPolicy
) -> None:
    """Looks at what a client with `num_examples` examples is asked, before anything is charged.

    Raises:
      Refused: the policy forbids it, or the delta of a guarantee that the client accounts is too large for so many
        examples.
    """
    noises: dict[str, float] = {}
    if run.privacy.user.enabled:
        noises[USER] = run.privacy.user.noise_multiplier or 0.0
    if settings.example is not None:
        noises[EXAMPLE] = settings.example.noise_multiplier
    if local is not None:
        noises[LOCAL] = local.noise_multiplier
    counted = counted_examples(num_examples, settings)
    if counted > 1 and noises.keys() - {USER}:
        _check_delta("privacy.delta", run.privacy.delta, counted)
        if math.isfinite(policy.max_epsilon):
            _check_delta("max-delta of this client's policy", policy.max_delta, counted)
    check_policy(policy, run, noise_multipliers=noises)


def _check_delta(name: str, delta: float, num_examples: int) -> None:
    # A guarantee for a whole client is one for each of its examples too: with 1 / n, one of them might leave as it is.
    if delta >= 1 / num_examples:
        raise Refused(f"{name} must be below 1 / n of this client's n examples (it is {delta:g})")


def local_settings(run: RunConfig, num_examples: int) -> LocalSettings:
    """What a configuration asks of a client with `num_examples` examples.

    `privacy.example.target_epsilon` is met by the noise for taking part in every planned round: a client that is
    sampled less often spends less.
    """
    training, example = run.training, run.privacy.example
    settings = LocalSettings(training.epochs, training.batch_size, training.learning_rate, training.momentum)
    if not example.enabled:
        return settings
    draws, declared = PRIVACY_DRAWS.get(run.privacy.noise, 1), run.data.public_num_examples
    private = ExamplePrivacy(example.l2_norm_clip, example.noise_multiplier or 0.0, draws, declared)
    settings = replace(settings, example=private)
    if example.noise_multiplier is not None:
        return settings
    assert example.target_epsilon is not None
    noise_multiplier = _calibrate(
        example.target_epsilon,
        run.privacy.delta,
        accountant=run.privacy.accountant,
        probability=sampling_probability(max(1, num_examples), settings),
        count=steps_of(max(1, num_examples), settings) * run.rounds,
    )
    return replace(settings, example=replace(private, noise_multiplier=noise_multiplier))


@lru_cache(maxsize=1024)
def _calibrate(target: float, delta: float, *, accountant: str, probability: float, count: int) -> float:
    """Flat arguments: a run with a list in it can't be the key of a cache."""
    return noise_multiplier_for_epsilon(
        target,
        make_event=lambda noise: poisson_round_event(probability, noise_multiplier=noise),
        count=count,
        delta=delta,
        accountant=accountant,
    )


@lru_cache(maxsize=16)
def settings_of(text: str) -> RunConfig:
    """The settings of an order. Kept: reading them takes longer than a small client's training.

    Raises:
      ConfigError: they can't be read.
    """
    return config_from_json(text)
