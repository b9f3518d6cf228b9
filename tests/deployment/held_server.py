"""Discreet's ServerApp for a test: it stops at a place between two exchanges of a masked sum that the test names, and
notes whose shares it has taken for which lists.

The file `hold` in the folder HELD_FOLDER names the place: a stage that is not sent any more, or OPENED, after which
nothing is written; `held` says that the server waits there, to be killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from discreet.flower.masked_transport import MaskedTransport
from discreet.flower.serving import serve
from discreet.masking.server import Collected
from discreet.masking.wire import Stage
from discreet.server import session
from strategies.dp_fedavg import dp_fedavg

HELD_FOLDER = "DISCREET_TEST_HELD"
OPENED = "OPENED"
SEED = 40127  # of the untrained model, so that another run begins with the same one


def held_main() -> Callable[..., Any]:
    """The server's own main, of a process that holds where it is told to."""
    folder, send, opened, take = (
        Path(os.environ[HELD_FOLDER]),
        MaskedTransport._send,
        MaskedTransport._open,
        Collected.take,
    )

    def held_send(transport: MaskedTransport, exchange: Any, *args: Any, **kwargs: Any) -> int:
        _wait_if(folder, exchange.stage.name)
        return send(transport, exchange, *args, **kwargs)

    def held_open(transport: MaskedTransport, *args: Any) -> Tensor:
        total = opened(transport, *args)
        _wait_if(folder, OPENED)
        return total

    def noted_take(collected: Collected, name: str, body: bytes) -> None:
        take(collected, name, body)
        if collected.stage is Stage.UNMASK:
            sets = [sorted(collected.alive), sorted(collected.gone)]
            fact = {"run": collected.terms.run, "round": collected.round, "name": name, "sets": sets}
            with (folder / "unmasked").open("a") as file:
                file.write(json.dumps(fact) + "\n")

    session.__dict__["secrets"] = SimpleNamespace(randbits=lambda bits: SEED)
    MaskedTransport._send, MaskedTransport._open = held_send, held_open  # type: ignore[method-assign]
    Collected.take = noted_take  # type: ignore[method-assign]
    return partial(serve, strategy=dp_fedavg)


def _wait_if(folder: Path, place: str) -> None:
    if (folder / "hold").read_text() == place:
        (folder / "held").touch()
        while True:
            time.sleep(60)
