"""Local differential privacy for the ClientApp of any Flower app, in place of Flower's
`LocalDpMod`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from discreet.dpsgd.argument_names import names_meant
from discreet.flower.app_behind import App, noised_from
from discreet.flower.array_layout import ROUND, ArrayLayout, layout_of, only_arrays
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.node.account import Accounts, Budget, Refused
from discreet.node.app import answered
from discreet.node.policy import ClientPolicy, check_promise
from discreet.node.promise import Promise
from discreet.node.time_limit import lift_limit
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.privacy.randomness import secure_source
from discreet.settings.adjacency import LOCAL
from discreet.settings.rules import OpenShare, Positive, Rounds, section

Ranges = Mapping[str, tuple[float, float]]
# Always 1: the true number is private, and Flower's FedAvg weights by it.
EXAMPLES = "num-examples"
METRICS = "metrics"
# The key of Flower's templates in the run config, from which their ServerApp sets its strategy.
SHARE = "fraction-evaluate"
INSTEAD = (
    "set fraction_evaluate=0, and rate the model on data of the server's own by "
    "start(evaluate_fn=...), or let nodes send noised numbers with their updates by "
    'local_dp_mod(metrics={"loss": (0.0, 4.0)})'
)

logger = logging.getLogger("discreet.client")


@names_meant
def local_dp_mod(
    *,
    clip_norm: float,
    target_epsilon: float,
    delta: float,
    rounds: int,
    ledger: str | Path | None = None,
    metrics: Ranges | None = None,
) -> Callable[[Message, Context, App], Message]:
    """A mod for a node that trusts nobody: its app's update is clipped, noised and accounted for
    before it leaves the node.

    Guarantee: (target_epsilon, delta) over `rounds` train messages for replacing all data of the
    node, against everybody who sees its replies. The difference to the received arrays is clipped
    to `clip_norm` in L2 and noised on an exact grid for 2 * clip_norm. Whole numbers keep the
    server's values. Each reply is charged before the app is called, and leaves all the same: an app
    that raises anything, takes longer than the node's max-seconds, or returns arrays that do not
    fit or are not finite counts as no change. Only SIGINT, SIGTERM and SIGQUIT end a node
    meanwhile, also if its app sends them, and an app that ends its process or switches off its own
    alarm. A request below the node's policy or beyond its budget, and every other message, is
    refused. That a node took part, and how long its app ran, is not covered.

    Args:
      ledger: a file of `discreet ledger create`; None: the one that the node's owner names in
        --node-config.
      metrics: public ranges (low, high) of the metrics that are sent, noised, as one more release a
        round; other metrics are not sent.

    >>> mod = local_dp_mod(clip_norm=1.0, target_epsilon=8.0, delta=1e-5, rounds=20)"""
    ranges = _ranges({} if metrics is None else metrics)
    mod = _LocalDp(
        clip_norm, target_epsilon, delta, rounds, None if ledger is None else Path(ledger), ranges
    )
    return lambda message, context, call_next: answered(
        message, partial(mod.reply, message, context, call_next), context.node_config
    )


@cache
def _warn_of_evaluation(share: object) -> None:
    """Warns before the first charge that the run config asks nodes to evaluate; once a process."""
    if share:
        logger.warning(
            "%s=%s in the run config asks nodes to evaluate, and every such message is refused: %s",
            SHARE,
            share,
            INSTEAD,
        )


def _ranges(metrics: Ranges) -> dict[str, tuple[float, float]]:
    """The ranges of metrics. Raises ValueError: they are not finite, or no ranges."""
    with suppress(TypeError, ValueError, AttributeError):
        ranges = {name: (float(low), float(high)) for name, (low, high) in metrics.items()}
        if all(math.isfinite(high - low) and low < high for low, high in ranges.values()):
            return ranges
    wanted = 'by name, such as {"loss": (0.0, 4.0)}'
    raise ValueError(f"metrics must have finite ranges (low, high) {wanted} (got {metrics!r})")


@section("")
class _LocalDp:
    clip_norm: Positive
    target_epsilon: Positive
    delta: OpenShare
    rounds: Rounds
    ledger: Path | None
    ranges: dict[str, tuple[float, float]]

    def reply(
        self, message: Message, context: Context, call_next: App, policy: ClientPolicy
    ) -> RecordDict:
        if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
            raise Refused(
                "this node answers only train messages, as other answers would leave in the clear: "
                f"{INSTEAD}"
            )
        _warn_of_evaluation(context.run_config.get(SHARE))
        sent = only_arrays(message.content, "the message")
        # The server's name: those of the app's records may be chosen by its data.
        key = next(name for name, record in message.content.items() if record is sent)
        privacy = self._privacy(self.clip_norm)
        layout = layout_of(sent)
        before = layout.vector(sent)
        self._charge(message.content, privacy, context, policy)

        def noised(changed: tuple[Tensor, list[float]] | None) -> RecordDict:
            unchanged = torch.zeros(len(before), dtype=torch.float32), [0.0] * len(self.ranges)
            update, places = changed or unchanged
            released = release_update(update, privacy, source=secure_source())
            metrics = MetricRecord({EXAMPLES: 1, **self._metrics(places)})
            return RecordDict({key: layout.record(before + released), METRICS: metrics})

        read = partial(self._read, layout, before)
        return noised_from(call_next, message, context, read, noised)

    def _read(
        self, layout: ArrayLayout, before: Tensor, content: RecordDict
    ) -> tuple[Tensor, list[float]]:
        """The app's change of the arrays, and the places of its metrics in their ranges."""
        trained = only_arrays(content, "the app's reply")
        update = layout.difference(trained, before.numpy())
        records = content.metric_records.values()
        found = {name: value for record in records for name, value in record.items()}
        places = [_place(found.get(name), *ends) for name, ends in self.ranges.items()]
        return update, places

    def _privacy(self, norm: float) -> LocalPrivacy:
        """The noise of a release. `count` Gaussians of multiplier z cost as much as one of z /
        sqrt(count)."""
        whole = analytic_gaussian_noise_multiplier(self.target_epsilon, delta=self.delta)
        return LocalPrivacy(
            "gaussian", norm, whole * math.sqrt(self.rounds * (1 + bool(self.ranges))), "grid"
        )

    def _charge(
        self, content: RecordDict, privacy: LocalPrivacy, context: Context, policy: ClientPolicy
    ) -> None:
        path = self.ledger or context.node_config.get("ledger")
        if path is None:
            raise Refused(
                "this node has no ledger: give local_dp_mod one, or name it in --node-config"
            )
        ledger = DurableLedger(Path(str(path)))
        ledger.check(all_rows=False)
        check_promise(policy, Promise({LOCAL: privacy.noise_multiplier}, self.delta))
        budgets = [Budget(self.target_epsilon, self.delta, LOCAL)]
        if math.isfinite(policy.max_epsilon):
            budgets.append(Budget(policy.max_epsilon, policy.max_delta))
        number = _round_of(content)
        owner = str(context.node_config.get("partition-id", ""))
        accounts = Accounts(ledger, self.delta, "pld")
        charge = [Charge(number, LOCAL, owner, privacy.event, 1 + bool(self.ranges))]
        accounts.after(charge, budgets)
        lift_limit()  # what is charged is answered
        while not accounts.write(charge):
            accounts.after(charge, budgets)

    def _metrics(self, places: list[float]) -> dict[str, float]:
        """The metrics with a public range, noised together: their places are a vector of norm at
        most 1 once it is divided by the root of their number."""
        if not places:
            return {}
        root = math.sqrt(len(places))
        shares = torch.tensor(places, dtype=torch.float32) / root
        noised = release_update(shares, self._privacy(1.0), source=secure_source())
        said = {}
        for (name, (low, high)), value in zip(self.ranges.items(), noised.tolist(), strict=True):
            said[name] = low / 2 + high / 2 + value * root * (high - low) / 2
        return said


def _place(value: object, low: float, high: float) -> float:
    """The place of an app's metric in its range, from -1 to 1. What is no number is in the middle,
    also a number of the app's own class that fails."""
    middle = low / 2 + high / 2
    number = middle
    with suppress(Exception):
        if isinstance(value, int | float):
            number = float(min(max(value, low), high))
    if math.isnan(number):
        return 0.0
    # Clamped once more, as a class may compare its numbers as it likes.
    return min(max((number - middle) / ((high - low) / 2), -1.0), 1.0)


def _round_of(content: RecordDict) -> int:
    """The number of a message's round, 0 if it has none. Refused: it is no such number."""
    rounds = [record[ROUND] for record in content.config_records.values() if ROUND in record]
    number = [*rounds, 0][0]
    if type(number) is int and 0 <= number < 2**63:
        return number
    raise Refused(f"{ROUND} must be a whole number from 0 to 2^63 - 1 (got {number!r:.40})")
