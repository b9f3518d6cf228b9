"""One round under secure aggregation: the server reads the sum of the clients' noised vectors, and nothing else.

Source: Kairouz, Liu and Steinke 2021 (arXiv 2102.06387), Algorithm 1, with the clip norm of Andrew et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from discreet.federated.answer_sum import AnswerNoise
from discreet.federated.query import Sums
from discreet.federated.round import RoundMetrics, RoundSettings, norm_estimator, server_step
from discreet.federated.sealed_sum import Sealed
from discreet.federated.state import State

if TYPE_CHECKING:
    from dp_accounting import DpEvent


def secure_round(
    state: State, sealed: Sealed, settings: RoundSettings, *, charge: Callable[[DpEvent], None]
) -> tuple[State, RoundMetrics]:
    """Charges a sealed sum, opens it, and applies it as `dp_fedavg_round` does.

    Guarantee: what is opened is a sum of integers to which each of its clients has added discrete Gaussian noise. If
    one client's vector (at example level one example) is zeroed out it moves by at most
    `settings.secure.sensitivity_squared` in squared L2 norm, and the noise of h honest clients is what the event says.
    All that follows is post-processing. A dishonest client can send any integers, and nobody sees them: it spoils the
    model, not the privacy of others. The denominator is a public constant.

    Args:
      sealed: a sum that nobody has read.
      settings: with `secure`; without `user` it is a step at example level, and its norm is `settings.norm`.
      charge: called with the round's event before the sum is opened: it writes the ledger to disk.

    Raises:
      RoundAbandoned: too few clients are left to open the sum. It is charged all the same.
    """
    assert settings.secure is not None
    assert settings.charged is not None
    user, clip_norm = settings.user, settings.clip_norm_of(state)
    charge(settings.charged[1])
    update, below, answers = settings.secure.decode(sealed.open(), clip_norm)
    after = server_step(state, update, settings)
    metrics = RoundMetrics(state.clip_norm, None, sealed.replies, _sums(answers, settings))
    if user is None or user.count_stddev is None or below is None:
        return after, metrics
    estimator, fraction = norm_estimator(state, settings).update(below, expected_cohort=settings.expected_cohort)
    return replace(after, clip_norm=estimator.estimate), replace(metrics, fraction_below=fraction)


def secure_answers(
    sealed: Sealed, settings: RoundSettings, *, event: DpEvent, charge: Callable[[DpEvent], None]
) -> Sums:
    """The sum of the answers of clients that were asked for nothing else: their vectors hold noise in all other places.

    Guarantee, arguments and errors as `secure_round`; `event` is what it costs.
    """
    assert settings.secure is not None
    charge(event)
    sums = _sums(settings.secure.decode(sealed.open(), 1.0)[2], settings)
    assert sums is not None
    return sums


def _sums(answers: Tensor | None, settings: RoundSettings) -> Sums | None:
    """The noised sum of answers, if the round has asked for any."""
    how = settings.answers
    if answers is None or not isinstance(how, AnswerNoise):
        return None
    return Sums(tuple(answers.tolist()), how.expected_cohort, how.stddev, how.probability)
