"""Secure aggregation: of how many nodes it bears the loss, how many may collude, and who can open a sum."""

from __future__ import annotations

from dataclasses import dataclass

from discreet.setting_checks import check, check_value, require, setting
from discreet.value_rules import at_least, one_of, within

PLAIN, SECURE = "plain", "secure"
AGGREGATION = one_of(PLAIN, SECURE)
FEWEST_NODES, MOST_NODES = 3, 100


@dataclass(frozen=True)
class SecureConfig:
    """What a masked sum over n nodes bears, n being `sampling.population_size`.

    Attributes:
      dropouts: d, how many nodes may be lost in a round; with more the round is abandoned before anything is opened.
      colluding: c, how many nodes may tell the server all they know, beside what the server sees itself.
      threshold: t, of how many nodes the shares open a sum; None for the least that is safe, floor((n + c) / 2) + 1.
    """

    dropouts: int = setting(1, at_least(0))
    colluding: int = setting(1, at_least(0))
    threshold: int | None = setting(None, at_least(1))

    def __post_init__(self) -> None:
        check(self, "privacy.secure.")

    def summands(self, nodes: int) -> int:
        """h = n - d - c: the least number of honest nodes whose noise is in a sum that is opened."""
        return nodes - self.dropouts - self.colluding

    def threshold_of(self, nodes: int) -> int:
        """t, see the class."""
        return (nodes + self.colluding) // 2 + 1 if self.threshold is None else self.threshold

    def check_fits(self, nodes: int) -> None:
        """Raises ConfigError unless so many nodes are enough for the settings.

        With 2t > n + c two disjoint sets of t nodes would share more nodes than collude, and an honest node says
        only once who survived: so the server can open one sum a round, and no two. With t <= n - d it can open one
        after all the losses that are allowed for. Both need n > 2d + c.
        """
        check_value(nodes, "sampling.population_size with secure aggregation", within(FEWEST_NODES, MOST_NODES))
        summands, threshold, name = self.summands(nodes), self.threshold_of(nodes), "privacy.secure.threshold"
        rule = f"at most {nodes - 1 - self.colluding} with {nodes} nodes: one honest node at least must be left"
        require(summands >= 1, "privacy.secure.dropouts", rule, self.dropouts)
        least, most = (nodes + self.colluding) // 2 + 1, nodes - self.dropouts
        advice = "" if least <= most else ": it is empty, so take fewer dropouts or colluding, or more nodes"
        require(least <= threshold <= most, name, f"within [{least}, {most}] with {nodes} nodes{advice}", threshold)


@dataclass(frozen=True)
class Sizes:
    """How long the parts of a masked vector are: on them its grid depends, and so, in the last digits, what it costs.

    Attributes:
      num_params: how many parameters are trained.
      answers: how many numbers answer the query that rates a model.
    """

    num_params: int
    answers: int = 1


PLANNED = Sizes(2**14)  # of what is planned before the model is known: its cost is the same to some four digits
