"""The nodes that take turns in a run over real nodes, kept in its run folder.

A node's number decides its group (`discreet.privacy.sampling.in_turn`). Flower draws that number
for each key, at each start of a SuperNode that has no key, and for all nodes when the SuperLink has
lost its state. A client with a new number would be in another group, and take part more often than
the account of turns allows. So a node takes part only if it was connected when the first round's
cohort was formed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from discreet.ledger.charges import LedgerError
from discreet.planning.plan import Plan
from discreet.run_files.run_folder import RunFolder, RunSecrets
from discreet.run_files.whole_files import replace_file
from discreet.settings.wording import Key, Wording

logger = logging.getLogger("discreet")

NEW_NUMBERS = Wording(
    "numbers that are new in this run, and take no part: in another group a client could take part "
    "too often. Restart the SuperNode with the key that it had when the run began, or start a new "
    "run (if both charge one ",
    Key("privacy.user.account"),
    ", it adds them up)",
)


@dataclass
class RunMembers:
    """The nodes that take turns in a run, by number.

    Attributes:
      folder: the run folder.
      numbers: the members; empty until the first round's cohort is formed. A run that ended before
        it released anything forms it again.
    """

    folder: RunFolder
    numbers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, plan: Plan, folder: RunFolder) -> RunMembers | None:
        """The members of a new or resumed run; None if there is no group that a client could leave
        for another. LedgerError: their file is damaged."""
        turns = plan.mechanism.participation.turns
        if turns is None or turns.groups == 1:
            return None
        members = cls(folder)
        if members._has_begun and folder.members_path.exists():
            members.numbers = members._read()
        return members

    def among(self, connected: Sequence[int]) -> list[int]:
        """The connected nodes that may take part: all of them until the members are kept.
        LedgerError: the run has begun, and its file of members is missing."""
        if not self.numbers:
            if self._has_begun:
                raise LedgerError(_missing(self.folder))
            return list(connected)
        return [node for node in connected if node in self.numbers]

    def keep(self, nodes: Sequence[int]) -> None:
        """Makes these nodes the members, unless there are some. They are on disk before any of them
        is asked."""
        if self.numbers:
            return
        path = self.folder.members_path
        path.parent.mkdir(exist_ok=True)
        replace_file(path, json.dumps(sorted(nodes)).encode())
        self.numbers = frozenset(nodes)
        logger.info("%d nodes take turns; a node that connects later takes no part", len(nodes))

    @property
    def _has_begun(self) -> bool:
        """True if a round may have been released."""
        secrets = RunSecrets(self.folder.path).path
        return self.folder.checkpoint_path.exists() or secrets.exists()

    def _read(self) -> frozenset[int]:
        path = self.folder.members_path
        try:
            numbers = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise LedgerError(f"{path} is damaged: {error}") from error
        if not isinstance(numbers, list) or not numbers or any(type(n) is not int for n in numbers):
            raise LedgerError(f"{path} is damaged: it must contain a list of numbers of nodes")
        return frozenset(numbers)


def _missing(folder: RunFolder) -> str:
    return (
        f"{folder.members_path} is missing: put back the one that belongs to the checkpoint beside "
        "it. A run that an earlier version began has none: if none of its nodes has had another "
        "number since, write the list of their numbers into it, such as [17, 42]"
    )
