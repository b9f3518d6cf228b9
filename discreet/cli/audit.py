"""Tries to break the privacy claim of a run, and sets what it found beside the claim.

The experiment has the settings that are given, or those of a run folder, and canaries that are in or out by coin. Every
release is seen. What is printed: first how small a fault so many canaries find; then for each round and for the run the
epsilon that the ledger claims and lower bounds at 95 %, and for the run an estimate with its 95 % interval. The claim
is refuted if a bound passes it at the false-alarm rate. That none does is no proof: an audit sees one attack.

What is audited spends nothing of a real ledger: the experiment's ledger is thrown away with its folder.

With --federation the experiment is a real federation on this machine: a SuperLink, its node proxy and a ServerApp, each
a process, and canaries that connect as nodes.

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
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from discreet.audit.audit_record import PICTURE, RECORD, write_audit
from discreet.audit.experiments import Asked, experiment_of
from discreet.audit.verdict import ASSUMES, FALSE_ALARM, SIGNIFICANCE, Judgement, Verdict, judge
from discreet.cli.console import print_table
from discreet.deployment.interruption import ending
from discreet.logs import log_to
from discreet.server.resuming import asked_settings
from discreet.server.run_folder import RunFolder
from discreet.settings.rules import ConfigError

SHOWN = 10  # rounds that are printed; audit.json has all


def command(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="SETTING=VALUE ...")] = None,
    run: Annotated[Path | None, Option(metavar="FOLDER", help="the settings of the run in this folder")] = None,
    federation: Annotated[bool, Option("--federation", help="user level: in a federation of processes")] = False,
    canaries: Annotated[int | None, Option(metavar="N", min=1, help="see above")] = None,
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
    if run and overrides:
        raise ConfigError("--run takes the settings of that run: give no others")
    config = RunFolder(run.expanduser().resolve()).read_config() if run else asked_settings(overrides or [])
    log_to(sys.stderr, log_format=config.operations.log_format)
    with ending(lambda reason: f"the audit has ended before it was done ({reason}); nothing was spent"):
        experiment = experiment_of(config, Asked(of, federation, canaries, rounds, client, runs, honest))
    verdict = judge(experiment, false_alarm=false_alarm)
    folder = output or Path("audits") / datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    write_audit(folder, experiment, verdict)
    _show(verdict)
    print(f"{folder / RECORD}, {folder / PICTURE}")
    return 1 if verdict.refuted else 0


def _show(verdict: Verdict) -> None:
    """Prints what could have been found, the table, what each bound assumes, and the verdict."""
    print(verdict.power.says)
    *rounds, run = verdict.judgements
    shown = [found for number, found in enumerate(rounds) if found.refuted_by or number < SHOWN]
    print_table([_row(found) for found in (*shown, run)])
    if left := len(rounds) - len(shown):
        print(f"{left} more rounds are in {RECORD}")
    print(f"{verdict.mechanism}, {run.claim.adjacency}, delta {run.claim.delta:g}; interval and bounds at 95 %")
    for bound in run.bounds:
        print(f"bound: {bound.method} assumes {ASSUMES[bound.method]}")
    names = [found.name for found in verdict.judgements if found.refuted_by]
    if names:
        print(f"REFUTED, at a false-alarm rate of {verdict.false_alarm:g}: {', '.join(names)}")
    elif verdict.power.finds:
        told = f"no bound passes its claim (false-alarm rate {verdict.false_alarm:g}); this is no proof"
        print(f"not refuted: {told}")
    else:
        print("no verdict: nothing was found, and nothing could have been; ask for more --canaries or --runs")


def _row(found: Judgement) -> dict[str, object]:
    return {
        "": found.name,
        "claimed": found.claim.epsilon,
        "estimate": "-" if found.estimate is None else f"{found.estimate:.3g}",
        "interval": "-" if found.interval is None else "{:.3g} .. {:.3g}".format(*found.interval),
        **{f"bound: {bound.method}": f"{bound.epsilon:.3g}" for bound in found.bounds},
        "refuted by": ", ".join(found.refuted_by) or "none",
    }
