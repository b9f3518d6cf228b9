"""What a guarantee says if clients noise masked sums together."""

from __future__ import annotations

from dataclasses import dataclass

from discreet.settings.run_config import RunConfig


@dataclass(frozen=True)
class SecureTerms:
    """What a guarantee says under secure aggregation, of n clients, d lost, c colluding."""

    nodes: int
    dropouts: int
    colluding: int
    summands: int

    @classmethod
    def of(cls, config: RunConfig) -> SecureTerms:
        secure, nodes = config.privacy.secure, config.population_size
        return cls(nodes, secure.dropouts, secure.colluding, secure.summands(nodes))

    def adjacency(self, who: str) -> str:
        return f"zero-out: one {who}'s update counts as zero, and it still takes part and adds its noise"

    @property
    def trusted(self) -> str:
        honest = self.nodes - self.colluding
        return f"not the server: that at least {honest} of the {self.nodes} clients are honest and add their noise"

    @property
    def observer(self) -> str:
        return f"everybody else: the server and up to {self.colluding} of the clients, who know who takes part"

    def mechanism(self, clip: str) -> str:
        return (
            f"DP-FedAvg with {clip}, everybody in every round, on whole numbers; each client adds discrete Gaussian "
            f"noise and masks, of which the server reads the sum alone; up to {self.dropouts} clients may be lost in "
            "a round"
        )

    @property
    def shared_step(self) -> str:
        return (
            "one step a round over all examples of all clients, on whole numbers: each client adds up a clipped "
            "gradient of each of its examples, and adds discrete Gaussian noise and masks; the server reads the sum "
            f"alone; up to {self.dropouts} clients may be lost in a round"
        )

    def accounting(self, joined: str = "") -> str:
        return (
            f"a sum of {self.summands} clients' discrete Gaussians a round, the least that is left of honest ones; "
            f"{joined}not amplified; by RDP"
        )

    @property
    def not_covered(self) -> tuple[str, ...]:
        return (
            "who takes part in a round, and who is lost in it",
            f"more than {self.colluding} clients that tell the server what they know",
            "what a dishonest client sends: nobody sees it, and it can spoil the model",
        )
