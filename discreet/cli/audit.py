"""Tries to break the privacy claim of a run, and sets what it found beside the claim.

The experiment has the settings that are given, or those of a run folder, and canaries that are in or out by coin. Every
release is seen. What is printed: first how small a fault so many canaries find; then for each round and for the run the
epsilon that the ledger claims and lower bounds at 95 %, and for the run an estimate with its 95 % interval. The claim
is refuted if a bound passes it at the false-alarm rate. That none does is no proof: an audit sees one attack.

What is audited spends nothing of a real ledger: the experiment's ledger is thrown away with its folder.

With --federation the experiment is a real federation on this machine: a SuperLink, its gate and a ServerApp, each a
process, and canaries that connect as nodes.

--canaries: at user level clients of each run (half of the population, at most 500; nodes of a federation: at most 40);
at example level examples of the client (500); of masked sums of either level, and with --of local, evaluation or
statistics: releases with the canary, and as many without it or with its opposite (2000).

examples:
  discreet audit rounds=5 --runs 10
  discreet audit experiment=mnist_users_scattering --canaries 2000
  discreet audit experiment=silos data.num_clients=2 --canaries 300 --rounds 2
  discreet audit --run outputs/first --canaries 500 --runs 4 --output outputs/first/audit
  discreet audit --federation rounds=4 sampling.kind=everyone privacy.user.noise_multiplier=1 --canaries 40 --runs 3
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from discreet.audit.answer_audit import audit_answers, audit_statistics
from discreet.audit.audit_record import PICTURE, RECORD, write_audit
from discreet.audit.canary_scores import Experiment
from discreet.audit.example_audit import audit_examples
from discreet.audit.federation_audit import audit_federation
from discreet.audit.local_audit import audit_local
from discreet.audit.masked_audit import audit_secure, audit_shared_step
from discreet.audit.user_audit import audit_users
from discreet.audit.verdict import ASSUMES, FALSE_ALARM, SIGNIFICANCE, Judgement, Verdict, judge
from discreet.deployment.interruption import ending
from discreet.federated.guarantees import EXAMPLE, LOCAL, USER, guarantees_of
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import RunFolder
from discreet.logs import log_to
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig

MOST_CANARIES = 500  # unless more are asked for
NODES = 40  # canaries of each run in a federation
RELEASES = 2000  # of each round and of either neighbour, where one release is repeated
SHOWN = 10  # rounds that are printed; audit.json has all


@dataclass(frozen=True)
class Asked:
    """The options that say how an experiment is carried out; None is a default that depends on what is audited."""

    of: str | None = None
    federation: bool = False
    canaries: int | None = None
    rounds: int | None = None
    client: int = 0
    runs: int = 1
    honest: int | None = None


def command(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="SETTING=VALUE ...")] = None,
    run: Annotated[Path | None, Option(metavar="FOLDER", help="the settings of the run in this folder")] = None,
    federation: Annotated[bool, Option("--federation", help="user level: in a federation of processes")] = False,
    canaries: Annotated[int | None, Option(metavar="N", help="see above")] = None,
    of: Annotated[
        Literal["user", "example", "local", "evaluation", "statistics"] | None,
        Option(help="the guarantee (the first that is on), or what is asked of data"),
    ] = None,
    rounds: Annotated[int | None, Option(help="example level: of the client (all); local: of the schedule (1)")] = None,
    client: Annotated[int, Option(help="example level: whose examples")] = 0,
    runs: Annotated[int, Option(help="user level: how many runs, each with canaries of its own")] = 1,
    honest: Annotated[
        int | None, Option(help="user level: how many other clients train; 0 is fastest (all there is room for)")
    ] = None,
    output: Annotated[Path | None, Option(metavar="FOLDER", help="for audit.json and audit.svg (audits/TIME)")] = None,
    false_alarm: Annotated[float, Option(help="the false-alarm rate of the verdict")] = FALSE_ALARM,
) -> int:
    """Audits, writes and shows; 1 if the claim is refuted."""
    if not 0 < false_alarm <= SIGNIFICANCE:
        raise ConfigError(f"--false-alarm must be within (0, {SIGNIFICANCE}] (got {false_alarm})")
    config = settings_of(run, overrides or [])
    log_to(sys.stderr, log_format=config.operations.log_format)
    experiment = experiment_of(config, Asked(of, federation, canaries, rounds, client, runs, honest))
    verdict = judge(experiment, false_alarm=false_alarm)
    folder = output or Path("audits") / datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    write_audit(folder, experiment, verdict)
    show(verdict, Console() if sys.stdout.isatty() else Console(width=160))
    print(f"{folder / RECORD}, {folder / PICTURE}")
    return 1 if verdict.refuted else 0


def settings_of(run: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The settings to audit.

    Raises:
      ConfigError: they are wrong, or both a run folder and overrides are given.
    """
    if run is None:
        return run_config(overrides)
    if overrides:
        raise ConfigError("--run takes the settings of that run: give no others")
    return RunFolder(run.expanduser().resolve()).read_config()


