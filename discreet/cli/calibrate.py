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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent
from rich.console import Console
from rich.table import Table
from typer import Option

from discreet.federated.guarantees import EXAMPLE, LOCAL, ZERO_OUT
from discreet.privacy.accounting import pure_epsilon
from discreet.privacy.calibration import noise_multiplier_for_epsilon, rounds_within
from discreet.privacy.events import PLD, RDP, fixed_size_round_event, poisson_round_event
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.settings.privacy import SECURE, SecureConfig

if TYPE_CHECKING:
    from discreet.privacy.secure_grid import SecureSum

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
    """The numbers that were given. The one of noise, epsilon and rounds that is None is asked for.

    Raises:
      ValueError: it is not one of the three that is None, or a number is out of its range.
    """

    delta: float
    noise: float | None
    epsilon: float | None
    rounds: int | None

    def __post_init__(self) -> None:
        given = {"--noise": self.noise, "--epsilon": self.epsilon, "--rounds": self.rounds}
        if [*given.values()].count(None) != 1:
            raise ValueError("give two of --noise, --epsilon and --rounds: the third is computed")
        for name, value in given.items():
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number above 0 (got {value})")
        if not 0 < self.delta < 1:
            raise ValueError(f"--delta must be within (0, 1) (got {self.delta})")


def command(
    guarantee: Annotated[Literal["user", "example", "local"], typer.Argument()],
    population: Annotated[int | None, Option(help="clients, or a client's examples")] = None,
    cohort: Annotated[int | None, Option(help="expected clients a round, or the batch size")] = None,
    rounds: Annotated[int | None, Option(help="rounds, or local steps")] = None,
    noise: Annotated[float | None, Option(help="the noise multiplier: noise over sensitivity")] = None,
    epsilon: Annotated[float | None, Option()] = None,
    delta: Annotated[float, Option()] = 1e-5,
    aggregation: Annotated[Literal["plain", "secure"], Option(help="secure: with the options below")] = "plain",
    clients: Annotated[int | None, Option(help="secure: how many there are, all of which take part")] = None,
    dropouts: Annotated[int, Option(help="secure: how many may be missing from a round")] = 1,
    colluding: Annotated[int, Option(help="secure: how many may tell the server all they know")] = 1,
    threshold: Annotated[int | None, Option(help="secure: how many must agree to open a sum")] = None,
    parameters: Annotated[int, Option(help="secure: of the model")] = 1_000_000,
    examples: Annotated[int | None, Option(help="secure: of a client at most, at example level")] = None,
) -> None:
    """Answers in a table."""
    question = Question(delta, noise, epsilon, rounds)
    adjacency = "zero-out" if guarantee == EXAMPLE else "add or remove one"
    lines = [f"{guarantee}-level, delta {delta:g}; noise multipliers are noise over the clip norm"]
    if aggregation == SECURE:
        if guarantee == LOCAL or clients is None or (guarantee == EXAMPLE) != (examples is not None):
            raise ValueError(
                "--aggregation secure is for user with --clients, or example with --clients and --examples"
            )
        price = SecurePrice(clients, SecureConfig(dropouts, colluding, threshold), parameters, examples)
        choices = secure_choices(price, adjacency=adjacency)
        lines += price.lines(noise or answer(choices[0], question))
    elif guarantee == LOCAL:
        choices = LOCAL_CHOICES
    elif population is None or cohort is None:
        raise ValueError(f"{guarantee} needs --population and --cohort")
    else:
        choices = sampled_choices(population, cohort, adjacency=adjacency)
        if guarantee == EXAMPLE:
            holds = "The numbers hold for adding or removing one if --population is data.public_num_examples"
            lines.append(f"{ZERO_OUT}. {holds}")
    Console().print(table_of(choices, question))
    print(*lines, sep="\n")


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


@dataclass(frozen=True)
class SecurePrice:
    """Secure aggregation over so many clients, of a model with so many parameters.

    Attributes:
      examples: the most that a client has, at example level; None at user level.

    Raises:
      ConfigError: too few clients for `secure`.

    >>> SecurePrice(10, SecureConfig(dropouts=2, colluding=1), 1_000_000).sum(4.0).bits
    24
    """

    clients: int
    secure: SecureConfig
    parameters: int
    examples: int | None = None

    def __post_init__(self) -> None:
        self.secure.check_fits(self.clients)

    def sum(self, noise_multiplier: float) -> SecureSum:
        """The secure sum of a round, or of a step at example level, with this noise on the sum over the clip norm."""
        # Imported here: it imports PyTorch, which takes twice as long as all else.
        from discreet.privacy.secure_grid import SecureCohort, example_secure_sum, secure_sum

        cohort = SecureCohort(self.clients, self.secure.summands(self.clients))
        if self.examples is None:
            return secure_sum(self.parameters, cohort, noise_multiplier=noise_multiplier)
        return example_secure_sum(self.parameters, cohort, noise_multiplier=noise_multiplier, largest_sum=self.examples)

    def lines(self, noise_multiplier: float) -> tuple[str, ...]:
        """The noise that a client adds and the bytes that it sends, in words."""
        found = self.sum(noise_multiplier)
        return (
            f"each of {self.clients} clients adds a discrete Gaussian of standard deviation "
            f"{found.own_noise_stddev:.4g} clip norms ({math.sqrt(found.variance):.6g} of {found.clip_steps} steps); "
            f"that of {found.summands} is accounted",
            f"{found.bits} bits a value, {math.ceil(found.length * found.bits / 8):,} bytes a client and round; "
            f"{self.secure.threshold_of(self.clients)} nodes must agree to open a sum",
        )
