"""Epsilon, noise or rounds: give two, the third is computed for every way of sampling, side by side.

  epsilon for given noise    discreet calibrate user --population 3383 --cohort 120 --rounds 100 --noise 1.2
  noise for given epsilon    discreet calibrate user --population 3383 --cohort 120 --rounds 100 --epsilon 2
  rounds for a budget        discreet calibrate user --population 3383 --cohort 120 --noise 1.2 --epsilon 2
  without a trusted server   discreet calibrate user --aggregation secure --clients 10 --dropouts 2 --colluding 1
                             --rounds 100 --noise 4

user      population: clients; cohort: expected clients a round; rounds
example   population: a client's examples (zero-out neighbours), or data.public_num_examples (add or remove one);
          cohort: the batch size; rounds: local steps
local     each round is one release of one client; nothing is sampled

With --aggregation secure everybody takes part in every round, and adds a share of the noise: n is --clients, d
--dropouts, c --colluding, t --threshold. At example level a client adds up all of its examples, at most --examples.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent
from rich.console import Console
from rich.table import Table

from discreet.cli.secure_price import SecurePrice
from discreet.federated.guarantees import EXAMPLE, GUARANTEES, LOCAL, ZERO_OUT
from discreet.privacy.accounting import pure_epsilon
from discreet.privacy.calibration import noise_multiplier_for_epsilon, rounds_within
from discreet.privacy.events import PLD, RDP, fixed_size_round_event, poisson_round_event
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.secure_settings import AGGREGATION, PLAIN, SECURE, SecureConfig

PURE = "pure"


@dataclass(frozen=True)
class Choice:
    """One way to sample, with the adjacency and the accountant that are right for it."""

    name: str
    adjacency: str
    accountant: str
    event: Callable[[float], DpEvent]


@dataclass(frozen=True)
class Question:
    """What was given; the one of noise, epsilon and rounds that is None is asked for."""

    delta: float
    noise: float | None
    epsilon: float | None
    rounds: int | None


def sampled_choices(population: int, cohort: int, *, adjacency: str = "add or remove one") -> list[Choice]:
    """Poisson, fixed size and everybody, for `cohort` expected of `population`; `adjacency` of all but fixed size.

    Raises:
      ValueError: a cohort of none, or of more than there are.
    """
    if not 0 < cohort <= population:
        raise ValueError(f"--cohort must be within [1, --population = {population}] (got {cohort})")

    def poisson(noise: float) -> DpEvent:
        return poisson_round_event(cohort / population, noise_multiplier=noise)

    def fixed(noise: float) -> DpEvent:
        return fixed_size_round_event(cohort, population_size=population, noise_multiplier=noise)

    return [
        Choice("poisson", adjacency, PLD, poisson),
        Choice("poisson", adjacency, RDP, poisson),
        Choice("fixed size", "replace one", RDP, fixed),
        Choice("everyone", adjacency, PLD, GaussianDpEvent),
    ]


LOCAL_CHOICES = [
    Choice("gaussian, L2", "replace", PLD, GaussianDpEvent),
    Choice("laplace, L1", "replace", PLD, LaplaceDpEvent),
    Choice("laplace, L1", "replace", PURE, LaplaceDpEvent),
]


def secure_choices(price: SecurePrice, *, adjacency: str = "add or remove one") -> list[Choice]:
    """Secure aggregation, and beside it a server that is trusted to add the same noise; `adjacency` of the latter."""
    return [
        Choice("secure aggregation", "zero-out", RDP, lambda noise: price.sum(noise).event),
        Choice("everyone, noise at the server", adjacency, RDP, GaussianDpEvent),
        Choice("everyone, noise at the server", adjacency, PLD, GaussianDpEvent),
    ]


def answer(choice: Choice, question: Question) -> float:
    """The number that is asked for.

    Raises:
      ValueError: there is none, for instance for an epsilon that no noise reaches.
    """
    epsilon, noise, rounds = question.epsilon, question.noise, question.rounds
    delta, by = question.delta, choice.accountant
    if noise is not None and rounds is not None:
        spent = PrivacyLedger().record(choice.event(noise), rounds)
        return pure_epsilon(spent.entries) if by == PURE else spent.epsilon(delta, by)
    assert epsilon is not None
    if rounds is not None:
        if by == PURE:
            return rounds / epsilon
        return noise_multiplier_for_epsilon(epsilon, make_event=choice.event, count=rounds, delta=delta, accountant=by)
    assert noise is not None
    if by == PURE:
        return int(epsilon * noise * (1 + 1e-12))
    return rounds_within(epsilon, event=choice.event(noise), delta=delta, accountant=by)


def table_of(choices: Sequence[Choice], question: Question) -> Table:
    """All choices side by side; the price of each against the first."""
    asked = "epsilon" if question.epsilon is None else "noise multiplier" if question.noise is None else "rounds"
    table = Table("sampling", "adjacency", "accountant", asked, "times the first")
    first = None
    for choice in choices:
        try:
            value = answer(choice, question)
        except ValueError as error:
            table.add_row(choice.name, choice.adjacency, choice.accountant, "none", str(error))
            continue
        first = value if first is None else first
        ratio = f"{value / first:.3g}" if first else "-"
        shown = str(int(value)) if asked == "rounds" else f"{value:.5g}"
        table.add_row(choice.name, choice.adjacency, choice.accountant, shown, ratio)
    return table


def _check_ranges(question: Question) -> None:
    for name, value in (("--noise", question.noise), ("--epsilon", question.epsilon), ("--rounds", question.rounds)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0 (got {value})")
    if not 0 < question.delta < 1:
        raise ValueError(f"--delta must be within (0, 1) (got {question.delta})")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="discreet calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("guarantee", choices=GUARANTEES)
    made.add_argument("--population", type=int, help="clients, or a client's examples")
    made.add_argument("--cohort", type=int, help="expected clients a round, or the batch size")
    made.add_argument("--rounds", type=int, help="rounds, or local steps")
    made.add_argument("--noise", type=float, help="the noise multiplier: noise over sensitivity")
    made.add_argument("--epsilon", type=float)
    made.add_argument("--delta", type=float, default=1e-5)
    made.add_argument("--aggregation", choices=AGGREGATION.names, default=PLAIN)
    secure = made.add_argument_group("with --aggregation secure")
    secure.add_argument("--clients", type=int, help="how many there are, all of which take part")
    secure.add_argument("--dropouts", type=int, default=1, help="how many may be missing from a round")
    secure.add_argument("--colluding", type=int, default=1, help="how many may tell the server all they know")
    secure.add_argument("--threshold", type=int, help="how many must agree to open a sum")
    secure.add_argument("--parameters", type=int, default=1_000_000, help="of the model")
    secure.add_argument("--examples", type=int, help="of a client at most, at example level")
    return made


def secure_price(given: argparse.Namespace) -> SecurePrice | None:
    """What was asked about secure aggregation; None if nothing was.

    Raises:
      ValueError: something is missing, or out of its range.
    """
    if given.aggregation != SECURE:
        return None
    if (
        given.guarantee == LOCAL
        or given.clients is None
        or (given.guarantee == EXAMPLE) != (given.examples is not None)
    ):
        raise ValueError("--aggregation secure is for user with --clients, or example with --clients and --examples")
    secure = SecureConfig(given.dropouts, given.colluding, given.threshold)
    return SecurePrice(given.clients, secure, given.parameters, given.examples)


def choices_of(given: argparse.Namespace, price: SecurePrice | None) -> list[Choice]:
    """The ways to sample that the command line is about.

    Raises:
      ValueError: something is missing, or out of its range.
    """
    adjacency = "zero-out" if given.guarantee == EXAMPLE else "add or remove one"
    if price:
        return secure_choices(price, adjacency=adjacency)
    if given.guarantee == LOCAL:
        return LOCAL_CHOICES
    if None in (given.population, given.cohort):
        raise ValueError(f"{given.guarantee} needs --population and --cohort")
    return sampled_choices(given.population, given.cohort, adjacency=adjacency)


def main(words: Sequence[str]) -> int:
    """The command line; exit code 2 if something is missing or out of range."""
    given = parser().parse_args(words)
    question = Question(given.delta, given.noise, given.epsilon, given.rounds)
    try:
        if [question.noise, question.epsilon, question.rounds].count(None) != 1:
            raise ValueError("give two of --noise, --epsilon and --rounds: the third is computed")
        _check_ranges(question)
        price = secure_price(given)
        choices = choices_of(given, price)
        lines = price.lines(question.noise or answer(choices[0], question)) if price else ()
        table = table_of(choices, question)
    except ValueError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    Console().print(table)
    print(f"{given.guarantee}-level, delta {given.delta:g}; noise multipliers are noise over the clip norm")
    print(*lines, sep="\n", end="\n" if lines else "")
    if given.guarantee == EXAMPLE and not price:
        print(f"{ZERO_OUT}. The numbers hold for adding or removing one if --population is data.public_num_examples")
    return 0
