"""The moments at which the reply to a message may leave: whole multiples of a public time after it.

What blocks do must not show in the time of a reply. So all of a round has deadlines that were fixed
when its message came. If blocks have not ended in time, noise alone leaves.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

SETTLING_SECONDS = 1.0  # of a reply's time, to draw the noise and build the reply


@dataclass
class ReplySlots:
    """The slots of one reply.

    Attributes:
      started: when the message came, by the monotonic clock.
      seconds: the length of a slot, `GuardPolicy.round_seconds`.
      noise_alone: nothing of the blocks leaves, because they have ended too late.
    """

    started: float
    seconds: float
    noise_alone: bool = False

    def settle(self) -> None:
        """Decides, when all blocks have ended, whether anything of them leaves."""
        self.noise_alone = time.monotonic() > self.started + self.seconds - SETTLING_SECONDS

    def missed(self) -> bool:
        """True if the first slot is over, and a reply with more than noise is not ready."""
        return not self.noise_alone and time.monotonic() > self.started + self.seconds

    def wait(self) -> None:
        """Sleeps until the end of the current slot."""
        slots = max(1, math.ceil((time.monotonic() - self.started) / self.seconds))
        time.sleep(max(0.0, self.started + slots * self.seconds - time.monotonic()))
