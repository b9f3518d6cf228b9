"""What clients' data are like, for a price: means, deviations, quantiles and counts, each with its standard error.

  discreet statistics data.name=breast_cancer data.num_clients=100 statistics.noise_multiplier=5
  discreet statistics 'statistics.of=[quantiles,examples]' output_dir=outputs/first
  discreet statistics resume=true output_dir=outputs/first      once more, charged to the ledger of that run

The settings are those of discreet simulate. Everybody is asked once; the sum of the answers is noised at the server, at
user level, and charged to ledger.db in output_dir. statistics.json there holds what is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from discreet.client_settings import ConfigError
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.guarantees import USER, guarantees_of
from discreet.federated.opened_run import OpenedRun
from discreet.federated.private_statistics import STATISTICS, ask, check_user_level, data_shape
from discreet.federated.query import Query
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import replace_file, with_output_folder
from discreet.federated.session import prepare
from discreet.json_numbers import json_ready
from discreet.simulation.data_answers import data_answers
from discreet.tasks.datasets import load_task
from discreet.tasks.noised_means import Estimate
from discreet.tasks.noised_statistics import read_statistics
from discreet.tasks.statistic_answers import statistic_blocks

FILE = "statistics.json"
Found = Mapping[str, Mapping[str, Estimate]]


def main(words: Sequence[str]) -> int:
    """Asks, prints and writes; 2 if the settings are wrong or the budget does not suffice."""
    if {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    try:
        print(asked(words), end="")
    except (ConfigError, LedgerError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0


def asked(words: Sequence[str]) -> str:
    """The statistics that these settings ask for, as a text; `statistics.json` is written.

    Raises:
      ConfigError: a setting is wrong, or asking would pass the budget.
      LedgerError: the ledger of a run that goes on is not all that was spent.
    """
    config = with_output_folder(run_config(words))
    # Whether a run with these settings would learn is not what is asked here.
    user = replace(config.privacy.user, too_noisy="warn")
    config = replace(config, privacy=replace(config.privacy, user=user))
    check_user_level(config, "discreet statistics")
    with ExitStack() as held:
        session = prepare(config, simulated=True, held=held)
        config, task = session.config, load_task(config.data.name, path=config.data.path)
        shape = data_shape(config, task)
        query = Query(statistic_blocks(config.statistics.of, shape), task.shape)
        sums = ask(session.opened, query, data_answers(query, config, task), name=STATISTICS)
        found = read_statistics(query.blocks, sums.mean, sums.noise, shape=shape)
        spent = _price(session.opened)
        text = json.dumps(json_ready(_facts(found, spent)), indent=2) + "\n"
        replace_file(session.folder.path / FILE, text.encode())
        return _table(found) + "\n" + _said(spent, session.folder.path)


def _price(run: OpenedRun) -> dict[str, object]:
    """What the ledger holds with these statistics."""
    privacy, user = run.config.privacy, guarantees_of(run.config)[0]
    return {
        "noise_multiplier": run.config.statistics.noise_multiplier,
        "unit": user.unit,
        "adjacency": user.adjacency,
        "delta": privacy.delta,
        "epsilon": run.ledger.spent(USER).epsilon(privacy.delta, privacy.accountant),
        "accountant": privacy.accountant,
        "protects_nobody": run.config.seed is not None,
    }


def _facts(found: Found, spent: Mapping[str, object]) -> dict[str, object]:
    numbers = {
        what: {of: {"value": one.value, "standard_error": one.standard_error} for of, one in row.items()}
        for what, row in found.items()
    }
    return {"statistics": numbers, "privacy": spent}


def _table(found: Found) -> str:
    rows = [("statistic", "of", "value", "standard error")]
    for what, row in found.items():
        rows += [(what, of, f"{one.value:.5g}", f"{one.standard_error:.2g}") for of, one in row.items()]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _said(spent: Mapping[str, object], folder: Path) -> str:
    nobody = "; seed is set, so that the noise protects nobody" if spent["protects_nobody"] else ""
    return (
        f"user-level: epsilon {spent['epsilon']:.4g} by {spent['accountant']} at delta {spent['delta']:g} spent by now "
        f"({spent['unit']}; {spent['adjacency']}){nobody}\nwritten to {folder / FILE}\n"
    )
