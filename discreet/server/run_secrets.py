"""The secrets of a run that goes on: what a mechanism keeps from round to round, for the server's user alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from discreet.ledger.rollback_guard import LedgerError
from discreet.server.run_folder import replace_file

if TYPE_CHECKING:
    from torch import Tensor

SECRETS = "secrets.safetensors"


@dataclass(frozen=True)
class RunSecrets:
    """`Kept` in a run folder: with it the noise of releases can be taken off. It is removed when the run is over."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / SECRETS

    def load(self) -> Mapping[str, Tensor]:
        """What was saved last; empty before. Raises LedgerError: the file is damaged."""
        if not self.path.exists():
            return {}
        try:
            with safe_open(self.path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise LedgerError(f"{self.path} is damaged: {error}") from error

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the file as a whole, on disk when this returns, with mode 0600 from its first byte."""
        save = import_module("safetensors.torch").save
        replace_file(self.path, save(dict(tensors)), mode=0o600)

    def erase(self) -> None:
        """Removes the file, if there is one."""
        self.path.unlink(missing_ok=True)
