"""The same run without privacy, for comparison: only for data that are public or made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from discreet.data.description import read_description
from discreet.settings.data import FOLDER
from discreet.settings.privacy import ExamplePrivacyConfig, LocalPrivacyConfig, UserPrivacyConfig
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings

ENDING = "-baseline"


def without_privacy(settings: Settings) -> Settings:
    """The settings with every guarantee off, on the same clients, cohorts and seed."""
    user = UserPrivacyConfig(enabled=False, clip=settings.privacy.user.clip)
    privacy = replace(
        settings.privacy,
        user=user,
        example=ExamplePrivacyConfig(),
        local=LocalPrivacyConfig(),
        accountant="pld",
    )
    evaluation = settings.evaluation
    if evaluation.private:
        evaluation = replace(evaluation, kind="none")
    return replace(settings, privacy=privacy, evaluation=evaluation)


def check_public(settings: Settings) -> None:
    """Raises ConfigError unless the data are public: built in, or declared public by their
    description."""
    if settings.data.name != FOLDER or settings.data.path is None:
        return
    if not read_description(Path(settings.data.path).expanduser().resolve()).public:
        raise ConfigError(
            "--baseline trains without privacy, for public or made-up data alone: if these are, "
            "write public = true in data.toml"
        )
