"""The moments at which the reply to a message may leave: whole multiples of a public time after it.

What blocks do must show in the time of a reply as little as it can, and never in its content: a
reply whose blocks ended late leaves at the end of a later slot, with the results of all blocks that
gave one in their own time. Noise alone in its place would let one block decide whether all others
count.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplySlots:
    """The slots of one reply.

    Attributes:
      started: when the message came, by the monotonic clock.
      seconds: the length of a slot, `GuardPolicy.round_seconds`.
    """

    started: float
    seconds: float

    def over(self) -> bool:
        """True if the first slot is over: the reply leaves at the end of a later one."""
        return time.monotonic() > self.started + self.seconds

    def wait(self) -> None:
        """Sleeps until the end of the current slot."""
        slots = max(1, math.ceil((time.monotonic() - self.started) / self.seconds))
        time.sleep(max(0.0, self.started + slots * self.seconds - time.monotonic()))
