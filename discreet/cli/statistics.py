"""What clients' data are like, for a price: means, deviations, quantiles and counts, each with its standard error.

  discreet statistics data.name=breast_cancer data.num_clients=100 statistics.noise_multiplier=5
  discreet statistics 'statistics.of=[quantiles,examples]' output_dir=outputs/first
  discreet statistics resume=true output_dir=outputs/first      once more, charged to the ledger of that run

The settings are those of discreet simulate. Everybody is asked once; the sum of the answers is noised at the server, at
user level, and charged to ledger.db in output_dir. statistics.json there holds what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from discreet.client_settings import ConfigError
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.private_statistics import data_query
from discreet.federated.query import STATISTICS
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import with_output_folder
from discreet.federated.session import prepare
from discreet.federated.written_statistics import written_statistics
from discreet.settings import client_settings
from discreet.simulation.data_answers import data_answers
from discreet.tasks.datasets import load_task


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
    client_settings(config).check_server_noise("discreet statistics")
    with ExitStack() as held:
        session = prepare(config, simulated=True, held=held)
        config, task = session.config, load_task(config.data.name, path=config.data.path)
        answers = data_answers(data_query(STATISTICS, config, task), config, task)
        return written_statistics(session.context, task, answers)
