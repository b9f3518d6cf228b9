"""The draw of a round's cohort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from discreet.privacy.randomness import RandomSource
from discreet.settings.client_settings import ClientSettings


@dataclass(frozen=True)
class CohortSampling:
    """The sampling of a cohort.

    kind: `poisson`: each member with `probability`, independently; `fixed`: that share of
    `population_size` places without replacement; only connected clients can be asked;
    `everyone`; `cyclic`: `groups` groups in turn. `population_size` is a public constant.
    """

    kind: str
    probability: float
    population_size: int
    groups: int = 1

    @classmethod
    def of(cls, run: ClientSettings) -> CohortSampling:
        """The sampling of a run."""
        user = run.user
        return cls(user.sampling, user.probability, user.population_size, user.groups)

    def draw(self, members: Sequence[int], source: RandomSource, *, number: int = 1) -> list[int]:
        """The cohort of round `number`, from 1 on, of the connected members; may be empty.

        Raises:
          ValueError: more members than `population_size`, so the account would not match the
        run.
        """
        from discreet.privacy.sampling import (
            fixed_size_cohort,
            in_turn,
            poisson_cohort,
        )  # with PyTorch

        if len(members) > self.population_size:
            raise ValueError(
                f"sampling.population_size={self.population_size}, but {len(members)} "
                "clients are connected: delta, the denominator and the privacy "
                "account hold for the declared population only"
            )
        if self.kind in ("everyone", "cyclic"):
            return [member for member in members if in_turn(member, number, groups=self.groups)]
        if self.kind == "poisson":
            return poisson_cohort(members, self.probability, source)
        # Absent clients are drawn too and then missed, so each client's chance stays cohort_size /
        # population_size.
        places = range(self.population_size)
        chosen = fixed_size_cohort(places, round(self.probability * self.population_size), source)
        return [members[place] for place in chosen if place < len(members)]
