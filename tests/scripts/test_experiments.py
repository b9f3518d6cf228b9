"""Every file under conf/experiment, run in small by the command that its page names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from discreet.reporting.records import find_runs
from discreet.run_files.compose import load_config
from discreet.run_files.places import conf_folder
from discreet.run_files.run_folder import RunFolder
from discreet.settings.settings import described
from tests.command import simulate as main
from tests.data.test_images import write_cifar, write_femnist, write_mnist
from tests.data.test_tokens import write_play
from tests.tables.made_tables import make_project

# (what makes it small, the guarantees that it gives)
ALONE = {
    "adam_server": (["data.num_clients=40"], {"user"}),
    "adaptive_clipping": (["data.num_clients=40"], {"user"}),
    "both": (["data.num_clients=20"], {"user", "example"}),
    "deployment": ([], {"example"}),
    "dp_fedavg_client_side": (["data.num_clients=20"], {"local"}),
    "fixed_clipping": (["data.num_clients=40"], {"user"}),
    "gaussian_local": (["data.num_clients=10"], {"local"}),
    "homo_lr_dpsgd": ([], {"example"}),
    "laplace_local": ([], {"local"}),
    "multilabel": ([], {"user"}),
    "organisations": ([], {"user"}),
    "private_evaluation": ([], {"user"}),
    "regression": ([], {"example"}),
    "silos": ([], {"example"}),
}
FEW_OF_MNIST = ["data.num_clients=600", "sampling.kind=poisson", "sampling.probability=0.01"]
ON_MNIST = {
    "mnist_one_silo": (FEW_OF_MNIST, {"example"}),
    "mnist_one_silo_scattering": (FEW_OF_MNIST, {"example"}),
    "mnist_ten_silos": (FEW_OF_MNIST, {"example"}),
    "mnist_ten_silos_secure": (
        [
            "data.num_clients=4",
            "data.partition=sampled",
            "data.examples_per_client=20",
            "engine=sequential",
        ],
        {"example"},
    ),
    "mnist_tff": (["sampling.probability=0.002", "privacy.user.clip.count_stddev=2"], {"user"}),
    "mnist_tff_cyclic": (["sampling.groups=400", "privacy.user.target_epsilon=50"], {"user"}),
    "mnist_users_cyclic": (["sampling.groups=400", "privacy.user.target_epsilon=50"], {"user"}),
    "mnist_users": (["sampling.probability=0.002"], {"user"}),
    "mnist_users_scattering": (["sampling.probability=0.002"], {"user"}),
}
ON_TWEETS = {
    "tweets_lora": (["training.batch_size=100"], {"example"}),
    "tweets_one_silo": (["training.batch_size=200"], {"example"}),
    "tweets_ten_silos_secure": (["training.batch_size=20", "data.num_clients=4"], {"example"}),
    "tweets_users": (["data.num_clients=30"], {"user"}),
}
TABLES = ("table", "table_once")
ON_HEART = {"guarded": {"user"}, "heart": {"example"}, "heart_secure": {"example"}}
# (what makes it small, the number of runs)
SWEEPS = {
    "adaptive_clipping_sweep": (["data.num_clients=40"], 11),
    "dp_fedavg_client_side_sweep": (["data.num_clients=20"], 6),
    "gaussian_local_sweep": (["data.num_clients=10"], 12),
    "laplace_local_sweep": ([], 24),
}


def run(*words: str) -> None:
    main([*words, "seed=6011"])


def check(folder: Path, guarantees: set[str]) -> None:
    rows = RunFolder(folder).read_metrics()
    facts = json.loads((folder / "privacy.json").read_text())
    assert [row["round"] for row in rows] == [1.0]
    rated = "loss" if RunFolder(folder).read_config().evaluation.kind == "public" else "accuracy"
    assert math.isfinite(rows[0][rated] or math.nan)
    assert {each["name"] for each in facts["guarantees"] if each["enabled"]} == guarantees


def test_every_experiment_is_here() -> None:
    there = {path.stem for path in (conf_folder() / "experiment").glob("*.yaml")}
    assert there == {
        *ALONE,
        *ON_MNIST,
        *ON_HEART,
        *ON_TWEETS,
        *SWEEPS,
        "hospitals",
        "hospitals_secure",
        "hospitals_once",
        *TABLES,
    }


@pytest.mark.parametrize("name", ALONE)
def test_an_experiment_runs_by_one_command(name: str, tmp_path: Path) -> None:
    small, guarantees = ALONE[name]
    run(f"experiment={name}", "rounds=1", f"output_dir={tmp_path / 'run'}", *small)
    check(tmp_path / "run", guarantees)


@pytest.mark.parametrize("name", ["default", *ALONE])
def test_a_configuration_is_written_for_users_as_in_tests(
    name: str, written_by_omegaconf: Callable[[object], str]
) -> None:
    settings = described(load_config([] if name == "default" else [f"experiment={name}"]))
    assert OmegaConf.to_yaml(settings) == written_by_omegaconf(settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_MNIST)
def test_an_experiment_on_mnist_runs_by_one_command(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    small, guarantees = ON_MNIST[name]
    where = [f"data.path={shared_data / 'mnist'}", f"output_dir={tmp_path / 'run'}"]
    run(f"experiment={name}", "rounds=1", *where, *small)
    check(tmp_path / "run", guarantees)


@pytest.mark.parametrize("name", ON_HEART)
def test_an_experiment_on_the_hospitals_runs_by_one_command(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    run(
        f"experiment={name}",
        "rounds=1",
        f"data.path={shared_data / 'heart'}",
        f"output_dir={tmp_path / 'run'}",
    )
    check(tmp_path / "run", ON_HEART[name])


@pytest.mark.parametrize("name", TABLES)
def test_the_experiment_on_a_table_runs_by_one_command(name: str, tmp_path: Path) -> None:
    where = [f"data.path={make_project(tmp_path, people=30)}", f"output_dir={tmp_path / 'run'}"]
    run(f"experiment={name}", "rounds=1", "data.num_clients=30", *where)
    check(tmp_path / "run", {"user"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWEETS)
def test_an_experiment_on_tweets_runs_by_one_command(
    name: str, fetched_texts: Path, tmp_path: Path
) -> None:
    described = (fetched_texts / "tweets" / "data.toml").read_text()
    (tmp_path / "data.toml").write_text(
        described.replace("hf:../minilm", f"hf:{fetched_texts / 'minilm'}")
    )
    for part in ("train", "test"):
        lines = (fetched_texts / "tweets" / f"{part}.csv").read_text().splitlines()
        (tmp_path / f"{part}.csv").write_text("\n".join(lines[:301]))
    where = [
        f"data.path={tmp_path}",
        f"model.name=hf:{fetched_texts / 'minilm'}",
        f"output_dir={tmp_path / 'run'}",
    ]
    small, guarantees = ON_TWEETS[name]
    run(f"experiment={name}", "rounds=1", *where, *small)
    check(tmp_path / "run", guarantees)


SPEECH = "Good morrow to you all, and to all a good night."
SAID = [(name, SPEECH) for name in ("ANNA", "BEN", "CLARA") for _ in "12345"]
# (what writes local files, the name in data.path, the settings)
LOCAL_FILES = {
    "mnist": (write_mnist, ".", ["model.name=cnn", "data.num_clients=3"]),
    "fashion_mnist": (write_mnist, ".", ["model.name=mlp", "data.num_clients=3"]),
    "femnist": (
        write_femnist,
        "a.npz",
        ["model.name=cnn", "data.partition=natural", "data.num_clients=18"],
    ),
    "cifar10": (write_cifar, ".", ["model.name=cnn", "data.num_clients=2"]),
    "shakespeare": (
        lambda path: write_play(path, SAID),
        "play.txt",
        ["model.name=lstm", "data.partition=natural", "data.num_clients=3"],
    ),
}


@pytest.mark.parametrize("name", LOCAL_FILES)
def test_a_data_set_is_learned_from_local_files(name: str, tmp_path: Path) -> None:
    write, file, settings = LOCAL_FILES[name]
    write(tmp_path / file)  # type: ignore[operator]
    few = [
        "rounds=1",
        "training.epochs=1",
        "sampling.kind=everyone",
        f"output_dir={tmp_path / 'run'}",
    ]
    run(f"data.name={name}", f"data.path={tmp_path / file}", *settings, *few)
    check(tmp_path / "run", {"user"})


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_runs_by_one_command(name: str, tmp_path: Path) -> None:
    small, count = SWEEPS[name]
    run(f"experiment={name}", "rounds=1", f"hydra.sweep.dir={tmp_path}", *small)
    assert len(find_runs([tmp_path])) == count
