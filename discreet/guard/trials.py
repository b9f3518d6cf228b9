"""`discreet site try`: an app as a whole in a block, on public rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from discreet.guard.block_task import TRIAL
from discreet.guard.guard_policy import ALL_BLOCKS, BlockSettings, GuardPolicy
from discreet.guard.operating import run_in, started, task_of
from discreet.guard.patient_blocks import mock_archive
from discreet.settings.rules import ConfigError

TRIAL_SECONDS = 120.0


def try_app(app: Path, mock: Path, policy: GuardPolicy) -> tuple[str, bool]:
    """The output of an app that runs as a whole in a block, on the public rows in `mock`; and
    whether it ended without an error. ConfigError: `mock` is no folder, or `app` no app."""
    if not mock.is_dir():
        raise ConfigError(f"--mock: {mock} is not a folder")
    try:
        bundle = bundle_of(app)
        config, name, version = described_bundle(bundle)
    except ConfigError:
        raise
    except (ValueError, KeyError, BadZipFile) as error:  # of Flower, in several lines
        raise ConfigError(f"{app} is no Flower app: {' '.join(str(error).split())}") from error
    digest = hashlib.sha256(bundle).hexdigest()
    task = task_of(policy, TRIAL, bundle=bundle, app=(name, version, digest), config=config)
    with started(policy) as sandbox:
        (result,) = run_in(sandbox, task, [mock_archive(mock)])
    return result.log.decode(errors="replace"), bool(result.state)


def bundle_of(app: Path) -> bytes:
    """The bundle of an app: a .fab file, or a folder that is packed as `flwr build` does."""
    from flwr.cli.build import build_fab_from_disk

    if app.is_dir():
        return build_fab_from_disk(app)
    try:
        return app.read_bytes()
    except OSError as error:
        raise ConfigError(f"{app} can't be read: {error.strerror}") from error


def described_bundle(bundle: bytes) -> tuple[dict[str, Any], str, str]:
    """The run configuration of a bundle, its id and its version."""
    from flwr.common.config import flatten_dict, get_fab_config, get_metadata_from_config

    config = get_fab_config(bundle)
    name, version = get_metadata_from_config(config)
    return dict(flatten_dict(config["tool"]["flwr"]["app"].get("config", {}))), name, version


def trial_policy(mock: Path) -> GuardPolicy:
    """A policy for trials without a guard.toml."""
    blocks = BlockSettings(folder=str(mock), id="-", count=2)
    return GuardPolicy(
        ledger="-", blocks=blocks, max_epsilon=1.0, max_delta=1e-5, min_noise_multiplier=1.0,
        block_seconds=TRIAL_SECONDS, any=True, charge=ALL_BLOCKS,
    )  # fmt: skip