def experiment_of(config: RunConfig, asked: Asked) -> Experiment:
    """Carries out the experiment for what is audited.

    Raises:
      ConfigError: it can't be audited with these settings or options.
    """
    half = config.population_size // 2
    if asked.federation:
        if asked.of not in (None, USER) or asked.honest:
            raise ConfigError("--federation audits the user level, with canaries alone: leave out --of and --honest")
        nodes = min(half, NODES) if asked.canaries is None else asked.canaries
        with ending(lambda reason: f"the audit has ended before it was done ({reason}); nothing was spent"):
            return audit_federation(config, canaries=nodes, runs=asked.runs)
    wanted = asked.of or next((each.name for each in guarantees_of(config) if each.enabled), USER)
    releases = RELEASES if asked.canaries is None else asked.canaries
    canaries = MOST_CANARIES if asked.canaries is None else asked.canaries
    if wanted == EXAMPLE and config.privacy.example.secure:
        return audit_shared_step(config, releases=releases, client=asked.client)
    if wanted == EXAMPLE:
        return audit_examples(config, canaries=canaries, client=asked.client, rounds=asked.rounds)
    if wanted == LOCAL:
        return audit_local(config, releases=releases, rounds=1 if asked.rounds is None else asked.rounds)
    if wanted == "statistics":
        return audit_statistics(config, releases=releases)
    if config.privacy.user.secure:
        return audit_secure(config, releases=releases, of_answers=wanted == "evaluation")
    if wanted == "evaluation":
        return audit_answers(config, releases=releases)
    canaries = min(half, MOST_CANARIES) if asked.canaries is None else asked.canaries
    return audit_users(config, canaries=canaries, honest=asked.honest, runs=asked.runs)


def show(verdict: Verdict, console: Console) -> None:
    """Prints what could have been found, the table, what each bound assumes, and the verdict."""
    console.print(verdict.power.says, highlight=False)
    *rounds, run = verdict.judgements
    methods = [bound.method for bound in run.bounds]
    table = Table("", "claimed", "estimate", "interval", *(f"bound: {method}" for method in methods), "refuted by")
    shown = [found for number, found in enumerate(rounds) if found.refuted_by or number < SHOWN]
    for found in (*shown, run):
        table.add_row(*_cells(found, methods))
    console.print(table)
    if left := len(rounds) - len(shown):
        console.print(f"{left} more rounds are in {RECORD}")
    console.print(f"{verdict.mechanism}, {run.claim.adjacency}, delta {run.claim.delta:g}; interval and bounds at 95 %")
    for method in methods:
        console.print(f"bound: {method} assumes {ASSUMES[method]}", highlight=False)
    console.print(sentence(verdict), highlight=False)


def _cells(found: Judgement, methods: Sequence[str]) -> list[str]:
    bounds = {bound.method: f"{bound.epsilon:.3g}" for bound in found.bounds}
    return [
        found.name,
        f"{found.claim.epsilon:.4g}",
        "-" if found.estimate is None else f"{found.estimate:.3g}",
        "-" if found.interval is None else "{:.3g} .. {:.3g}".format(*found.interval),
        *(bounds.get(method, "-") for method in methods),
        ", ".join(found.refuted_by) or "none",
    ]


def sentence(verdict: Verdict) -> str:
    """The verdict in one line."""
    if not verdict.refuted and not verdict.power.finds:
        return "no verdict: nothing was found, and nothing could have been; ask for more --canaries or --runs"
    if not verdict.refuted:
        return f"not refuted: no bound passes its claim (false-alarm rate {verdict.false_alarm:g}); this is no proof"
    names = [found.name for found in verdict.judgements if found.refuted_by]
    return f"REFUTED, at a false-alarm rate of {verdict.false_alarm:g}: {', '.join(names)}"
