"""The configuration of a resumed run: that of its folder, with the settings that may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from discreet.run_files.call import Call
from discreet.run_files.compose import composed, not_one_run, parse_asked, quoted
from discreet.run_files.opening import output_folder
from discreet.run_files.places import conf_folder, conf_for
from discreet.run_files.run_folder import ASKED, RunFolder
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described, flat
from discreet.settings.training import FLOWER_APP
from discreet.settings.wording import Key, Phrase, Wording, joined

# None of these decides the cost of a release or the model. A section stands for all settings in it.
CHANGEABLE = (
    "rounds",
    "device",
    "engine",
    "ray",
    "operations",
    "data.path",
    "sampling.min_nodes",
    # the file's location: opening it checks that it is this run's account
    "privacy.user.account",
    "statistics.of",
    "statistics.only",  # each time that it is asked is paid for
    "server.learning_rate",
    "server.momentum",
    "server.round_timeout",
    "training.learning_rate",
    "training.momentum",
)
# those that another Flower app has arguments for
CHANGEABLE_OF_APPS = tuple(
    each for each in CHANGEABLE if each.startswith(("rounds", "sampling.", "privacy.", "server."))
)
WHICH_RUN = ("resume", "output_dir")

Flat = Mapping[str, Any]


def asked_settings(
    words: Sequence[str], *, defaults: Sequence[str] = (), conf: Path | None = None
) -> tuple[Settings, Call]:
    """The settings that overrides ask for, with `resume=true` those of the run in output_dir; and
    the call, which names the run folder.

    A resumed run keeps its noise, its current budget, and every setting that decides privacy.
    Overrides may repeat the original settings and change those in `CHANGEABLE`. An experiment may
    be repeated and changes nothing.

    Args:
      words: overrides, as on the command line.
      defaults: overrides that come before them in a new run.
      conf: the folder to compose; None: `conf_folder()`.

    Raises:
      ConfigError: one line that names the override that is wrong, or would change what a resumed
        run has to keep.
    """
    words = [*map(quoted, words)]
    asked, is_sweep = composed(words, conf=conf)
    if asked.resume is not True:
        if is_sweep:
            raise ConfigError(not_one_run(words))
        if defaults:
            asked, _ = composed([*defaults, *words], conf=conf)
        config, call = parse_asked(asked)
        return config, replace(call, output_dir=str(output_folder(call.output_dir)))
    return _of_resumed_run(asked, words, conf_for(words, conf or conf_folder()))


def _of_resumed_run(asked: DictConfig, words: Sequence[str], conf: Path) -> tuple[Settings, Call]:
    """The settings of the run in output_dir with the overrides `words`, and the call. `asked`: the
    overrides, composed with `conf`."""
    if asked.output_dir is None:
        raise ConfigError(
            "output_dir must be given with resume=true: the folder of the run to resume"
        )
    folder = RunFolder(output_folder(str(asked.output_dir)))
    kept, last = folder.read_asked()
    if kept.model.name == FLOWER_APP:
        raise ConfigError(
            f"output_dir={folder.path} is a run of another Flower app: resume it there "
            "with resume=True"
        )
    wanted = flat(cast(Flat, OmegaConf.to_container(asked, resolve=True)))
    was = {"device": last.device, **flat(described(kept))}
    if (folder.path / ASKED).exists():
        before = folder.read_config(name=ASKED)
    else:
        before = kept
    settings = OmegaConf.create({"device": last.device, **described(kept)})
    first = flat(described(before))
    for word, name in _given(words, [*was, *wanted], conf):
        if _is_new(word, name, wanted.get(name), was, first) and not word.startswith("experiment="):
            OmegaConf.update(settings, name, wanted[name])
    config, call = parse_asked(settings)
    return config, replace(call, output_dir=str(folder.path), resume=True)


def same_settings(asked: Settings, folder: RunFolder) -> Settings:
    """The configuration of a resumed run that code describes again, with the noise and budget that
    it already has.

    Raises:
      ConfigError: one line that names a setting that is not what it was, and is not among
        `CHANGEABLE`.
    """
    kept = folder.read_config()
    first = flat(described(folder.read_config(name=ASKED)))
    for name, value in flat(described(asked)).items():
        _is_new(Key(f"{name}={value}"), name, value, first, first)
    user = replace(
        kept.privacy.user, account=asked.privacy.user.account or kept.privacy.user.account
    )
    return replace(asked, privacy=replace(kept.privacy, user=user))


def _is_new(word: Phrase, name: str, value: object, was: Flat, first: Flat) -> bool:
    """True if a word changes a setting. ConfigError: it may not change. A setting may keep the
    value that the run `was` using, or its value at `first`, before a target became noise and
    budget."""
    if name in WHICH_RUN or value == was.get(name):
        return False
    if _may_change(name, was):
        return True
    if value == first.get(name):
        return False
    has = was.get(name)
    if was.get("model.name") == FLOWER_APP:
        known = CHANGEABLE_OF_APPS
    else:
        known = CHANGEABLE
    free = joined(", ", [Key(each) for each in known if _may_change(each, was)])
    if has is None:
        has = first.get(name)
    kept = " can't change in a resumed run, which has "
    raise ConfigError(
        Wording(word, kept, Key(f"{name}={has}"), ". Settings that may change: ", free)
    )


def _given(words: Sequence[str], known: Sequence[str], conf: Path) -> Iterator[tuple[str, str]]:
    """Each override with each setting that it changes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for word in OverridesParser.create().parse_overrides(list(words)):
        key = word.key_or_group
        names = known
        if key == "experiment":
            # Unresolved: an experiment may refer to a setting of the whole configuration.
            asked = OmegaConf.load(conf / "experiment" / f"{word.value()}.yaml")
            names = list(flat(cast(Flat, OmegaConf.to_container(asked, resolve=False))))
            key = ""
        for name in dict.fromkeys(names):
            if not key or name == key or name.startswith(f"{key}."):
                yield str(word.input_line), name


def _may_change(name: str, kept: Flat) -> bool:
    if name == "rounds":  # they decide the noise of clients that have a total to spread over them
        return (
            kept["privacy.example.target_epsilon"] is None and kept["privacy.local.epsilon"] is None
        )
    return any(name == free or name.startswith(f"{free}.") for free in CHANGEABLE)
