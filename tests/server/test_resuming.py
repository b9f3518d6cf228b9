"""A run goes on with the settings in its folder; little may be changed on top of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from discreet.server.plan import resolve_noise
from discreet.server.resuming import asked_settings
from discreet.server.run_folder import ASKED, RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from tests.command import simulate as simulate_command

STARTED = (
    *("rounds=2", "data.num_clients=20", "model.name=logistic_regression", "training.epochs=1"),
    *("privacy.user.target_epsilon=4", "privacy.user.clip.norm=0.5"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was started with settings of its own, and ended after its first round."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = replace(resolve_noise(load_config(STARTED)), output_dir=str(folder))
    simulate(replace(config, rounds=1))
    RunFolder(folder).write_config(config)
    RunFolder(folder).write_config(load_config(STARTED), name=ASKED)
    return folder


def resumed(folder: Path, *words: str) -> Settings:
    return asked_settings(["resume=true", f"output_dir={folder}", *words])


@pytest.mark.parametrize("words", [(), STARTED, ("privacy.user.target_epsilon=4",)])
def test_a_run_goes_on_with_the_settings_of_its_folder(words: tuple[str, ...], run: Path) -> None:
    before, after = RunFolder(run).read_config(), resumed(run, *words, "rounds=9")
    assert after == replace(before, rounds=9, resume=True)
    assert after.privacy.user.max_epsilon == 4


def test_what_is_no_matter_of_privacy_may_be_changed(run: Path) -> None:
    after = resumed(run, "operations.predictions=true", "server.learning_rate=0.5", "operations={log_format: json}")
    operations = after.operations
    assert (operations.predictions, after.server.learning_rate, operations.log_format) == (True, 0.5, "json")


REFUSED = {
    "privacy.user.noise_multiplier=2": "it has privacy.user.noise_multiplier=",
    "privacy.user.max_epsilon=9": "it has privacy.user.max_epsilon=4",
    "privacy.delta=1e-4": "it has privacy.delta=0.001",
    "model.name=mlp": "it has model.name=logistic_regression",
    "seed=71933": "it has seed=None",
    "privacy.example={enabled: true, noise_multiplier: 1}": "it has privacy.example.enabled=False",
    "experiment=silos": "it has ",
}


@pytest.mark.parametrize(("word", "message"), REFUSED.items())
def test_what_decides_privacy_is_refused_by_the_name_that_was_typed(word: str, message: str, run: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resumed(run, "rounds=9", word)
    assert str(error.value).startswith(f"{word} can't change a run that is resumed: ")
    assert message in str(error.value)


def test_rounds_over_which_clients_spread_a_total_stay(tmp_path: Path) -> None:
    words = ("privacy.user.enabled=false", "privacy.local.kind=gaussian", "privacy.local.epsilon=8", "rounds=4")
    RunFolder(tmp_path).write_config(load_config(words))
    assert resumed(tmp_path, *words).rounds == 4
    with pytest.raises(ConfigError, match=r"rounds=5 can't change .* it has rounds=4\. What may change is device"):
        resumed(tmp_path, "rounds=5")


def test_simulate_goes_on_as_the_readme_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate_command(["resume=true", f"output_dir={run}"]) == 0
    checkpoint = RunFolder(run).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == 2
    assert simulate_command(["resume=true", f"output_dir={run}", "seed=71933"]) == 2
    assert "discreet: seed=71933 can't change a run that is resumed" in capsys.readouterr().err
