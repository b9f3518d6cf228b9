"""Trainers that lose their process, or the whole machine, while they train a chunk of one round."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from discreet.mechanisms.sums import PartialReply

ROUND = 2


@dataclass(frozen=True)
class Dying:
    """Trains as `trainer` does, and kills its process, or its machine, in round 2: the first time, or `always`.

    A machine is killed while another chunk waits on the head, so that it has work. `folder` gets a file for each chunk
    that was trained and lost, with its sum.
    """

    trainer: Any
    folder: Path
    machine: bool = False
    always: bool = False
    head: str = ""

    @property
    def is_exact(self) -> bool:
        return bool(self.trainer.is_exact)

    def on(self, device: str) -> Dying:
        return replace(self, trainer=self.trainer.on(device))

    def replies(self, params: Tensor, work: Any) -> PartialReply:
        replies: PartialReply = self.trainer.replies(params, work)
        if work.request.round == ROUND:
            if self.machine and ray.get_runtime_context().get_node_id() == self.head:
                while not self.lost():
                    time.sleep(0.1)
            elif self.always or not self.lost():
                self._die(replies)
        return replies

    def lost(self) -> list[list[float]]:
        """The sums that were lost."""
        return [[float(word) for word in file.read_text().split()] for file in sorted(self.folder.glob("*.sum"))]

    def _die(self, replies: PartialReply) -> None:
        draft = self.folder / f"{os.getpid()}.draft"
        draft.write_text(" ".join(map(str, replies.values.tolist())))
        draft.rename(draft.with_suffix(".sum"))
        os.kill(os.getppid() if self.machine else os.getpid(), signal.SIGKILL)
        time.sleep(60)
