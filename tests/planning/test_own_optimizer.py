"""A server optimizer from outside: its numbers and its vectors are kept, by name or in code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file

from discreet import ConfigError, simulate
from discreet.run_files.run_folder import RunFolder
from tests.flower.flower_apps import Nodes, arrays, run, strategy, values_of
from tests.planning.nesterov import Nesterov

NAME = "server.optimizer=tests.planning.nesterov:Nesterov"
SMALL = ("rounds=3", "seed=50077", "data.num_clients=40", "privacy.user.noise_multiplier=2")
NUMBERS = "server.numbers={rate: 0.5, keep: 0.3}"


def model_of(run: Path) -> np.ndarray:
    found = load_file(run / "model.safetensors")
    return np.concatenate([found[name].ravel() for name in sorted(found)])


def test_a_run_steps_by_it_and_goes_on_with_its_vectors(tmp_path: Path) -> None:
    whole = simulate(NAME, NUMBERS, *SMALL, f"output_dir={tmp_path / 'whole'}")
    parts = f"output_dir={tmp_path / 'parts'}"
    simulate(NAME, NUMBERS, *SMALL, "rounds=2", parts)
    state = RunFolder(tmp_path / "parts").load_checkpoint()
    assert state is not None
    assert bool(state.vectors["momentum"].any())
    simulate("resume=true", "rounds=3", parts)
    assert np.array_equal(model_of(whole), model_of(tmp_path / "parts"))

    other = simulate(NAME, *SMALL, f"output_dir={tmp_path / 'other'}")
    assert not np.array_equal(model_of(whole), model_of(other))


def test_without_momentum_it_is_fedavg(tmp_path: Path) -> None:
    plain = simulate(*SMALL, "server.momentum=0", f"output_dir={tmp_path / 'plain'}")
    own = simulate(NAME, "server.numbers={keep: 0.0}", *SMALL, f"output_dir={tmp_path / 'own'}")
    assert np.allclose(model_of(plain), model_of(own), atol=1e-6)


def test_a_strategy_takes_one_and_its_folder_keeps_the_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    own = values_of(run(folder, server_optimizer=Nesterov(rate=0.5), num_rounds=1))
    kept = yaml.safe_load((folder / "config.yaml").read_text())["server"]
    assert kept["optimizer"] == "tests.planning.nesterov:Nesterov"
    assert kept["numbers"] == {"rate": 0.5, "keep": 0.5}
    plain = values_of(run(tmp_path / "plain", num_rounds=1))
    start = {name: array.numpy() for name, array in arrays().items()}
    moved = (own["weight"] - start["weight"]) / (plain["weight"] - start["weight"])
    assert np.allclose(moved, 0.5 * 1.5, atol=1e-3)
    with pytest.raises(ConfigError, match=r"server\.numbers|server_optimizer"):
        strategy(folder, server_optimizer=Nesterov(rate=0.9), resume=True).start(
            Nodes(), arrays(), num_rounds=2
        )


WRONG = {
    "server.optimizer=sgdd": "one of sgd, adam, yogi, or one of your own as package.module:Class",
    f"{NAME} server.learning_rate=0.1": "server.learning_rate must be omitted with",
    "server.numbers={rate:1}": "server.numbers must be omitted with server.optimizer=sgd",
    f"{NAME} server.numbers={{rat:1}}": "server.numbers must be by the names of its fields, rate, ",
    "server.optimizer=tests.planning.nesterov:Change": "must be a dataclass with a method step",
    "server.optimizer=tests.planning.nowhere:X": "server.optimizer",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items())
def test_what_is_none_is_refused(words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(*words.split(), *SMALL, f"output_dir={tmp_path / 'run'}")


def test_a_strategy_refuses_what_no_folder_keeps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server_optimizer\.rate must be"):
        strategy(tmp_path, server_optimizer=Nesterov(rate=torch.ones(2)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="server_optimizer must be a ServerSGD"):
        strategy(tmp_path, server_optimizer="sgd")
