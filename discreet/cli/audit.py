"""Tries to break the privacy claim of a run, and sets what it found beside the claim.

The experiment has the settings that are given, or those of a run folder, and canaries that are in or out by coin. Every
release is seen. What is printed: first how small a fault so many canaries find; then for each round and for the run the
epsilon that the ledger claims and lower bounds at 95 %, and for the run an estimate with its 95 % interval. The claim
is refuted if a bound passes it at the false-alarm rate. That none does is no proof: an audit sees one attack.

What is audited spends nothing of a real ledger: the experiment's ledger is thrown away with its folder.

With --federation the experiment is a real federation on this machine: a SuperLink, its gate and a ServerApp, each a
process, and canaries that connect as nodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from discreet.audit.answer_audit import audit_answers, audit_statistics
from discreet.audit.audit_record import PICTURE, RECORD, write_audit
from discreet.audit.canary_scores import Experiment
from discreet.audit.example_audit import audit_examples
from discreet.audit.federation_audit import audit_federation
from discreet.audit.local_audit import audit_local
from discreet.audit.masked_audit import audit_secure, audit_shared_step
from discreet.audit.user_audit import audit_users
from discreet.audit.verdict import ASSUMES, FALSE_ALARM, SIGNIFICANCE, Judgement, Verdict, judge
from discreet.config import ConfigError, RunConfig
from discreet.deployment.interruption import ending
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.guarantees import EXAMPLE, LOCAL, USER, guarantees_of
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import RunFolder
from discreet.logs import log_to

EXAMPLES = """examples:
  discreet audit rounds=5 --runs 10
  discreet audit experiment=mnist_users_scattering --canaries 2000
  discreet audit experiment=silos data.num_clients=2 --canaries 300 --rounds 2
  discreet audit --run outputs/first --canaries 500 --runs 4 --output outputs/first/audit
  discreet audit --federation rounds=4 sampling.kind=everyone privacy.user.noise_multiplier=1 --canaries 40 --runs 3
