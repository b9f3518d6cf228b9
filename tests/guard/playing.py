"""A guard's sandbox that a test asks for attacks, line by line: `python -m tests.guard.playing
FOLDER ENCLOSURE`.

It is started without rights. Each line of its input is a JSON object with the attack, and each line
of its output what the blocks gave.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from discreet.guard.guard_policy import GuardPolicy
from discreet.guard.sandbox import BlockInput, Sandbox
from discreet.guard.site_guard import SiteGuard, closed
from tests.guard.made import bundle, context, message, site

# By a key drawn at random: that one of two blocks has none of so many is a chance of 7e-15.
PATIENTS = {f"p{number}": float(number % 5 + 1) for number in range(48)}
SLOT = 8.0  # seconds that a block has, unless another slot is asked for
LIMITS = {"memory-mb": 700, "disk-mb": 64, "processes": 40}


def reached(log: bytes) -> object:
    """What the app printed that it reached."""
    lines = [
        line for line in log.decode(errors="replace").splitlines() if line.startswith("REACHED ")
    ]
    return json.loads(lines[-1].removeprefix("REACHED ")) if lines else None


class Played:
    """A guard, and what an app could find around it: sockets that listen, a file that belongs to
    this user."""

    def __init__(self, folder: Path, enclosure: str) -> None:
        self.folder = folder
        self.app = bundle()
        given: dict[str, Any] = {"enclosure": enclosure, "limits": LIMITS, "block_seconds": SLOT}
        if enclosure != "kernel":
            given |= {"any": False, "apps": [self.app.digest]}
        policy = site(folder, PATIENTS, **given)
        self.guard = SiteGuard(policy, sandbox=Sandbox(policy))
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(folder / "socket"))
        self.unix.listen()
        self.datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagram.bind(str(folder / "socket.dgram"))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0guard-test-{os.getpid()}")
        self.abstract.listen()
        for name in ("shared", "peers.json", "a.guard.key"):
            (folder / name).write_text("mine")
        os.utime(folder / "shared", (1e9, 1e9 + 5))

    @property
    def policy(self) -> GuardPolicy:
        return self.guard.policy

    def give(self, seconds: float, *, at_once: int) -> None:
        """From now on a block has so many seconds, and so many blocks run at once."""
        self.guard.policy = replace(self.policy, block_seconds=seconds)
        self.guard.sandbox.policy = replace(self.policy, at_once=at_once)

    def asked(self, attack: str, target: str = "") -> Any:
        """The context of a run with an attack, by default on no patient."""
        return context(
            attack=attack,
            target=target,
            port=self.tcp.getsockname()[1],
            socket=str(self.folder / "socket"),
            site=str(self.folder / "site"),
            shared=str(self.folder / "shared"),
            guard=os.getpid(),
            enclosure=self.policy.enclosure,
        )

    def run(self, attack: str, blocks: list[int], kind: str, *, target: str) -> dict[str, object]:
        """What the blocks give for an attack, one after the other."""
        asked, given = self.asked(attack, target), message(kind=kind)
        work = self.guard._work(given, asked)
        task = self.guard._task(given, asked, self.app, work=work)
        started, found, states = time.monotonic(), [], getattr(self, "states", {})
        archives = [os.open(self.guard.blocks[number], os.O_RDONLY) for number in blocks]
        inputs = [
            BlockInput(number, archive, states.get(number, b""))
            for number, archive in zip(blocks, archives, strict=True)
        ]
        with closed(self.policy):
            for result in self.guard.sandbox.run(task, inputs):
                vector = None if result.vector is None else [float(each) for each in result.vector]
                self.states = states = {**states, result.number: result.state}
                found.append(
                    {
                        "vector": vector,
                        "reached": reached(result.log),
                        "log": result.log.decode(errors="replace")[-3000:],
                        "printed": len(result.log),
                        "state": len(result.state),
                    }
                )
        return {"blocks": found, "seconds": time.monotonic() - started}

    def answer(self, attack: str, kind: str) -> dict[str, object]:
        """What leaves for an attack."""
        started = time.monotonic()
        content = self.guard.answer(message(kind=kind), self.asked(attack), self.app).content
        values = {
            name: {
                key: np.asarray(each.numpy()).tolist() if hasattr(each, "numpy") else each
                for key, each in record.items()
            }
            for name, record in content.items()
        }
        return {"content": values, "seconds": time.monotonic() - started}


def left_over() -> list[int]:
    """The processes of this user, on the whole machine, with the name that the daemon of the
    hostile app has."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (entry / "status").read_text()
            if status.startswith("Name:\tleftover\n") and f"\nUid:\t{os.getuid()}\t" in status:
                found.append(int(entry.name))
    return found


def main(folder: Path, enclosure: str) -> int:
    played = Played(folder, enclosure)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        kind = asked.get("kind", "train")
        blocks = asked.get("blocks", [0])
        at_once = len(blocks) if asked.get("side_by_side") else 1
        played.give(asked.get("slot", SLOT), at_once=at_once)
        try:
            if asked.get("answer"):
                said = played.answer(asked["attack"], kind)
            else:
                said = played.run(asked["attack"], blocks, kind, target=asked.get("target", ""))
            said["left over"] = left_over()
        except Exception as error:  # noqa: BLE001  (the test that asked for it says so)
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said, default=str), flush=True)
    played.guard.sandbox.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2]))
