"""What secure aggregation costs: the noise that each client adds, the bits that a value takes, and the event."""

from __future__ import annotations

import math
from dataclasses import dataclass

from discreet.privacy.secure_grid import SecureCohort, SecureSum, example_secure_sum, secure_sum
from discreet.secure_settings import SecureConfig


@dataclass(frozen=True)
class SecurePrice:
    """Secure aggregation over so many clients, of a model with so many parameters.

    Attributes:
      clients: n.
      secure: d, c and t.
      parameters: of the model.
      examples: how many a client has at most, at example level; None at user level.

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
        cohort = SecureCohort(self.clients, self.secure.summands(self.clients))
        if self.examples is None:
            return secure_sum(self.parameters, cohort, noise_multiplier=noise_multiplier)
        return example_secure_sum(self.parameters, cohort, noise_multiplier=noise_multiplier, largest_sum=self.examples)

    def lines(self, noise_multiplier: float) -> tuple[str, ...]:
        """What a client adds and sends, in words."""
        found = self.sum(noise_multiplier)
        return (
            f"each of {self.clients} clients adds a discrete Gaussian of standard deviation "
            f"{found.own_noise_stddev:.4g} clip norms ({math.sqrt(found.variance):.6g} of {found.clip_steps} steps); "
            f"that of {found.summands} is accounted",
            f"{found.bits} bits a value, {math.ceil(found.length * found.bits / 8):,} bytes a client and round; "
            f"{self.secure.threshold_of(self.clients)} nodes must agree to open a sum",
        )
