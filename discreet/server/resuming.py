"""The configuration of a run that goes on: that of its folder, and what may be changed on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from discreet.server.run_folder import ASKED, RunFolder, output_folder
from discreet.settings.compose import hydra_on_conf, load_config, parse_config
from discreet.settings.places import conf_folder, conf_for
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described, flat
from discreet.settings.training import FLOWER_APP

# None of these decides what a release costs, or which model it is of. A section stands for all that is in it.
CHANGEABLE = (
    *("rounds", "device", "engine", "ray", "operations", "data.path", "sampling.min_nodes"),
    "privacy.user.account",  # where it lies: that it is the account of this run is checked when it is opened
    *("statistics.of", "statistics.only"),  # each time that it is asked is paid for
    *("server.learning_rate", "server.momentum", "server.round_timeout", "training.learning_rate", "training.momentum"),
)
WHICH_RUN = ("resume", "output_dir")
TARGET = "privacy.user.target_epsilon"

Flat = Mapping[str, Any]


def asked_settings(words: Sequence[str], *, defaults: Sequence[str] = (), conf: Path | None = None) -> Settings:
    """The settings that overrides ask for; with `resume=true` those of the run in output_dir. The run folder is named.

    A run that goes on keeps its noise, its budget as it stands, and all that decides privacy. Overrides may repeat what
    it has, and change what `CHANGEABLE` names; an experiment may be repeated, and changes nothing.

    Args:
      words: overrides, as on the command line.
      defaults: overrides that come before them in a new run.
      conf: the folder to compose; None: `conf_folder()`.

    Raises:
      ConfigError: one line that names the override that is wrong, or would change what a resumed run has to keep.
    """
    with hydra_on_conf(words, conf=conf):
        from hydra import compose

        asked = compose(config_name="config", overrides=list(words))
    if asked.resume is not True:
        config = load_config([*defaults, *words], conf=conf)
        return replace(config, output_dir=str(output_folder(config.output_dir)))
    if asked.output_dir is None:
        raise ConfigError("output_dir must be given with resume=true: the folder of the run that goes on")
    path = output_folder(str(asked.output_dir))
    before, wanted = RunFolder(path).read_config(), cast(Flat, OmegaConf.to_container(asked, resolve=True))
    if before.model.name == FLOWER_APP:
        raise ConfigError(f"output_dir={path} is a run of another Flower app: it goes on there, by resume=True")
    settings = OmegaConf.create(described(before))
    for name, value in _changes(words, flat(described(before)), wanted, conf).items():
        OmegaConf.update(settings, name, value)
    return replace(parse_config(settings), output_dir=str(path), resume=True)


def same_settings(asked: Settings) -> Settings:
    """The configuration of a run that goes on and is described anew, with the noise and the budget that it has.

    Raises:
      ConfigError: one line that names a setting that is not what it was, and is not among `CHANGEABLE`.
    """
    folder = RunFolder(output_folder(asked.output_dir))
    before = folder.read_config()
    was, now = (flat(described(config)) for config in (folder.read_config(name=ASKED), asked))
    for name, value in now.items():
        if name not in WHICH_RUN and not _is_changeable(name) and value != was[name]:
            raise ConfigError(f"{name}={value} can't change a run that is resumed: it has {name}={was[name]}")
    return replace(asked, privacy=before.privacy)


def _changes(words: Sequence[str], kept: Flat, asked: Flat, conf: Path | None) -> dict[str, object]:
    """The changes that words make to the flat settings of a run."""
    wanted, changes = flat(asked), dict[str, object]()
    for word, name in _given(words, [*kept, *wanted], conf_for(words, conf or conf_folder())):
        if name == TARGET:
            _check_target(word, wanted[name], kept)
        elif name not in WHICH_RUN and wanted.get(name) != kept.get(name):
            if word.startswith("experiment=") and _is_changeable(name):
                continue
            if not _may_change(name, kept):
                raise ConfigError(
                    f"{word} can't change a run that is resumed: it has {name}={kept.get(name)}. What may change is "
                    f"{', '.join(free for free in CHANGEABLE if _may_change(free, kept))}"
                )
            changes[name] = wanted[name]
    return changes


def _given(words: Sequence[str], known: Sequence[str], conf: Path) -> Iterator[tuple[str, str]]:
    """Each word with each setting that it gives."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for word in OverridesParser.create().parse_overrides(list(words)):
        key, names = word.key_or_group, known
        if key == "experiment":
            names, key = list(flat(cast(Flat, OmegaConf.load(conf / "experiment" / f"{word.value()}.yaml")))), ""
        for name in dict.fromkeys(names):
            if not key or name == key or name.startswith(f"{key}."):
                yield str(word.input_line), name


def _check_target(word: str, target: float | None, kept: Flat) -> None:
    """The noise that a target chose is in the configuration, the target itself only as the budget that it became."""
    noise, budget = kept["privacy.user.noise_multiplier"], kept["privacy.user.max_epsilon"]
    if target is not None and target != budget:
        raise ConfigError(
            f"{word} can't change a run that is resumed: it keeps its noise multiplier {noise} and its budget "
            f"{budget}; leave it out"
        )


def _is_changeable(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in CHANGEABLE)


def _may_change(name: str, kept: Flat) -> bool:
    if name == "rounds":  # they decide the noise of clients that have a total to spread over them
        return kept["privacy.example.target_epsilon"] is None and kept["privacy.local.epsilon"] is None
    return _is_changeable(name)
