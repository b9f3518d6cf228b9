"""The terms that all who take part in a masked sum agree on, and the errors with which one can end."""

from __future__ import annotations

import re
from dataclasses import asdict, astuple, dataclass, field


class MaskingRefused(Exception):
    """A node does not answer. The message says why; it holds nothing secret and may be sent to the server."""


class Abandoned(Exception):
    """Too few nodes are left, so that nobody can read the sum. The message says at which stage."""


@dataclass(frozen=True)
class Terms:
    """The public constants of a run's masked sums.

    Args:
      run: 32 hexadecimal digits, drawn by the server for one run of its process.
      nodes: n, the number of nodes that take part, from 3 to 100.
      dropouts: d, the number of them that may be gone when a sum is read.
      colluding: c, the number of nodes that may tell the server, or each other, all that they know.
      threshold: t, the number of nodes whose shares open a secret: n + c < 2t, so that two sets of t nodes have an
        honest one in common and the server can't gather shares for two lists of survivors, and t <= n - d.
      bits: k, sums are modulo 2^k, from 16 to 32.
      length: of each vector, at most 2^31.
      variance: of the noise that each node adds in each place, as an integer of at most 2^64; 0 if none. Nodes sign it,
        so that a server can't tell each of them of another noise: a node's account counts on the others' noise too.
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
        self._check("nodes", 3, 100)
        self._check("dropouts", 0, self.nodes - 1)
        self._check("colluding", 0, self.nodes - 1 - self.dropouts)
        self._check("threshold", (self.nodes + self.colluding) // 2 + 1, self.survivors)
        self._check("bits", 16, 32)
        self._check("length", 1, 2**31)
        self._check("variance", 0, 2**64)

    def _check(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} must be an integer from {least} to {most} (got {value!r})")

    @property
    def survivors(self) -> int:
        """n - d: a sum of fewer is never read."""
        return self.nodes - self.dropouts

    @property
    def summands(self) -> int:
        """n - d - c: the least number of honest nodes' vectors in a sum."""
        return self.survivors - self.colluding

    def encode(self) -> bytes:
        """One text for one set of terms."""
        return " ".join(str(value) for value in astuple(self)).encode()

    def difference(self, other: Terms) -> str | None:
        """The first field in which `other` differs, with both values; None if all are equal."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine != theirs:
                return f"{name} is {theirs} in the request and {mine} here"
        return None
