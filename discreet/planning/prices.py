"""Computes epsilon, noise or rounds from the other two, for several ways of sampling side by
side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent

from discreet.accounting.accounting import pure_epsilon
from discreet.accounting.calibration import MAX_ROUNDS, noise_multiplier_for_epsilon, rounds_within
from discreet.accounting.correlation import Turns, best_bandwidth
from discreet.accounting.events import (
    BISR,
    BSR,
    NONE,
    PLD,
    RDP,
    SQRT,
    fixed_size_round_event,
    poisson_round_event,
)
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.settings.adjacency import USER
from discreet.settings.privacy import SecureConfig
from discreet.settings.rules import ConfigError, Count, OpenShare, Positive, section

if TYPE_CHECKING:
    from discreet.mechanisms.mechanism import Mechanism
    from discreet.privacy.secure_grid import SecureSum

PURE = "pure"  # epsilon at delta 0, which adds up
MOST_TURNS = 4096  # rounds of correlated noise that are looked at


@dataclass(frozen=True)
class Price:
    """A sampling method, with its adjacency and a suitable accountant. `event`: the event of a
    round by its noise multiplier. If clients take `turns`, it is the event of all rounds together,
    by the multiplier of each round's own noise."""

    sampling: str
    adjacency: str
    accountant: str
    event: Callable[[float], DpEvent]
    turns: Callable[[int], Turns] | None = None

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        """The epsilon of a number of rounds."""
        spent = PrivacyLedger(self._releases(noise, rounds))
        if self.accountant == PURE:
            return pure_epsilon(spent.entries)
        return spent.epsilon(delta, self.accountant)

    def noise(self, epsilon: float, rounds: int, delta: float) -> float:
        """The noise multiplier with which `rounds` rounds cost `epsilon`. ValueError: there is
        none."""
        if self.accountant == PURE:
            return rounds / epsilon
        return noise_multiplier_for_epsilon(
            epsilon,
            releases=lambda noise: self._releases(noise, rounds),
            delta=delta,
            accountant=self.accountant,
        )

    def rounds(self, noise: float, epsilon: float, delta: float) -> int:
        """The number of rounds that fit in epsilon. ValueError: it is above the largest number
        searched."""
        if self.accountant == PURE:
            return int(epsilon * noise * (1 + 1e-12))
        if self.turns is None:
            most = MAX_ROUNDS
        else:
            most = MOST_TURNS
        return rounds_within(epsilon, lambda count: self.epsilon(noise, count, delta), most=most)

    def _releases(self, noise: float, rounds: int) -> tuple[tuple[DpEvent, int], ...]:
        if self.turns is None:
            return ((self.event(noise), rounds),)
        return ((self.event(noise / self.turns(rounds).sensitivity), 1),)


@section("--")
class Question:
    """Two of noise, epsilon and rounds; the third is computed."""

    noise: Positive | None
    epsilon: Positive | None
    rounds: Count | None
    delta: OpenShare

    def __post_init__(self) -> None:
        if len(self._given) != 2:
            raise ConfigError("give two of --noise, --epsilon and --rounds: the third is computed")

    @property
    def _given(self) -> dict[str, float]:
        three = {"noise": self.noise, "epsilon": self.epsilon, "rounds": self.rounds}
        return {name: value for name, value in three.items() if value is not None}

    @property
    def _asked(self) -> str:
        """The name of the number to compute."""
        if self.epsilon is None:
            return "epsilon"
        if self.noise is None:
            return "noise"
        return "rounds"

    def answer(self, price: Price) -> float:
        """The third number. ValueError: there is none."""
        return getattr(price, self._asked)(**self._given, delta=self.delta)  # type: ignore[no-any-return]

    def running_sums(self, prices: Sequence[Price]) -> list[str]:
        """The noise on the running sum, in words, for prices with correlated noise."""
        said = []
        for price in prices:
            rounds = price.turns and (self.rounds or int(self.answer(price)))
            if price.turns and rounds:
                turns = price.turns(rounds)
                noise = self.noise or self.answer(price)
                if turns.kind in (BSR, BISR):
                    band = f", bandwidth {turns.bandwidth}"
                else:
                    band = ""
                found = f"{noise * turns.running_sum_noise:.4g} clip norms (root mean square)"
                said.append(f"{price.sampling}{band}: noise on the running sum of updates {found}")
        if said:
            said.append("a model adds up all rounds: compare the running sums, not the multipliers")
        return said

    def rows(self, prices: Sequence[Price]) -> list[dict[str, object]]:
        """All prices side by side: each answer and its ratio to the first one, or the reason why
        there is none."""
        name = {"noise": "noise multiplier"}.get(self._asked, self._asked)
        rows = list[dict[str, object]]()
        first = 0.0
        for price in prices:
            try:
                value = self.answer(price)
                first = first or value
                if name != "rounds":
                    number = f"{value:.5g}"
                else:
                    number = str(value)
                if first:
                    times = f"{value / first:.3g}"
                else:
                    times = "-"
            except ValueError as error:
                number = "none"
                times = str(error)
            how = {
                "sampling": price.sampling,
                "adjacency": price.adjacency,
                "accountant": price.accountant,
            }
            rows.append({**how, name: number, "times the first": times})
        return rows


