"""The ServerApp: the settings of conf/ and the strategy in strategies/; the rest is Discreet's
own."""

from __future__ import annotations

from pathlib import Path

from discreet.flower.serving import server_app
from strategies.dp_fedavg import dp_fedavg

app = server_app(Path(__file__).resolve().parent, dp_fedavg)
