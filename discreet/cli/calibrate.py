"""Epsilon, noise or rounds: give two, and the third is computed for every sampling scheme.

epsilon for given noise
  discreet calibrate user --population 3383 --cohort 120 --rounds 100 --noise 1.2
noise for given epsilon
  discreet calibrate user --population 3383 --cohort 120 --rounds 100 --epsilon 2
rounds for a budget
  discreet calibrate user --population 3383 --cohort 120 --noise 1.2 --epsilon 2
without secret sampling
  discreet calibrate user --sampling cyclic --groups 28 --rounds 100 --epsilon 2
without a trusted server
  discreet calibrate user --aggregation secure --clients 10 --dropouts 2 --colluding 1 \\
    --rounds 100 --noise 4

user      population: clients; cohort: expected clients a round; rounds
example   population: a client's examples (zero-out neighbours), or data.public_num_examples (add
          or remove one); cohort: the batch size; rounds: local steps
local     each round is one release of one client; nothing is sampled

With --sampling cyclic, --groups of clients take turns, one group a round; the noise is that of
each round, before it is correlated. With --population and --cohort the other sampling schemes are
shown beside it.

With --aggregation secure all clients take part in every round, and add a share of the noise. n is
--clients, d --dropouts, c --colluding. At example level a client adds up all of its examples, at
most --examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

import typer
from typer import Option

from discreet.cli.console import print_table
from discreet.planning import prices as offers
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER, ZERO_OUT
from discreet.settings.privacy import SecureConfig
from discreet.settings.rules import require


def command(
    guarantee: Annotated[Literal["user", "example", "local"], typer.Argument()],
    population: Annotated[int | None, Option(help="clients, or a client's examples")] = None,
    cohort: Annotated[
        int | None, Option(help="expected clients a round, or the batch size")
    ] = None,
    rounds: Annotated[int | None, Option(help="rounds, or local steps")] = None,
    noise: Annotated[
        float | None, Option(help="the noise multiplier: noise over sensitivity")
    ] = None,
    epsilon: Annotated[float | None, Option()] = None,
    delta: Annotated[float, Option()] = 1e-5,
    aggregation: Annotated[
        Literal["plain", "secure"], Option(help="secure: with --clients")
    ] = "plain",
    sampling: Annotated[
        Literal["all", "cyclic"], Option(help="user: cyclic: with --groups")
    ] = "all",
    groups: Annotated[int | None, Option(help="cyclic: how many groups take turns")] = None,
    mechanism: Annotated[str | None, Option(help="user: your own, as package.module:Class")] = None,
    clients: Annotated[
        int | None, Option(help="secure: how many clients, all of which take part")
    ] = None,
    dropouts: Annotated[int, Option(help="secure: how many may be missing from a round")] = 1,
    colluding: Annotated[int, Option(help="secure: how many may collude with the server")] = 1,
    parameters: Annotated[int, Option(help="secure: parameters of the model")] = 1_000_000,
    examples: Annotated[
        int | None, Option(help="secure: most examples of a client, at example level")
    ] = None,
) -> None:
    """Prints the result as a table."""
    prices: list[offers.Price]
    question = offers.Question(noise, epsilon, rounds, delta)
    of_examples = guarantee == EXAMPLE
    if of_examples:
        adjacency = "zero-out"
    else:
        adjacency = "add or remove one"
    over = "twice the clip norm" if guarantee == LOCAL else "the clip norm"
    if population is not None:
        require(population >= 1, "--population", "at least 1", population)
        require(delta < 1 / population, "--delta", f"below 1 / {population}, the population", delta)
    lines = [f"{guarantee}-level, delta {delta:g}; noise multipliers are noise over {over}"]
    is_secure = aggregation == "secure"
    _require_both({"--aggregation secure": is_secure, "--clients": clients is not None})
    _require_both({"--sampling cyclic": sampling == "cyclic", "--groups": groups is not None})
    if clients is not None:
        if guarantee == LOCAL or of_examples != (examples is not None):
            raise ValueError("--aggregation secure is for user, or for example with --examples")
        secure = SecureConfig(dropouts, colluding)
        secure.check_fits(clients)
        summed = partial(
            offers.masked_sum, clients, secure, parameters=parameters, examples=examples
        )
        prices = offers.secure_prices(lambda z: summed(z).event_of(), adjacency=adjacency)
        lines += offers.masked_lines(summed(noise or question.answer(prices[0])), clients, secure)
    elif groups is not None and guarantee != USER:
        raise ValueError("--sampling cyclic is for user")
    elif guarantee == LOCAL:
        prices = offers.LOCAL_PRICES
    else:
        prices = []
        if groups is not None:
            prices += offers.turn_prices(groups, adjacency=adjacency)
        if population is not None and cohort is not None:
            prices += _sampled(population, cohort, adjacency, mechanism)
        elif groups is None:
            raise ValueError(f"{guarantee} needs --population and --cohort")
    if of_examples and clients is None:
        holds = (
            "The numbers hold for adding or removing one if --population is "
            "data.public_num_examples"
        )
        lines.append(f"{ZERO_OUT}. {holds}")
    print_table(question.rows(prices))
    print(*lines, *question.running_sums(prices), sep="\n")


def _require_both(given: Mapping[str, bool]) -> None:
    """Raises ValueError if one of two options is given and the other is not."""
    for option, is_given in given.items():
        if not is_given and any(given.values()):
            (other,) = given.keys() - {option}
            raise ValueError(f"{other} needs {option}")


def _sampled(
    population: int, cohort: int, adjacency: str, mechanism: str | None
) -> list[offers.Price]:
    """The prices with sampled cohorts; first that of a mechanism of one's own."""
    prices = offers.sampled_prices(population, cohort, adjacency=adjacency)
    if mechanism is None:
        return prices
    return [offers.own_price(mechanism, population, cohort), *prices]
