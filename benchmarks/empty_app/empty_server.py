"""The baseline: Discreet's exchange with clients that do nothing. It adds up replies as they
arrive, and takes the time."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from discreet.flower.grid_transport import GridTransport
from discreet.flower.serving import own_messages
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.settings.settings import Settings, client_settings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs rounds with every node; writes seconds, replies, and the begin and end of rounds to a
    file."""
    settings = dict(word.split("=", 1) for word in str(context.run_config["overrides"]).split())
    nodes, rounds, size = (int(settings[name]) for name in ("nodes", "rounds", "size"))
    run, timeout = client_settings(Settings()), float(settings["timeout"])
    exchange = GridTransport(
        grid, own_messages, timeout=timeout, population_size=nodes, min_nodes=nodes
    )
    replies, ends = [], [time.monotonic()]
    for number in range(1, rounds + 1):
        total, count, params = torch.zeros(size), 0, torch.rand(size)
        cohort = exchange.available_clients()
        for reply in exchange.ask(TrainRequest(number, 1.0, run), params, cohort):
            if isinstance(reply, TrainReply):
                total, count = total.add_(reply.update), count + 1
        ends.append(time.monotonic())
        replies.append(count)
        print(f"round {number}/{rounds}  replies {count}  {ends[-1] - ends[-2]:.2f} s", flush=True)
    facts = {
        "seconds": [end - start for start, end in pairwise(ends)],
        "replies": replies,
        "ends": ends,
    }
    Path(settings["output_dir"].strip("'")).with_suffix(".json").write_text(json.dumps(facts))
