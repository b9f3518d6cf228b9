"""The ServerApp: Discreet's own server, from `discreet.flower.serving`, with this app's
strategy."""

from __future__ import annotations

from functools import partial

from discreet.flower.serving import serve
from strategies.dp_fedavg import dp_fedavg

main = partial(serve, strategy=dp_fedavg)
