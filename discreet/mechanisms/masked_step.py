"""One step a round over all examples of all clients, who noise it together: secure aggregation at example level."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from discreet.mechanisms.local_dp_sgd import EXAMPLE_SETTINGS
from discreet.mechanisms.masked_gaussian import SECURE_SETTINGS, MaskedSum, masked_statement
from discreet.mechanisms.mechanism import (
    CLIP,
    ONE_PERSON,
    ClientRound,
    Statement,
    Unreachable,
    expected_cohort,
    shared_examples,
)
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import EXAMPLE, PLANNED, ClipConfig, Sizes

if TYPE_CHECKING:
    from torch import Tensor

    from discreet.privacy.randomness import RandomSource
    from discreet.privacy.secure_grid import SecureSum
    from discreet.training.local_training import LocalSettings


@dataclass(frozen=True)
class MaskedStep(MaskedSum):
    """One example of one client, from everybody; the client, and at least n - c clients, are trusted to be honest."""

    run: ClientSettings
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    guarantee: ClassVar[str] = EXAMPLE
    reported: ClassVar[tuple[str, ...]] = ("epsilon_example",)
    deciding: ClassVar[tuple[str, ...]] = (*SECURE_SETTINGS, "training.batch_size", *EXAMPLE_SETTINGS)
    fixed_norm: ClassVar[str] = "privacy.example.clip_norm"

    def statement(self, *, account: bool = False) -> Statement:
        how = (
            "one step a round over all examples of all clients, on whole numbers: each client adds up a clipped "
            "gradient of each of its examples, and adds discrete Gaussian noise and masks; the server reads the sum "
            "alone"
        )
        said = masked_statement(self.run, how)
        earlier = "earlier runs over the same examples, in the server's account: each client's own ledger adds them up"
        uncovered = (*said.not_covered, ONE_PERSON, earlier, *shared_examples(self.run))
        return replace(said, trusted=f"{said.trusted}; and the client itself", not_covered=uncovered)

    def sum(self, noise_multiplier: float) -> SecureSum:
        from discreet.privacy.secure_grid import example_secure_sum

        largest = self.run.training.batch_size
        return example_secure_sum(
            self.sizes.num_params, self.cohort, noise_multiplier=noise_multiplier, largest_sum=largest
        )

    def norm(self, clip_norm: float) -> float:
        """The norm that a step of the sum refers to: no rule moves it."""
        return step_norm(self.run)

    def client_round(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        from discreet.privacy.secure_grid import MOST_GRADIENTS

        most = MOST_GRADIENTS * self.run.training.batch_size
        if num_examples > most:
            raise Unreachable(
                f"this client has more examples than {MOST_GRADIENTS} * training.batch_size={most}, beyond which a "
                "float64 sum of gradients is not bounded"
            )

        def step(*given: Any, settings: LocalSettings, source: RandomSource) -> Tensor:
            from discreet.training.local_training import shared_step

            return shared_step(*given, settings=settings, clip=(self.run.example.clip_norm, source))

        # Its own account is held to budgets where it adds its vector to the sum.
        return ClientRound(self.run.example.noise_multiplier or 0.0, step=step)

    @property
    def averaged(self) -> float:
        """The mean over all examples, by their public number, is at most the clip norm long."""
        return expected_cohort(self.run) * self.run.training.batch_size


def step_norm(run: ClientSettings) -> float:
    """The L2 norm that one example can add to a shared step, which is minus the learning rate times the sum of the
    clipped gradients over `batch_size`."""
    return run.training.learning_rate * run.example.clip_norm / run.training.batch_size
