"""DP-SGD inside each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from discreet.mechanisms.mechanism import NOT_COVERED, ONE_PERSON, Statement, shared_examples
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import ADD_OR_REMOVE, EXAMPLE, ZERO_OUT

EXAMPLE_SETTINGS = (
    *("privacy.example.noise_multiplier", "privacy.example.target_epsilon", "privacy.example.clip_norm"),
    "data.public_num_examples",
)


@dataclass(frozen=True)
class LocalDpSgd:
    """One example of one client, from everybody else; nobody but the client itself is trusted."""

    run: ClientSettings
    guarantee: ClassVar[str] = EXAMPLE
    masked: ClassVar[bool] = False
    at_server: ClassVar[bool] = False
    at_client: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    reported: ClassVar[tuple[str, ...]] = ("epsilon_example",)
    deciding: ClassVar[tuple[str, ...]] = EXAMPLE_SETTINGS
    decided: ClassVar[Mapping[str, object]] = {}
    grid_slack: ClassVar[None] = None
    only_rdp: ClassVar[bool] = False

    def statement(self, *, account: bool = False) -> Statement:
        declared, size, asked = self.run.data.public_num_examples, self.run.training.batch_size, self.run.evaluation
        probability, rated, priced = "batch_size / n", "", ""
        uncovered = [
            "the number n of a client's examples, which decides q, the number of steps, and so the epsilon it reports",
            "adding or removing an example: it changes q for all others, and may cost more; see "
            "data.public_num_examples",
        ]
        if declared is not None:
            probability = f"batch_size / public_num_examples = {size} / {declared}"
            where = "as regards runs without data.public_num_examples in the same ledger"
            uncovered = [f"adding or removing an example, {where}"]
        if asked.private:
            rated = (
                f"; the client rates the model every {asked.every} rounds and at the end on the m examples that it "
                f"holds out, with Gaussian noise of standard deviation {asked.noise_multiplier:g} / m on its own "
                "answer, which one example moves by 1 / m"
            )
            priced = (
                f", and for each answer a Gaussian of noise multiplier {asked.noise_multiplier:g}, added up as if "
                "both were about the same examples"
            )
        return Statement(
            unit="one example of one client",
            adjacency=ZERO_OUT if declared is None else ADD_OR_REMOVE,
            trusted="nobody but the client itself",
            observer="everybody else, the server too",
            mechanism=f"DP-SGD inside the client: Poisson batches with q = {probability}, per-example clipping, "
            f"Gaussian noise on the sum{rated}",
            accounting=f"a Poisson-sampled Gaussian a local step{priced}, over every round of every run in the "
            "client's ledger",
            not_covered=(
                *NOT_COVERED,
                *uncovered,
                ONE_PERSON,
                "that a client took part",
                *shared_examples(self.run),
            ),
        )

    @property
    def finite(self) -> tuple[str, ...]:
        return self.reported if self.run.example.noise_multiplier != 0 else ()