"""
REFUTED = 1  # exit code
MOST_CANARIES = 500  # unless more are asked for
NODES = 40  # canaries of each run in a federation
RELEASES = 2000  # of each round and of either neighbour, of local privacy
SHOWN = 10  # rounds that are printed; audit.json has all
CANARIES = f"""user level: clients of each run (half of the population, at most {MOST_CANARIES}; nodes of a federation:
half of the population, at most {NODES}); example level:
examples of the client ({MOST_CANARIES}); masked sums of either level, local, evaluation, statistics: releases with the
canary, and as many without it or with its opposite ({RELEASES})"""


def show(verdict: Verdict, console: Console) -> None:
    """Prints what could have been found, the table, what each bound assumes, and the verdict."""
    console.print(verdict.power.says, highlight=False)
    methods = [bound.method for bound in verdict.judgements[-1].bounds]
    table = Table("", "claimed", "estimate", "interval", *(f"bound: {method}" for method in methods), "refuted by")
    for found in _shown(verdict.judgements):
        table.add_row(*_cells(found, methods))
    console.print(table)
    run = verdict.judgements[-1]
    left = len(verdict.judgements) - table.row_count
    if left:
        console.print(f"{left} more rounds are in {RECORD}")
    console.print(f"{verdict.mechanism}, {run.claim.adjacency}, delta {run.claim.delta:g}; interval and bounds at 95 %")
    for method in methods:
        console.print(f"bound: {method} assumes {ASSUMES[method]}", highlight=False)
    console.print(sentence(verdict), highlight=False)


def sentence(verdict: Verdict) -> str:
    """The verdict in one line."""
    if not verdict.refuted and not verdict.power.finds:
        return "no verdict: nothing was found, and nothing could have been; ask for more --canaries or --runs"
    if not verdict.refuted:
        return f"not refuted: no bound passes its claim (false-alarm rate {verdict.false_alarm:g}); this is no proof"
    names = [found.name for found in verdict.judgements if found.refuted_by]
    return f"REFUTED, at a false-alarm rate of {verdict.false_alarm:g}: {', '.join(names)}"


def _shown(judgements: Sequence[Judgement]) -> Iterator[Judgement]:
    *rounds, run = judgements
    for number, found in enumerate(rounds):
        if found.refuted_by or number < SHOWN:
            yield found
    yield run


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


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="discreet audit",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="as of discreet simulate")
    made.add_argument("--run", type=Path, metavar="FOLDER", help="the settings of the run in this folder")
    made.add_argument("--federation", action="store_true", help="user level: in a federation of processes, see above")
    made.add_argument("--canaries", type=int, metavar="N", help=CANARIES)
    made.add_argument("--of", choices=AUDITS, help="the guarantee (the first that is on), or what is asked of data")
    made.add_argument("--rounds", type=int, help="example level: of the client (all); local: of the schedule (1)")
    made.add_argument("--client", type=int, default=0, help="example level: whose examples (0)")
    made.add_argument(
        "--runs", type=int, default=1, help="user level: how many runs, each with canaries of its own (1)"
    )
    made.add_argument(
        "--honest", type=int, help="user level: how many other clients train; 0 is fastest (all there is room for)"
    )
    made.add_argument("--output", type=Path, metavar="FOLDER", help="for audit.json and audit.svg (audits/TIME)")
    made.add_argument("--false-alarm", type=float, default=FALSE_ALARM, help=f"of the verdict ({FALSE_ALARM})")
    return made


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


def main(words: Sequence[str]) -> int:
    """Audits, writes and shows; 1 if the claim is refuted, 2 if the settings are wrong."""
    given = parser().parse_intermixed_args(words)
    try:
        if not 0 < given.false_alarm <= SIGNIFICANCE:
            raise ConfigError(f"--false-alarm must be within (0, {SIGNIFICANCE}] (got {given.false_alarm})")
        config = settings_of(given.run, given.overrides)
        log_to(sys.stderr, log_format=config.operations.log_format)
        experiment = _experiment(config, given)
        verdict = judge(experiment, false_alarm=given.false_alarm)
        folder = given.output or Path("audits") / datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
        write_audit(folder, experiment, verdict)
    except (ConfigError, LedgerError, OSError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    show(verdict, Console() if sys.stdout.isatty() else Console(width=160))
    print(f"{folder / RECORD}, {folder / PICTURE}")
    return REFUTED if verdict.refuted else 0


def _experiment(config: RunConfig, given: argparse.Namespace) -> Experiment:
    if given.federation:
        if given.of not in (None, USER) or given.honest:
            raise ConfigError("--federation audits the user level, with canaries alone: leave out --of and --honest")
        return _in_federation(config, given)
    on = [guarantee.name for guarantee in guarantees_of(config) if guarantee.enabled]
    wanted = given.of or next(iter(on), USER)
    return AUDITS[wanted](config, given)


def _users(config: RunConfig, given: argparse.Namespace) -> Experiment:
    if config.privacy.user.secure:
        return audit_secure(config, releases=_given(given.canaries, RELEASES))
    canaries = _given(given.canaries, min(config.population_size // 2, MOST_CANARIES))
    return audit_users(config, canaries=canaries, honest=given.honest, runs=given.runs)


def _in_federation(config: RunConfig, given: argparse.Namespace) -> Experiment:
    canaries = _given(given.canaries, min(config.population_size // 2, NODES))
    with ending(lambda reason: f"the audit has ended before it was done ({reason}); nothing was spent"):
        return audit_federation(config, canaries=canaries, runs=given.runs)


def _examples(config: RunConfig, given: argparse.Namespace) -> Experiment:
    if config.privacy.example.secure:
        return audit_shared_step(config, releases=_given(given.canaries, RELEASES), client=given.client)
    canaries = _given(given.canaries, MOST_CANARIES)
    return audit_examples(config, canaries=canaries, client=given.client, rounds=given.rounds)


def _local(config: RunConfig, given: argparse.Namespace) -> Experiment:
    return audit_local(config, releases=_given(given.canaries, RELEASES), rounds=_given(given.rounds, 1))


def _answers(config: RunConfig, given: argparse.Namespace) -> Experiment:
    if config.privacy.user.secure:
        return audit_secure(config, releases=_given(given.canaries, RELEASES), of_answers=True)
    return audit_answers(config, releases=_given(given.canaries, RELEASES))


def _statistics(config: RunConfig, given: argparse.Namespace) -> Experiment:
    return audit_statistics(config, releases=_given(given.canaries, RELEASES))


def _given(count: int | None, otherwise: int) -> int:
    return otherwise if count is None else count


AUDITS: dict[str, Callable[[RunConfig, argparse.Namespace], Experiment]] = {
    USER: _users,
    EXAMPLE: _examples,
    LOCAL: _local,
    "evaluation": _answers,
    "statistics": _statistics,
}
