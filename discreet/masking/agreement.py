"""What all who take part in a masked sum must agree on, and the ways in which one can end."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, field, fields

MOST_NODES = 100
LEAST_BITS, MOST_BITS = 16, 32
MOST_LENGTH = 2**31
MOST_VARIANCE = 2**64


class MaskingRefused(Exception):
    """A node does not answer. The message says why; it holds nothing secret and may be sent to the server."""


class MalformedReply(ValueError):
    """What a node replied is not an answer to what it was asked: it counts as gone."""


class Abandoned(Exception):
    """Too few nodes are left, so that the sum can't be read by anybody. The message says at which stage."""


def default_threshold(nodes: int, colluding: int) -> int:
    """The least t with 2t > n + c: two sets of t nodes then have an honest one in common.

    >>> default_threshold(10, 1), default_threshold(3, 0)
    (6, 2)
    """
    return (nodes + colluding) // 2 + 1


@dataclass(frozen=True)
class Terms:
    """The public constants of a run's masked sums.

    Args:
      run: 32 hexadecimal digits, drawn by the server for one run of its process.
      nodes: n, how many take part, from 3 to 100.
      dropouts: d, how many of them may be gone when a sum is read.
      colluding: c, how many may tell the server, or each other, all that they know.
      threshold: t, how many nodes' shares open a secret: n + c < 2t, so that the server can't gather shares for two
        different lists of survivors, and t <= n - d, so that d may be gone.
      bits: k, sums are modulo 2^k, from 16 to 32.
      length: of each vector.
      variance: of the noise that each node adds in each place, as an integer; 0 if none. Nodes sign it, so that a
        server can't tell each of them of another noise: what a node accounts counts on the others' noise too.
      settings: SHA-256, in hexadecimal digits, of all else of the run that decides a sum; empty if nothing does.

    Raises:
      ValueError: a number is out of its range.
    """

    run: str
    nodes: int
    dropouts: int
    colluding: int
    threshold: int
    bits: int
    length: int
    variance: int = 0
    settings: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", self.run):
            raise ValueError("run must be 32 hexadecimal digits")
        if not re.fullmatch(r"([0-9a-f]{64})?", self.settings):
            raise ValueError("settings must be 64 hexadecimal digits, or empty")
        _check("nodes", self.nodes, 3, MOST_NODES)
        _check("dropouts", self.dropouts, 0, self.nodes - 1)
        _check("colluding", self.colluding, 0, self.nodes - 1 - self.dropouts)
        _check("threshold", self.threshold, default_threshold(self.nodes, self.colluding), self.survivors)
        _check("bits", self.bits, LEAST_BITS, MOST_BITS)
        _check("length", self.length, 1, MOST_LENGTH)
        _check("variance", self.variance, 0, MOST_VARIANCE)

    @property
    def survivors(self) -> int:
        """n - d: a sum of fewer is never read."""
        return self.nodes - self.dropouts

    @property
    def summands(self) -> int:
        """n - d - c: of how many honest nodes' vectors a sum is at least."""
        return self.survivors - self.colluding

    @property
    def mask(self) -> int:
        """2^k - 1."""
        return (1 << self.bits) - 1

    def encode(self) -> bytes:
        """One text for one set of terms."""
        return " ".join(str(value) for value in astuple(self)).encode()

    def difference(self, other: Terms) -> str | None:
        """The first field in which `other` differs, with both values; None if all are equal."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                return f"{each.name} is {theirs} in the request and {mine} here"
        return None


def _check(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most} (got {value!r})")
