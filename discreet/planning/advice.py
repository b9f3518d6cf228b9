"""Advice on the guarantee that fits a situation: a starting point, the expected noise, and the
expected accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from discreet.accounting.calibration import noise_multiplier_for_epsilon
from discreet.accounting.events import poisson_round_event
from discreet.settings.rules import ConfigError

SERVER = "server"
MOST = "most"
NOBODY = "nobody"
COMMAND = "command"
APP = "app"
LOOP = "loop"
TRUSTED = (SERVER, MOST, NOBODY)
CODE = (COMMAND, APP, LOOP)
EPSILONS = (8.0, 2.0)
PARAMETERS = 50  # of a linear model of a table with some 25 inputs
# the parameters of the model in experiment=table
ROUNDS = 100
PROBABILITY = 0.3
STEPS = 60  # of experiment=heart
FEW_PEOPLE = 100
FEWEST_MASKED = 3
# Noise over clip norm, and the AUC that pooled regression lost with that much noise:
# docs/results/table_choice.csv.
MEASURED = (
    (0.05, "within 0.02 of the AUC without privacy"),
    (0.3, "up to about 0.06 of AUC lost, with a linear model"),
    (1.0, "clearly worse than without privacy; whether it learns at all was not measured"),
)
HOPELESS = "no useful model: the noise is larger than the updates"


@dataclass(frozen=True)
class Situation:
    """The answers to the five questions.

    Attributes:
      clients: the number of people or devices with data of their own, of organisations, or of
        people in one table.
      rows: the number of rows of all clients together.
      rows_a_person: the rows of the person with the most; 1 if each row is a different person.
      trusted: the party that may see the clients' updates: the server; most of the clients (but not
        the server); or nobody.
      code: the training code: Discreet's command, the user's own Flower app, or a PyTorch loop in
        one place.
    """

    clients: int
    rows: int
    rows_a_person: int
    trusted: str
    code: str

    def __post_init__(self) -> None:
        for name in ("clients", "rows", "rows_a_person"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be at least 1 (got {getattr(self, name)})"
                )
        if self.rows < self.clients:
            raise ConfigError(
                "--rows counts the rows of all clients together: at least "
                f"{self.clients} (got {self.rows})"
            )

    @property
    def people_are_clients(self) -> bool:
        """True if there are too many clients to be organisations. Each is then taken for a
        person."""
        return self.clients >= FEW_PEOPLE


def advice(of: Situation) -> Iterator[str]:
    """Lines that say what is protected, where to start, and what noise and accuracy to expect."""
    if of.code == LOOP:
        yield from _loop(of)
    elif of.people_are_clients and of.trusted == SERVER:
        yield from _people(of)
    elif of.people_are_clients:
        yield from _strangers(of)
    else:
        yield from _organisations(of)
    yield (
        "expectations come from synthetic tables at user level (docs/guide/csv.md): "
        "try public or synthetic data first"
    )


def _people(of: Situation) -> Iterator[str]:
    yield "protects: everything about one client (user level); the server must be trusted"
    if of.code == APP:
        yield "start from: DPFedAvg in place of your strategy, docs/guide/flower_app.md"
    else:
        yield (
            f"start from: discreet simulate experiment=table data.num_clients={of.clients} "
            "(docs/guide/csv.md)"
        )
    cohort = PROBABILITY * of.clients
    yield from _noise(
        lambda z: z * math.sqrt(PARAMETERS) / cohort,
        delta=_delta(of.clients),
        steps=(PROBABILITY, ROUNDS),
    )


def _strangers(of: Situation) -> Iterator[str]:
    yield (
        "protects: everything about one client, from everybody (local level); no other "
        "party is trusted"
    )
    if of.code == APP:
        yield "start from: discreet.local_dp_mod in your ClientApp, docs/guide/flower_privacy.md"
    else:
        yield "start from: discreet simulate experiment=gaussian_local"
    root = math.sqrt(of.clients)
    yield from _noise(
        lambda z: 2 * z * math.sqrt(PARAMETERS) / root, delta=_delta(of.clients), steps=(1.0, 20)
    )
    yield (
        "a trusted server, or secure aggregation in groups of at most 100, needs far "
        "less noise for the same epsilon"
    )


def _whole_organisation(clients: int) -> str:
    """The reason against hiding a whole organisation among so few."""
    multiplier = _multiplier(EPSILONS[0], delta=_delta(clients), steps=(1.0, ROUNDS))
    noise = multiplier * math.sqrt(PARAMETERS) / clients
    return (
        f"not user level: to hide a whole organisation among {clients}, a round's noise would be "
        f"{noise:.2g} clip norms at epsilon {EPSILONS[0]:g}, and more with "
        f"more than {PARAMETERS} parameters: only a small model may learn"
    )


def _organisations(of: Situation) -> Iterator[str]:
    masked = of.trusted != NOBODY and of.clients >= FEWEST_MASKED and of.code == COMMAND
    units = of.rows // of.clients
    if of.rows_a_person > 1 and of.code == COMMAND and not masked:
        units = max(1, units // of.rows_a_person)
        yield from _start_for_people(of, units)
        measured = (
            "three hospitals of 299 patients reach an AUC of 0.755 at epsilon 2 (median of 25 "
            "runs, the lowest 0.678), and 0.785 without privacy (experiment=hospitals)"
        )
    else:
        yield from _start_for_rows(of, units, masked)
        measured = (
            "four hospitals of 30 to 199 patients reach 78 % accuracy at epsilon 2, and 79 % "
            "without privacy (experiment=heart)"
        )
    # One step a round over all rows. The mean over K organisations has noise from each, or one
    # shared noise.
    count = of.rows if masked else units * math.sqrt(of.clients)
    yield from _noise(
        lambda z: z * math.sqrt(PARAMETERS) / count, delta=_delta(units), steps=(1.0, STEPS)
    )
    yield _whole_organisation(of.clients)
    yield f"measured: {measured}"


def _counted(clients: int) -> str:
    return f"{clients} organisation{'s' * (clients != 1)}"


def _start_for_people(of: Situation, people: int) -> Iterator[str]:
    yield (
        "protects: one person of one organisation with all rows (example level), "
        f"{_counted(of.clients)} of at least {people} people"
    )
    yield (
        "start from: experiment=hospitals, for a table with a person column in each "
        "organisation, which adds its own noise (docs/guide/csv.md)"
    )


def _start_for_rows(of: Situation, rows: int, masked: bool) -> Iterator[str]:
    yield (
        f"protects: one row of one organisation (example level), {_counted(of.clients)} of "
        f"{rows} rows on average"
    )
    if of.rows_a_person > 1:
        yield (
            f"a person with {of.rows_a_person} rows is NOT protected at that epsilon "
            "unless the unit is a person: privacy.example.unit=owner "
            "(experiment=hospitals), or DPSGD(owners=...)"
        )
    if of.code == APP:
        yield "start from: DPSGD inside your ClientApp, docs/guide/dpsgd.md"
    elif masked:
        yield (
            "start from: experiment=heart_secure: one noise that all clients share; "
            "the server reads only the sum"
        )
    else:
        yield (
            "start from: experiment=heart (a linear model) or silos: each organisation "
            "adds its own noise"
        )


def _loop(of: Situation) -> Iterator[str]:
    yield (
        "protects: one row (zero-out, or add-or-remove with public_num_examples); you "
        "are trusted with all data"
    )
    yield "start from: DPSGD around your loop, docs/guide/dpsgd.md"
    if of.rows_a_person > 1:
        people = of.rows // of.rows_a_person
        yield (
            f"a person with {of.rows_a_person} rows is NOT protected at that epsilon. "
            f"To protect {people} people: DPSGD(owners=...)"
        )
    yield from _noise(
        lambda z: z * math.sqrt(PARAMETERS) / of.rows, delta=_delta(of.rows), steps=(1.0, STEPS)
    )


def _noise(
    ratio: Callable[[float], float], *, delta: float, steps: tuple[float, int]
) -> Iterator[str]:
    for epsilon in EPSILONS:
        expected = ratio(_multiplier(epsilon, delta=delta, steps=steps))
        said = next((words for most, words in MEASURED if expected <= most), HOPELESS)
        yield (
            f"at epsilon {epsilon:g}, delta {delta:g}: noise of {expected:.2g} clip norms on a "
            f"linear model of {PARAMETERS} parameters; expect {said}"
        )


def _multiplier(epsilon: float, *, delta: float, steps: tuple[float, int]) -> float:
    probability, count = steps
    return noise_multiplier_for_epsilon(
        epsilon,
        releases=lambda noise: ((poisson_round_event(probability, noise_multiplier=noise), count),),
        delta=delta,
        accountant="pld",
    )


def _delta(count: int) -> float:
    """A power of ten that is between a tenth and a hundredth of 1 / `units`."""
    return float(10.0 ** -(len(str(max(1, count))) + 1))
