"""Discreet's ServerApp for a test: it stops at a place that the test names, and notes what the test
looks at.

The file `hold` in the folder HELD_FOLDER names the place; `held` says that the server waits there,
to be killed or until `hold` names another. Of a masked sum: a stage that is not sent any more, or
OPENED, after which nothing is written. Of turns: a round that is done.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from discreet.deployment.certificates import make_secrets
from discreet.deployment.local_federation import Federation
from discreet.flower.masked_transport import MaskedTransport
from discreet.flower.serving import serve
from discreet.masking.wire import Stage
from discreet.privacy.sampling import CohortSampling
from discreet.run_files.run_folder import SECRETS, RunFolder
from discreet.server import session
from discreet.server.masking_server import Collected
from strategies.dp_fedavg import dp_fedavg
from tests.conftest import REPOSITORY

HELD_FOLDER = "DISCREET_TEST_HELD"
OPENED = "OPENED"
SEED = 40127  # of the untrained model, so that another run begins with the same one
# rounds of `kept_main` in which the server asks everybody, whose turn it may be or not
EVERYBODY = (
    4,
    5,
)


@contextmanager
def federation_with(
    main: Callable[..., Any], folder: Path, nodes: Sequence[str]
) -> Iterator[Federation]:
    """A federation without nodes yet, whose server's installed code is the checkout's with another
    main: `main()`."""
    installed = folder / "installed" / "server_app"
    installed.mkdir(parents=True)
    for name in ("discreet", "client_app", "strategies", "LICENSE"):
        (installed.parent / name).symlink_to(REPOSITORY / name)
    for name in ("__init__.py", "bundle_entry.py"):
        (installed / name).symlink_to(REPOSITORY / "server_app" / name)
    text = f"from {__name__} import {main.__name__}\n\nmain = {main.__name__}()\n"
    (installed / "server_app.py").write_text(text)
    make_secrets(folder / "secrets", nodes)
    federation = Federation(folder)
    federation.environment["PYTHONPATH"] = os.pathsep.join([str(installed.parent), str(REPOSITORY)])
    federation.environment[HELD_FOLDER] = str(folder)
    try:
        federation.start_superlink()
        federation.start_preforked_clients()
        yield federation
    finally:
        federation.stop()


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
            fact = {
                "run": collected.terms.run,
                "round": collected.round,
                "name": name,
                "sets": sets,
            }
            with (folder / "unmasked").open("a") as file:
                file.write(json.dumps(fact) + "\n")

    session.__dict__["secrets"] = SimpleNamespace(randbits=lambda bits: SEED)
    MaskedTransport._send, MaskedTransport._open = held_send, held_open  # type: ignore[method-assign]
    Collected.take = noted_take  # type: ignore[method-assign]
    return partial(serve, strategy=dp_fedavg)


def kept_main() -> Callable[..., Any]:
    """The server's own main, of a process that keeps the state and the secrets after each round in
    a folder of its number, and asks everybody in the rounds `EVERYBODY`."""
    folder, save, draw = (
        Path(os.environ[HELD_FOLDER]),
        RunFolder.save_checkpoint,
        CohortSampling.draw,
    )

    def kept_save(run: RunFolder, state: Any, *, best: bool = False, **named: Any) -> None:
        save(run, state, best=best, **named)
        copy = RunFolder(folder / "kept" / str(state.round))
        if not copy.path.exists():
            copy.path.mkdir(parents=True)
            save(copy, state)
            if (run.path / SECRETS).exists():
                shutil.copy(run.path / SECRETS, copy.path)
            _wait_if(folder, str(state.round))

    def wide_draw(
        sampling: CohortSampling, members: Sequence[int], source: Any, *, number: int = 1
    ) -> list[int]:
        return (
            list(members) if number in EVERYBODY else draw(sampling, members, source, number=number)
        )

    RunFolder.save_checkpoint, CohortSampling.draw = kept_save, wide_draw  # type: ignore[method-assign, assignment]
    return partial(serve, strategy=dp_fedavg)


def _wait_if(folder: Path, place: str) -> None:
    hold = folder / "hold"
    if hold.read_text() == place:
        (folder / "held").touch()
    while hold.read_text() == place:
        time.sleep(0.2)
