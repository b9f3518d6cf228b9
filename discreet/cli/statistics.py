"""Private statistics of clients' data: means, standard deviations, quantiles and counts, each with
its standard error. They spend privacy.

The settings are those of discreet simulate. Every client is asked once; the sum of the answers is
noised at the server, at user level, and charged to ledger.db in output_dir. The output is also
written to statistics.json there.

examples:
  discreet statistics data.name=breast_cancer data.num_clients=100 statistics.noise_multiplier=5
  discreet statistics 'statistics.of=[quantiles,examples]' output_dir=outputs/first
  discreet statistics resume=true output_dir=outputs/first      again, charged to that run's ledger
"""

from __future__ import annotations

from contextlib import ExitStack

from discreet.cli.console import Words
from discreet.data.datasets import load_task
from discreet.protocol.messages import STATISTICS
from discreet.run_files.resuming import asked_settings
from discreet.server.data_questions import written_statistics
from discreet.server.resolve import resolve
from discreet.server.session import open_session
from discreet.settings.settings import client_settings, with_any_noise
from discreet.simulation.in_process import data_answers


def command(overrides: Words = None) -> None:
    """Asks, prints and writes."""
    config, call = asked_settings(overrides or [])
    config = with_any_noise(config)
    client_settings(config).check_server_noise("discreet statistics")
    with ExitStack() as held:
        plan, normalised = resolve(config, resumed=call.resume)
        session = open_session(plan, normalised, call, simulated=True, held=held)
        task = load_task(config.data.name, path=config.data.path)
        answers = data_answers(STATISTICS, plan, task)
        print(written_statistics(session.context, task, answers), end="")
