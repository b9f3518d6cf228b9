"""The federation in one process, without Ray; `simulate` here is `discreet.simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path


def simulate(
    *settings: str, on_round: Callable[[Mapping[str, object]], None] | None = None
) -> Path:
    """Trains in this process, as the command `discreet simulate` does.

    Args:
      settings: as on the command line, for instance `"rounds=5"`, `"experiment=silos"` or
        `"output_dir=outputs/first"`.
      on_round: is called with the row of metrics.csv of each round, once the round is stored. If it
        fails the run ends, and can be resumed with `"resume=true"`.

    Returns:
      The run folder, which is named by the time unless `output_dir` is given: `metrics.csv` has a
      row for each round, `privacy.json` every guarantee, `model.safetensors` the model.

    Raises:
      ConfigError: a setting is wrong; one line names it, before anything starts.
      TypeError: a setting is not a string.
    """
    if not all(isinstance(each, str) for each in settings):
        raise TypeError(
            'simulate takes each setting as a text of its own: simulate("rounds=3", "seed=1"), or '
            "*settings"
        )
    # Imported here, so that importing one module of this package does not load them.
    from discreet.run_files.resuming import asked_settings
    from discreet.simulation.in_process import simulate as train

    config, call = asked_settings(settings)
    train(config, call, on_round=on_round)
    return Path(str(call.output_dir))
