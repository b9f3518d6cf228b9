"""Tries settings and keeps the best run, with the cost of choosing accounted: `python -m scripts.tune OVERRIDE...`

A comma lists what is tried: `privacy.user.clip.norm=0.1,0.3,1`. Each trial draws one value of each list, uniformly, and
trains. How many trials there are is drawn before the first one, from --trials with mean --mean (Papernot and Steinke
2022). The run with the best accuracy on the public test set is moved to OUTPUT/chosen; the others are deleted, because
the guarantee is for whoever sees the chosen run alone. For the same reason keep the number of trials to yourself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from dp_accounting import DpEvent
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from discreet.config import ConfigError, RunConfig, load_config
from discreet.durable_ledger import LedgerError
from discreet.guarantees import resolve_noise, user_event
from discreet.logs import log_to
from discreet.privacy.accounting import epsilon_spent
from discreet.privacy.noise import RandomSource, secure_source, seeded_source
from discreet.privacy.selection import SHAPES, TrialCount, selection_epsilon
from discreet.runs import RunFolder, replace_file
from scripts.interruption import ending, interrupt_below, not_begun
from simulation.in_process import simulate

MOST_CANDIDATES = 200
SELECTION_FILE = "selection.json"


@dataclass(frozen=True)
class Cost:
    """Epsilons at `delta` by RDP: of one trial, the dearest candidate, and of the whole choice."""

    delta: float
    one_trial: float
    selection: float


def candidates_of(words: Sequence[str]) -> list[list[str]]:
    """Every combination of the listed values, each as overrides without lists.

    Raises:
      ConfigError: an override can't be read, is a sweep that is not a list, or there are too many combinations.
    """
    choices = [_choices(word) for word in words]
    combined = list(itertools.islice(itertools.product(*choices), MOST_CANDIDATES + 1))
    if len(combined) > MOST_CANDIDATES:
        raise ConfigError(f"more than {MOST_CANDIDATES} combinations of settings: list fewer values")
    return [list(combination) for combination in combined]


def _choices(word: str) -> list[str]:
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
    except HydraException as error:
        raise ConfigError(f"{word}: {str(error).splitlines()[0]}") from error
    if not override.is_sweep_override():
        return [word]
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        raise ConfigError(f"{word} is no list of values: scripts.tune draws from lists")
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def cost_of(configs: Sequence[RunConfig], trials: TrialCount) -> Cost:
    """What a choice among trials that draw one of these configurations costs, if every trial runs all of its rounds.

    Raises:
      ConfigError: a configuration gives another guarantee than the user-level one, none, or noise that can be drawn
        again; their deltas differ; or none of them costs most at every Renyi order.
    """
    for config in configs:
        _check(config)
    deltas = {config.privacy.delta for config in configs}
    if len(deltas) > 1:
        raise ConfigError("privacy.delta must be the same for every candidate")
    delta, spent = deltas.pop(), list({_planned(config) for config in configs})
    one = max(epsilon_spent(entries, delta=delta, accountant="rdp") for entries in spent)
    try:
        return Cost(delta, one, selection_epsilon(spent, trials=trials, delta=delta))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check(config: RunConfig) -> None:
    privacy = config.privacy
    if not privacy.user.enabled or privacy.user.noise_multiplier == 0:
        raise ConfigError("privacy.user is off or without noise: there is nothing for scripts.tune to account")
    if privacy.example.enabled or privacy.local.kind != "none":
        raise ConfigError(
            "privacy.example and privacy.local must be off: every update of every trial reaches the server, so trials "
            "add up there. Try settings with scripts.simulate --multirun; scripts.report states the sum"
        )
    if config.output_dir is not None or config.resume:
        raise ConfigError("output_dir and resume are chosen by scripts.tune: give --output")


def _planned(config: RunConfig) -> tuple[tuple[DpEvent, int], ...]:
    noise_multiplier = resolve_noise(config).privacy.user.noise_multiplier
    assert noise_multiplier is not None
    return ((user_event(config, noise_multiplier), config.rounds),)


def run_trials(configs: Sequence[RunConfig], count: int, *, folder: Path, source: RandomSource) -> Path | None:
    """Runs so many trials and gives the folder of the most accurate one; None where there are none."""
    best: tuple[float, Path] | None = None
    for _ in range(count):
        config = configs[int(source.uniform(1)[0] * len(configs))]
        if config.seed is not None:  # reproducible as a whole, but no trial repeats another
            config = replace(config, seed=int(source.words(1)[0] >> 33))
        # A number in the name would tell how many trials came before.
        path = folder / secrets.token_hex(8)
        simulate(replace(config, output_dir=str(path)))
        accuracy = _accuracy(path)
        if best is None or accuracy > best[0]:
            best = (accuracy, path)
    return best[1] if best else None


def _accuracy(folder: Path) -> float:
    rounds = RunFolder(folder).read_metrics()
    return (rounds[-1]["accuracy"] or 0.0) if rounds else 0.0


def publish(chosen: Path, output: Path, *, trials: TrialCount, cost: Cost) -> Path:
    """Moves the chosen run to OUTPUT/chosen and writes what its choice has cost beside it."""
    path = output / "chosen"
    chosen.rename(path)
    files = RunFolder(path)
    files.write_config(replace(files.read_config(), output_dir=str(path)))
    facts: Mapping[str, object] = {
        "distribution": trials.distribution,
        "mean": trials.mean,
        "delta": cost.delta,
        "epsilon_of_one_trial": cost.one_trial,
        "epsilon": cost.selection,
        "accountant": "rdp",
        "covers": "the chosen run and that it was chosen",
        "not_covered": ["the number of trials", "the other trials", "how long they took"],
    }
    replace_file(path / SELECTION_FILE, (json.dumps(facts, indent=2) + "\n").encode())
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE")
    parser.add_argument("--trials", choices=list(SHAPES), default="logarithmic", help="their distribution")
    parser.add_argument("--mean", type=float, default=10.0, help="the mean number of trials (default: 10)")
    parser.add_argument("--max-epsilon", type=float, help="refuse to start where the choice would cost more")
    parser.add_argument("--output", type=Path, help="the folder of the chosen run (default: outputs/tune_<time>)")
    parser.add_argument(
        "--keep-trials", action="store_true", help="keep the runs that were not chosen: never publish them"
    )
    parser.add_argument("--cost", action="store_true", help="say what it would cost, and do nothing")
    return parser


def _tune(arguments: argparse.Namespace) -> int:
    trials = TrialCount(arguments.trials, arguments.mean)
    configs = [load_config(words) for words in candidates_of(arguments.overrides)]
    cost = cost_of(configs, trials)
    for line in _lines(cost, trials, len(configs)):
        print(line)
    if arguments.max_epsilon is not None and cost.selection > arguments.max_epsilon:
        raise ConfigError(f"the choice would cost epsilon {cost.selection:.4g}, above --max-epsilon")
    if arguments.cost:
        return 0
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    output = (arguments.output or Path(f"outputs/tune_{stamp}")).expanduser().resolve()
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output} is not empty")
    seed = configs[0].seed
    source = secure_source() if seed is None else seeded_source(seed).child("tune")
    folder = output / "trials"
    folder.mkdir(parents=True)
    with ending(partial(interrupt_below, folder, f"nothing was chosen; the trials lie in {folder}")):
        chosen = run_trials(configs, trials.draw(source.child("count")), folder=folder, source=source.child("choices"))
    if chosen is None:
        print("no trial was drawn: there is nothing to publish")
        return 0
    print(f"chosen run: {publish(chosen, output, trials=trials, cost=cost)}")
    if not arguments.keep_trials:
        shutil.rmtree(folder)
    return 0


def _lines(cost: Cost, trials: TrialCount, num_candidates: int) -> Iterator[str]:
    yield f"{num_candidates} candidates; a {trials.distribution} number of trials, {trials.mean:g} on average"
    yield f"epsilon {cost.one_trial:.4g} for one trial, {cost.selection:.4g} for the best (rdp, delta {cost.delta:g})"


def main(words: Sequence[str]) -> int:
    """Tunes; 2 where a setting is wrong or the choice would cost too much."""
    arguments = _parser().parse_args(words)
    logging.getLogger("absl").setLevel(logging.ERROR)
    log_to(sys.stdout)
    try:
        with ending(not_begun):
            return _tune(arguments)
    except (ConfigError, LedgerError, ValueError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
