"""Epsilon, noise or rounds: give two, the third is computed for every way of sampling, side by side.

  epsilon for given noise    discreet calibrate user --population 3383 --cohort 120 --rounds 100 --noise 1.2
  noise for given epsilon    discreet calibrate user --population 3383 --cohort 120 --rounds 100 --epsilon 2
  rounds for a budget        discreet calibrate user --population 3383 --cohort 120 --noise 1.2 --epsilon 2

user      population: clients; cohort: expected clients a round; rounds
example   population: a client's examples (zero-out neighbours), or data.public_num_examples (add or remove one);
          cohort: the batch size; rounds: local steps
local     each round is one release of one client; nothing is sampled
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

from discreet.federated.guarantees import EXAMPLE, GUARANTEES, LOCAL, ZERO_OUT
from discreet.privacy.accountants import PLD, RDP
from discreet.privacy.accounting import pure_epsilon
from discreet.privacy.calibration import noise_multiplier_for_epsilon
from discreet.privacy.events import fixed_size_round_event, poisson_round_event
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.rounds import rounds_within

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
    return made


def main(words: Sequence[str]) -> int:
    """The command line; exit code 2 if something is missing or out of range."""
    given = parser().parse_args(words)
    question = Question(given.delta, given.noise, given.epsilon, given.rounds)
    try:
        if [question.noise, question.epsilon, question.rounds].count(None) != 1:
            raise ValueError("give two of --noise, --epsilon and --rounds: the third is computed")
        if given.guarantee != LOCAL and None in (given.population, given.cohort):
            raise ValueError(f"{given.guarantee} needs --population and --cohort")
        _check_ranges(question)
        adjacency = "zero-out" if given.guarantee == EXAMPLE else "add or remove one"
        local = given.guarantee == LOCAL
        choices = LOCAL_CHOICES if local else sampled_choices(given.population, given.cohort, adjacency=adjacency)
        table = table_of(choices, question)
    except ValueError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    Console().print(table)
    print(f"{given.guarantee}-level, delta {given.delta:g}; noise multipliers are noise over the clip norm")
    if given.guarantee == EXAMPLE:
        print(f"{ZERO_OUT}. The numbers hold for adding or removing one if --population is data.public_num_examples")
    return 0
