"""What is wrong with a configuration is one line that names the setting; where conf/ is found, and
what secure aggregation asks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import discreet
from discreet.planning.plan import planned
from discreet.planning.server_optimizer import ServerSGD
from discreet.protocol.messages import TrainRequest, request_items, request_of
from discreet.run_files import compose
from discreet.run_files.call import Call
from discreet.run_files.compose import load_asked, load_config, parse_asked
from discreet.run_files.places import app_folder, conf_folder, own_files
from discreet.run_files.run_folder import RunFolder
from discreet.settings.other_names import ALIASES
from discreet.settings.privacy import SecureConfig
from discreet.settings.rules import MOST_LISTED, ConfigError, rules
from discreet.settings.settings import Settings, client_settings
from tests.command import simulate as simulate_command
from tests.fixtures import Compose

STEP = (
    "privacy.user.enabled=false training.epochs=1 privacy.local.kind=laplace_step "
    "privacy.local.epsilon=1"
)
WRONG = {
    "privacy.dleta=1e-3": "unknown setting privacy.dleta; did you mean privacy.delta?",
    "rounds=true": "rounds must be a whole number, within [1, 100000] (got True)",
    "seed=18446744073709551616": "seed must be within [0, 2^64 - 1] (got 1844",
    "seed=-1": "seed must be within [0, 2^64 - 1] (got -1)",
    "rounds=many": "rounds must be a whole number, within [1, 100000] (got many)",
    "data=3": "data must be a group of settings (got 3); did you mean data.name?",
    "device=tpu": "device must be cpu, cuda or cuda:NUMBER (got tpu)",
    "output_dir=": "output_dir must be a folder (got '')",
    "privacy.secure.dropouts=2": "privacy.secure.dropouts must be omitted without "
    "privacy.user.aggregation=secure or privacy.example.aggregation=secure (got 2)",
    "privacy.local.schedule=[1,-1]": "privacy.local.schedule must be uniform, geometric, or a "
    "list of numbers within",
    "normaliser.means=[one]": "normaliser.means must be a list of numbers within",
    "data={partition:sampled,examples_per_client:0}": "data.examples_per_client must be",
    "data.partition=sampled": "data.examples_per_client must be given with data.partition=sampled",
    "data.examples_per_client=3": "data.partition must be sampled with data.examples_per_client "
    "(got iid)",
    "sampling.probability=0": "sampling.probability must be within (0, 1]",
    "sampling.population_size=199": "sampling.population_size must be at least data.num_clients = "
    "200",
    "privacy.delta=0.005": "privacy.delta must be below 1 / population_size = 0.005, for instance "
    "0.001 (got 0.005)",
    "data.num_clients=1000": "privacy.delta must be below 1 / population_size = 0.001, for "
    "instance 0.0001 (got 0.001)",
    "training.dropout=0.5": "unknown setting training.dropout; there are training.batch_size, "
    "training.epochs, ",
    "training={optimizer:adamw,momentum:0.9}": "training.momentum must be 0 with "
    "training.optimizer=adamw (got 0.9)",
    "privacy.user.target_epsilon=null": "privacy.user.target_epsilon are both missing",
    "privacy.example.enabled=true": "privacy.example.target_epsilon are both missing",
    f"{STEP} training.epochs=2": "training.epochs must be 1 with privacy.local.kind=laplace_step: "
    "its sensitivity",
    f"{STEP} training.optimizer=adam": "training.optimizer must be sgd with "
    "privacy.local.kind=laplace_step: a plain",
    f"{STEP} training.weight_decay=0.1": "training.weight_decay must be 0 with "
    "privacy.local.kind=laplace_step",
    "privacy.local.kind=gaussian privacy.local.epsilon=1": "privacy.user.enabled must be false with "
    "privacy.local.kind=gaussian",
    "privacy.local.kind=gaussian": "both missing with privacy.local.kind=gaussian: give one, for "
    "instance",
    "experiment=silo": "there is no experiment=silo; did you mean silos? There are adam_server, ",
    "experiment=adaptive_clipping_sweep": "experiment=adaptive_clipping_sweep is a sweep",
    "rounds=2,3": "--multirun rounds=2,3 makes",
    "rounds = 2": "write no spaces around =",
    "privacy.user.target_epsilon=3,5": "If a decimal number is meant, write 3.5",
    "privacy.user.clip.norm=1,2,": "privacy.user.clip.norm=1,2, can't be read",
    "output_dir=out/lr=0.1": "output_dir=out/lr=0.1 can't be read",
    "model.freeze=layer": "model.freeze must be a list (got layer)",
    "server.numbers=3": "server.numbers must be numbers by name (got 3)",
    "experiment=default": "there is no experiment=default: omit experiment",
    "server.beta_1=0.5": "server.beta_1 must be omitted with server.optimizer=sgd (got 0.5)",
    "rounds=100001": "rounds must be within [1, 100000] (got 100001)",
    "data.num_clients=2000000000": "data.num_clients must be within [1, 1e+09]",
    "sampling.kind=cyclic sampling.groups=10 privacy.user.clip.kind=fixed rounds=10001": "rounds "
    "must be at most 10000: ",
    "rounds='5'": "rounds must be a whole number, within [1, 100000] (got the text '5')",
}

HABITS = {  # what people type, and the setting that a user-level run means
    **dict.fromkeys(
        ["epsilon", "eps", "target_epsilon", "privacy.epsilon"], "privacy.user.target_epsilon"
    ),
    **dict.fromkeys(["noise", "sigma", "noise_multiplier"], "privacy.user.noise_multiplier"),
    **dict.fromkeys(["clip", "clip_norm", "max_grad_norm"], "privacy.user.clip.norm"),
    **dict.fromkeys(["clients", "num_clients", "nodes"], "data.num_clients"),
    **dict.fromkeys(["batch_size", "batch"], "training.batch_size"),
    **dict.fromkeys(["lr", "learning_rate", "training.lr"], "training.learning_rate"),
    **dict.fromkeys(["num_rounds", "server_rounds"], "rounds"),
    **dict.fromkeys(["fraction_fit", "q", "sampling_rate"], "sampling.probability"),
    "delta": "privacy.delta",
    "epochs": "training.epochs",
    "dataset": "data.name",
    "alpha": "data.alpha",
    "server.lr": "server.learning_rate",
    "momentum": "server.momentum",
    "output": "output_dir",
    "privacy.example.epsilon": "privacy.example.target_epsilon",
    "privacy.local.noise": "privacy.local.noise_multiplier",
}


@pytest.mark.parametrize(("typed", "meant"), HABITS.items())
def test_a_name_typed_from_habit_is_told_the_setting_of_a_user_level_run(
    typed: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([f"{typed}=3"])
    assert str(error.value) == f"unknown setting {typed}; did you mean {meant}?"


def test_a_name_that_is_like_no_setting_is_told_none() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["processes=0"])
    assert str(error.value) == "unknown setting processes"


def test_every_alias_means_a_setting_and_is_none_itself() -> None:
    known = {name for name, _ in (*rules(Settings), *rules(Call))}
    assert set(ALIASES.values()) <= known
    assert not known & ALIASES.keys()


@pytest.mark.parametrize(
    "guarantee", ["user.enabled=true", "local.kind=gaussian", "local.kind=laplace"]
)
def test_delta_is_held_below_one_in_all_clients_that_there_are(guarantee: str) -> None:
    # A small population_size would let a delta pass at which ten of two hundred clients may be
    # published whole.
    off = [
        "privacy.user.enabled=false",
        "privacy.user.target_epsilon=8",
        "privacy.local.noise_multiplier=2",
    ]
    words = [*off, f"privacy.{guarantee}", "privacy.delta=0.05"]
    with pytest.raises(
        ConfigError, match=r"privacy\.delta must be below 1 / population_size = 0\.005"
    ):
        load_config(words)
    with pytest.raises(ConfigError, match=r"population_size .*data\.num_clients = 200"):
        load_config([*words, "sampling.population_size=10"])


@pytest.mark.parametrize(("override", "message"), WRONG.items())
def test_a_wrong_setting_is_named_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(override.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


MISTAKES = {
    "rounds=0 seed=-1 data.alpha=x privacy.delta=2": [
        "rounds must be within [1, 100000]",
        "seed must be within [0, 2^64 - 1]",
        "data.alpha must be a number",
        "privacy.delta must be within (0, 1)",
    ],
    "experiment=hospitals_secure sampling.kind=poisson training.epochs=3 data.num_clients=2": [
        "sampling.kind must be everyone",
        "training.epochs must be 1",
        "sampling.population_size must be within [3, 100]",
    ],
    "privacy.secure.dropouts=2 privacy.secure.colluding=2": [
        "privacy.secure.dropouts must be omitted",
        "privacy.secure.colluding must be omitted",
    ],
}


@pytest.mark.parametrize(("overrides", "mistakes"), MISTAKES.items())
def test_all_mistakes_are_told_at_once_a_line_each(overrides: str, mistakes: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides.split())
    lines = str(error.value).split("\n")
    assert [line.strip()[: len(said)] for line, said in zip(lines, mistakes, strict=True)] == (
        mistakes
    )


@pytest.mark.parametrize("path", ["~/größe", "~/runs", "~/日本"])
def test_a_path_beyond_ascii_or_under_home_is_read_as_it_is_typed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    small = ("data.num_clients=20", "privacy.user.noise_multiplier=1", f"output_dir={path}")
    assert simulate_command([*small, "rounds=1"]) == 0
    assert simulate_command(["resume=true", f"output_dir={path}", "rounds=2"]) == 0
    assert len(RunFolder(Path(path).expanduser()).read_metrics()) == 2


def test_settings_in_a_list_are_refused_with_how_they_are_given() -> None:
    with pytest.raises(TypeError, match=r"simulate takes each setting as a text"):
        discreet.simulate(["rounds=3"])


def test_a_wrong_value_that_was_given_by_its_position_is_named_too() -> None:
    with pytest.raises(
        ConfigError, match=r"server_optimizer\.learning_rate must be within .* \(got -1\.0\)"
    ):
        ServerSGD(-1.0)


@pytest.mark.parametrize(
    "words",
    [
        ("rounds=3", "rounds=7"),
        ("experiment=mnist_users", "privacy.delta=1e-6", "rounds=7"),
        ("rounds=7", "experiment=mnist_one_silo"),
        ("training={epochs:2}", "output_dir=~/größe", "rounds=7"),
    ],
    ids=" ".join,
)
def test_each_word_counts_and_the_last_one_most_for_users_as_in_tests(
    words: tuple[str, ...], composed_by_hydra: Compose
) -> None:
    settings, is_sweep = composed_by_hydra(words)
    assert (settings, is_sweep) == compose.composed(words)
    assert settings.rounds == 7


def test_a_given_noise_multiplier_takes_the_place_of_the_default_target() -> None:
    user = load_config(["privacy.user.noise_multiplier=0.8"]).privacy.user
    assert (user.noise_multiplier, user.target_epsilon) == (0.8, None)


@pytest.mark.parametrize("declared", [7, 1000])
def test_a_declared_number_of_examples_goes_with_batch_size_and_delta(declared: int) -> None:
    words = [
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=1",
        "data.public_num_examples=",
    ]
    with pytest.raises(
        ConfigError, match=r"and below 1 / privacy.delta: within \[8, 1000\)"
    ) as error:
        load_config([*words[:2], f"{words[2]}{declared}"])
    assert str(error.value).startswith(
        "data.public_num_examples must be at least training.batch_size"
    )
    assert load_config([*words[:2], f"{words[2]}999"]).data.public_num_examples == 999


def comments() -> dict[str, str]:
    """What conf/config.yaml says of each setting, by its full dotted name."""
    found: dict[str, str] = {}
    sections: list[str] = []
    for line in (
        (conf_folder() / "config.yaml")
        .read_text()
        .split("experiment: null\n")[1]
        .split("\nhydra:")[0]
        .splitlines()
    ):
        setting = re.match(r"( *)(\w*):?(.*)", line)
        indent, key, rest = setting.groups()
        if key and not rest.split("#")[0].strip():
            sections = [*sections[: len(indent) // 2], key]
        elif key:
            name = ".".join([*sections[: len(indent) // 2], key])
            found[name] = line.partition("#")[2]
        elif line.strip():
            found[name] += line.partition("#")[2]
    return found


def test_the_yaml_tree_holds_every_setting_and_no_other() -> None:
    assert sorted(comments()) == sorted(name for name, _ in (*rules(Settings), *rules(Call)))


@pytest.mark.parametrize("name", [name for name, rule in rules(Settings) if rule is not None])
def test_the_yaml_tree_says_the_range_of_every_setting(name: str) -> None:
    rule = dict(rules(Settings))[name]
    assert all(word in comments()[name] for word in rule.names or [rule.words])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rounds", "privacy", "user", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(["rounds", "seed", "data", "privacy", "sampling", "other"]),
        JSON,
        max_size=4,
    )
)
def test_whatever_is_parsed_either_is_a_configuration_or_a_config_error(
    tree: dict[str, object],
) -> None:
    try:
        outcome = repr(parse_asked(tree))
    except ConfigError as error:
        outcome = str(error)
    first, *others = outcome.split("\n")
    assert not first.startswith(" ")
    assert all(line.startswith("  ") for line in others)
    assert len(others) < MOST_LISTED


@pytest.mark.parametrize("entry", ["simulate", "run"])
def test_every_entry_point_says_one_line_and_ends_with_code_2(entry: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "discreet",
        entry,
        "privacy.delta=1",
        f"output_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "discreet: privacy.delta must be within (0, 1) (got 1)"
    assert not (tmp_path / "run").exists()


ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose conf/ differs from Discreet's own in the number of rounds."""
    (tmp_path / "project" / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text("[tool.discreet]\n")
    text = (ROOT / "conf" / "config.yaml").read_text()
    (tmp_path / "project" / "conf" / "config.yaml").write_text(
        text.replace("rounds: 30 ", "rounds: 17 ")
    )
    return tmp_path / "project"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as a wheel installs it, as far as places are concerned."""
    (tmp_path / "site-packages" / "discreet" / "app" / "conf").mkdir(parents=True)
    return tmp_path / "site-packages" / "discreet"


def test_a_project_has_its_own_conf_wherever_discreet_lies(
    project: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert load_config().rounds == 17
    assert conf_folder(installed) == project / "conf"
    assert app_folder(installed) == app_folder() == project


def test_elsewhere_conf_is_that_of_the_checkout_or_what_the_wheel_brought(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (conf_folder(), app_folder()) == (ROOT / "conf", ROOT)
    assert conf_folder(installed) == installed / "app" / "conf"
    assert own_files(installed) == installed / "app"
    with pytest.raises(
        ConfigError,
        match=r"is not a project: ",
    ):
        app_folder(installed)


def test_a_project_uses_discreets_experiments_unless_it_has_its_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["silos", "organisations", "laplace_local_sweep"]
    elsewhere = [load_asked([f"experiment={name}"], of_sweep=True) for name in names]
    monkeypatch.chdir(project)
    assert [load_asked([f"experiment={name}"], of_sweep=True) for name in names] == elsewhere
    # as a ServerApp composes
    assert load_config(["experiment=silos"], conf=project / "conf").rounds == 30
    (project / "conf" / "experiment" / "silos.yaml").write_text(
        "# @package _global_\ndata: {num_clients: 11}\n"
    )
    own = load_config(["experiment=silos"])
    assert (own.rounds, own.data.num_clients) == (17, 11)


def test_a_project_of_an_older_version_gets_the_defaults_of_settings_that_it_lacks(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "conf" / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    old = [line for line in lines if not line.lstrip().startswith(("weight_decay:", "alpha:"))]
    assert len(old) < len(lines)
    path.write_text("".join(old))
    (project / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntraining: {weight_decay: 0.2}\n"
    )
    monkeypatch.chdir(project)
    assert load_config().rounds == 17
    assert load_config(["training.weight_decay=0.1"]).training.weight_decay == 0.1
    assert load_config(["experiment=mine"]).training.weight_decay == 0.2
    assert load_config(["experiment=silos"]).rounds == 30
    with pytest.raises(ConfigError, match=r"unknown setting training\.weight_deca; did you mean"):
        load_config(["training.weight_deca=0.1"])


SECURE = (
    "privacy.user.aggregation=secure",
    "sampling.kind=everyone",
    "privacy.accountant=rdp",
    "data.num_clients=20",
    "privacy.user.noise_multiplier=1",
    "privacy.secure.dropouts=2",
)

REFUSED = {
    "sampling.kind must be everyone": ["sampling.kind=poisson"],
    "privacy.accountant must be rdp": ["privacy.accountant=pld"],
    "privacy.noise must be grid": ["privacy.noise=float"],
    "data.normalise=private needs privacy.user.aggregation=plain": ["data.normalise=private"],
    "sampling.population_size must be within .3, 100. .* data.num_clients": ["data.num_clients=2"],
    "privacy.secure.dropouts must be at most 18": ["privacy.secure.dropouts=19"],
    "privacy.secure.threshold must be within .11, 18.": ["privacy.secure.threshold=10"],
    "this range is empty": ["privacy.secure.dropouts=10"],
    "privacy.user.aggregation must be plain": ["privacy.user.enabled=false"],
}


@pytest.mark.parametrize(("message", "words"), REFUSED.items())
def test_what_does_not_fit_is_refused(message: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*SECURE, *words])


def test_no_two_disjoint_sets_open_two_sums_and_allowed_losses_leave_enough() -> None:
    every = (
        (nodes, lost, bad)
        for nodes in range(3, 101)
        for lost in range(nodes)
        for bad in range(nodes - lost)
    )
    for nodes, dropouts, colluding in every:
        secure = SecureConfig(dropouts, colluding)
        threshold, safe = secure.threshold_of(nodes), nodes > 2 * dropouts + colluding
        assert 2 * threshold > nodes + colluding
        assert (threshold <= nodes - dropouts) == safe
        if safe:
            secure.check_fits(nodes)


def test_a_node_is_told_all_that_its_share_of_the_noise_follows_from() -> None:
    told = client_settings(
        load_config([*SECURE, "privacy.secure.colluding=3", "privacy.user.clip.count_stddev=7"])
    )
    read = request_of(request_items(TrainRequest(1, 0.5, told))).run
    assert (read.secure, read.user) == (SecureConfig(2, 3), told.user)
    assert (read.user.aggregation, read.user.adaptive, read.user.count_stddev) == (
        "secure",
        True,
        7.0,
    )


def test_a_resumed_run_keeps_what_decides_who_can_read_what() -> None:
    facts, plain = (planned(load_config(words)).deciding for words in (SECURE, SECURE[1:-1]))
    added = {
        "privacy.user.aggregation": "secure",
        "privacy.secure.dropouts": 2,
        "privacy.secure.colluding": 1,
    }
    assert facts == plain | added | {
        "privacy.secure.threshold": 11,
        "privacy.example.aggregation": "plain",
    }


@pytest.mark.parametrize("experiment", ["", "table", "heart_secure", "laplace_local_sweep"])
def test_what_tests_put_into_an_experiment_is_what_hydra_composes_at_once(experiment: str) -> None:
    chosen = [f"experiment={experiment}"] if experiment else []
    values = [
        "rounds=3",
        "data={num_clients: 1e3, path: null}",
        "privacy.user.noise_multiplier=2",
        "evaluation.metrics=[accuracy,loss]",
        "output_dir=out/größe",
    ]
    forced = [f"++{value}" for value in values]  # fixtures.py leaves these to Hydra
    (parts, *sweep), (whole, *swept) = (
        compose.composed([*chosen, *words]) for words in (values, forced)
    )
    assert (OmegaConf.to_yaml(parts), sweep) == (OmegaConf.to_yaml(whole), swept)
