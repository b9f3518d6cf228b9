"""Tries to break the privacy claim of a run, and compares the result with the claim.

The experiment has the given settings, or those of a run folder, and canaries that are in or out by
a fair coin. Its ledger is deleted with its folder: an audit charges no real ledger. First it prints
the smallest fault that this number of canaries can find. Then it prints, for each round and for the
run, the claimed epsilon, lower bounds at 95 % and, for the run, an estimate. The claim is refuted
if a bound exceeds it at the false-alarm rate. If none does, that is no proof.

--canaries counts clients of each run at user level (half of the population, at most 500), and
examples of client 0 at example level (500), at both at most as many as the model has parameters.
For masked sums at either level, and with --of local, evaluation or statistics, it counts releases
with the canary, and as many without it or with its opposite (2000).

examples:
  discreet audit experiment=mnist_users_scattering --canaries 2000
  discreet audit experiment=silos data.num_clients=2 --canaries 300 --rounds 2
  discreet audit --run outputs/first --canaries 500 --runs 4 --output outputs/first/audit
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from discreet.audit.experiments import experiment_of
from discreet.audit.user_audit import AuditRequest
from discreet.audit.verdict import FALSE_ALARM, PICTURE, RECORD, SIGNIFICANCE, judge, write_audit
from discreet.cli.console import Words, new_folder, print_table
from discreet.deployment.interruption import ending
from discreet.logs import log_to
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError

Of = Literal["user", "example", "local", "evaluation", "statistics"]


def command(
    overrides: Words = None,
    run: Annotated[
        Path | None, Option(metavar="FOLDER", help="the settings of the run in this folder")
    ] = None,
    canaries: Annotated[int | None, Option(metavar="N", min=1, help="see above")] = None,
    of: Annotated[
        Of | None, Option(help="the guarantee (the first that is on), or what is asked of data")
    ] = None,
    rounds: Annotated[
        int | None, Option(help="example level: of client 0 (all); local: of the schedule (1)")
    ] = None,
    runs: Annotated[
        int, Option(help="user level: how many runs, each with canaries of its own")
    ] = 1,
    honest: Annotated[
        int | None, Option(help="user level: other clients that train; 0 is fastest (all)")
    ] = None,
    output: Annotated[
        Path | None, Option(metavar="FOLDER", help="for audit.json and audit.svg (audits/TIME)")
    ] = None,
    false_alarm: Annotated[float, Option(help="the false-alarm rate of the verdict")] = FALSE_ALARM,
) -> int:
    """Audits, writes and prints; exit code 1 if the claim is refuted."""
    if not 0 < false_alarm <= SIGNIFICANCE:
        raise ConfigError(f"--false-alarm must be within (0, {SIGNIFICANCE}] (got {false_alarm})")
    if run and overrides:
        raise ConfigError("--run takes the settings of that run: give no others")
    if run:
        config, call = RunFolder(run.expanduser().resolve()).read_asked()
    else:
        config, call = asked_settings(overrides or [])
    log_to(sys.stderr, log_format=config.operations.log_format)
    with ending(lambda reason: f"the audit ended early ({reason}); nothing was spent"):
        asked = AuditRequest(of, canaries, rounds, runs, honest, call.device)
        experiment = experiment_of(config, asked)
    verdict = judge(experiment, false_alarm=false_alarm)
    folder = output or new_folder("audits/")
    write_audit(folder, experiment, verdict)
    print(verdict.power)
    print_table([found.row for found in verdict.shown])
    print(*verdict.lines(), f"{folder / RECORD}, {folder / PICTURE}", sep="\n")
    if verdict.refuted:
        return 1
    return 0
