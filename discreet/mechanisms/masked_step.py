"""One step a round over all examples of all clients, who noise it together: secure aggregation at example level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.mechanisms.local_dp_sgd import EXAMPLE_SETTINGS
from discreet.mechanisms.masked_gaussian import (
    SECURE_SETTINGS,
    MaskedSum,
    accounting,
    cohort,
    lost,
    not_covered,
    observer,
    resolved,
    threshold,
    trusted,
    unaccounted,
)
from discreet.mechanisms.mechanism import ONE_PERSON, Statement, expected_cohort, shared_examples
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import ADD_OR_REMOVE, EXAMPLE, PLANNED, ClipConfig, Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.privacy.secure_grid import SecureSum


@dataclass(frozen=True)
class MaskedStep:
    """One example of one client, from everybody; the client, and at least n - c clients, are trusted to be honest."""

    run: ClientSettings
    guarantee: ClassVar[str] = EXAMPLE
    masked: ClassVar[bool] = True
    at_server: ClassVar[bool] = True
    at_client: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    reported: ClassVar[tuple[str, ...]] = ("epsilon_example",)
    deciding: ClassVar[tuple[str, ...]] = (*SECURE_SETTINGS, "training.batch_size", *EXAMPLE_SETTINGS)
    grid_slack: ClassVar[None] = None
    only_rdp: ClassVar[bool] = True
    fixed_norm: ClassVar[str] = "privacy.example.clip_norm"

    def statement(self, *, account: bool = False) -> Statement:
        return Statement(
            unit="one example of one client",
            adjacency=ADD_OR_REMOVE,
            trusted=f"{trusted(self.run)}; and the client itself",
            observer=observer(self.run),
            mechanism="one step a round over all examples of all clients, on whole numbers: each client adds up a "
            "clipped gradient of each of its examples, and adds discrete Gaussian noise and masks; the server reads "
            f"the sum alone; {lost(self.run)}",
            accounting=accounting(self.run),
            not_covered=(
                *not_covered(self.run),
                ONE_PERSON,
                "earlier runs over the same examples, in the server's account: each client's own ledger adds them up",
                *shared_examples(self.run),
            ),
        )

    @property
    def finite(self) -> tuple[str, ...]:
        return self.reported if self.run.example.noise_multiplier != 0 else ()

    @property
    def decided(self) -> Mapping[str, object]:
        return threshold(self.run)

    def sum(self, sizes: Sizes, noise_multiplier: float | None = None) -> SecureSum:
        """As `MaskedGaussian.sum`, of clipped gradients."""
        from discreet.privacy.secure_grid import example_secure_sum

        noise = resolved(EXAMPLE, self.run.example.noise_multiplier if noise_multiplier is None else noise_multiplier)
        largest = self.run.training.batch_size
        return example_secure_sum(sizes.num_params, cohort(self.run), noise_multiplier=noise, largest_sum=largest)

    def event(
        self, noise_multiplier: float, *, trains: bool = True, rates: bool = False, sizes: Sizes = PLANNED
    ) -> DpEvent:
        return self.sum(sizes, noise_multiplier).event_of(trains=trains, rates=rates)

    def server_release(self, clip: ClipConfig, sizes: Sizes = PLANNED, *, rates: bool = False) -> MaskedSum:
        vector = self.sum(sizes)
        return MaskedSum(vector, vector.event, step_norm=self.run.step_norm)

    @property
    def noise_in_sum(self) -> float:
        return (self.run.example.noise_multiplier or 0.0) * unaccounted(self.run)

    @property
    def averaged(self) -> float:
        """The mean over all examples, by their public number, is at most the clip norm long."""
        return expected_cohort(self.run) * self.run.training.batch_size