def sampled_prices(
    population: int, cohort: int, *, adjacency: str = "add or remove one"
) -> list[Price]:
    """Poisson, fixed-size and full cohorts, for `cohort` expected of `population`. `adjacency`
    applies to all but fixed-size ones."""
    if not 0 < cohort <= population:
        raise ValueError(f"--cohort must be within [1, --population = {population}] (got {cohort})")

    def poisson(noise: float) -> DpEvent:
        return poisson_round_event(cohort / population, noise_multiplier=noise)

    def fixed(noise: float) -> DpEvent:
        return fixed_size_round_event(cohort, population_size=population, noise_multiplier=noise)

    return [
        Price("poisson", adjacency, PLD, poisson),
        Price("poisson", adjacency, RDP, poisson),
        Price("fixed size", "replace one", RDP, fixed),
        Price("everyone", adjacency, PLD, GaussianDpEvent),
    ]


def own_price(mechanism: str, population: int, cohort: int) -> Price:
    """A third-party mechanism, `package.module:Class`, with Poisson cohorts. ConfigError: there is
    none."""
    from discreet.mechanisms.mechanism_table import server_mechanism
    from discreet.settings.client_settings import ClientSettings, UserTerms
    from discreet.settings.training import FLOWER_APP, ModelConfig

    user = UserTerms(
        True, 1.0, probability=cohort / population, population_size=population, mechanism=mechanism
    )
    run = ClientSettings(1, 0.5 / population, PLD, "grid", model=ModelConfig(FLOWER_APP), user=user)

    def found(noise: float) -> Mechanism:
        made = server_mechanism(run.with_noise(USER, noise))
        assert made is not None
        return made

    def event(noise: float) -> DpEvent:
        cost = found(noise).event(1)
        assert cost is not None
        return cost

    one = found(1.0)
    return Price(
        mechanism, one.statement().adjacency, RDP if one.accountants == (RDP,) else PLD, event
    )


def turn_prices(groups: int, *, adjacency: str) -> list[Price]:
    """Clients that take turns, with each kind of noise. ValueError: `groups` is too small."""
    if groups < 1:
        raise ValueError(f"--groups must be at least 1 (got {groups})")

    def price(kind: str) -> Price:
        def turns(rounds: int) -> Turns:
            return Turns(kind, best_bandwidth(kind, groups=groups, rounds=rounds), groups, rounds)

        return Price(
            f"cyclic, {kind if kind != NONE else 'independent'}",
            adjacency,
            PLD,
            GaussianDpEvent,
            turns,
        )

    return [price(kind) for kind in (BSR, BISR, SQRT, NONE)]


LOCAL_PRICES: list[Price] = [
    Price("gaussian, L2", "replace", PLD, GaussianDpEvent),
    Price("laplace, L1", "replace", PLD, LaplaceDpEvent),
    Price("laplace, L1", "replace", PURE, LaplaceDpEvent),
]


def secure_prices(
    event: Callable[[float], DpEvent], *, adjacency: str = "add or remove one"
) -> list[Price]:
    """The price of secure aggregation, whose sum has an event, and beside it the price of the same
    noise at a trusted server."""
    return [
        Price("secure aggregation", "zero-out", RDP, event),
        Price("everyone, noise at the server", adjacency, RDP, GaussianDpEvent),
        Price("everyone, noise at the server", adjacency, PLD, GaussianDpEvent),
    ]


def masked_sum(
    clients: int,
    secure: SecureConfig,
    noise_multiplier: float,
    parameters: int,
    examples: int | None = None,
) -> SecureSum:
    """The secure sum of a round or, at example level, of a step in which each client has at most so
    many `examples`.

    >>> masked_sum(10, SecureConfig(dropouts=2, colluding=1), 4.0, 1_000_000).bits
    24
    """
    # Imported here because it imports PyTorch, which takes twice as long as everything else.
    from discreet.privacy.secure_grid import SecureCohort, example_secure_sum, secure_sum

    cohort = SecureCohort(clients, secure.summands(clients))
    if examples is None:
        return secure_sum(parameters, cohort, noise_multiplier=noise_multiplier)
    return example_secure_sum(
        parameters, cohort, noise_multiplier=noise_multiplier, largest_sum=examples
    )


def masked_lines(found: SecureSum, clients: int, secure: SecureConfig) -> list[str]:
    """A client's noise and the bytes that it sends, in words."""
    return [
        f"each of {clients} clients adds a discrete Gaussian of standard deviation "
        f"{found.own_noise_stddev:.4g} clip norms ({math.sqrt(found.variance):.6g} "
        f"grid steps; {found.clip_steps} are one clip norm); the noise of {found.summands} clients "
        "is accounted",
        f"{found.bits} bits a value, {math.ceil(found.length * found.bits / 8):,} "
        f"bytes per client and round; {secure.threshold_of(clients)} nodes must agree "
        "to open a sum",
    ]
