"""Who takes part in a round. What is sampled here is what is accounted: see `guarantees.user_event`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import fixed_size_cohort, poisson_cohort


@dataclass(frozen=True)
class CohortSampling:
    """How a cohort is drawn.

    Attributes:
      kind: `poisson`: each member with `probability`, independently; `fixed`: that share of `population_size` places
        without replacement, of which only the connected ones can be asked; `everyone`.
      probability: of the Poisson cohort.
      population_size: a public constant.
    """

    kind: str
    probability: float
    population_size: int

    def draw(self, members: Sequence[int], source: RandomSource) -> list[int]:
        """A round's cohort of the connected members; may be empty.

        Raises:
          ValueError: more members than `population_size`: what is accounted would not be what runs.
        """
        if len(members) > self.population_size:
            raise ValueError(
                f"sampling.population_size={self.population_size}, but {len(members)} clients are connected: delta, "
                "the denominator and the account are those of the declared population"
            )
        if self.kind == "everyone":
            return list(members)
        if self.kind == "poisson":
            return poisson_cohort(members, self.probability, source)
        # Absent clients are drawn too and then missed: each one's chance stays cohort_size / population_size.
        places = range(self.population_size)
        chosen = fixed_size_cohort(places, round(self.probability * self.population_size), source)
        return [members[place] for place in chosen if place < len(members)]
