"""Small clients for the tests of client_app, and the oracles that several of them share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict
from omegaconf import OmegaConf
from scipy import stats
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.ledger.durable_ledger import DurableLedger
from discreet.node.account import Accounts
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.node.work import Work, check_names, work_of
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import (
    TrainReply,
    TrainRequest,
    encode_arrays,
    reply_numbers,
    request_items,
    request_of,
)
from discreet.run_files.compose import parse_asked
from discreet.settings.client_settings import ClientSettings
from discreet.settings.settings import Settings, client_settings

DIMS, CLASSES = 5, 3
SIZE = DIMS * CLASSES + CLASSES

# What a client does is set up by these words, and user-level privacy is off unless a test turns it
# on.
OFF = ("privacy.user.enabled=false", "rounds=4", "training.epochs=1", "training.batch_size=4")
EXAMPLE = (*OFF, "privacy.example.enabled=true", "privacy.example.noise_multiplier=1.5")
LOCAL = (*OFF, "privacy.local.kind=gaussian", "privacy.local.noise_multiplier=2.0")


def config(*words: str) -> Settings:
    """A configuration from `name=value` words, without Hydra's composition, which takes a while."""
    return parse_asked(OmegaConf.from_dotlist(list(words)))[0]


def linear(seed: int = 40693, *, dims: int = DIMS, classes: int = CLASSES) -> nn.Module:
    """A linear model with random parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Linear(dims, classes)


def examples(count: int, *, seed: int = 1187, dims: int = DIMS, classes: int = CLASSES) -> Examples:
    """Random examples."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, dims, generator=generator)
    return Examples(inputs, torch.randint(classes, (count,), generator=generator))


def params_of(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def client(
    data: Examples,
    ledger: Path | None = None,
    *,
    policy: ClientPolicy | None = None,
    source: RandomSource | None = None,
    delta: float = 1e-3,
) -> Client:
    """A client with its own ledger file, or without one."""
    accounts = None if ledger is None else Accounts(ledger_at(ledger), delta, "pld")
    return Client(linear(), data, accounts, policy or ClientPolicy(), source or seeded_source(6871))


def ledger_at(path: Path) -> DurableLedger:
    """The ledger at a path, made where there is none."""
    return DurableLedger(path) if path.exists() else DurableLedger.create(path)


def request(run: Settings, number: int = 1, *, clip_norm: float = math.inf) -> TrainRequest:
    """What the server would send."""
    return TrainRequest(number, clip_norm, client_settings(run))


def work_in(run: ClientSettings) -> Work:
    """The work of a run's first round."""
    return work_of(TrainRequest(1, math.inf, run))


def received(asked: TrainRequest, node_config: Mapping[str, object]) -> Work:
    """A request as a node reads it from a message."""
    allowed = partial(check_names, node_config=node_config)
    return work_of(request_of(request_items(asked), allowed=allowed))


def gradients(model: nn.Module, data: Examples) -> list[Tensor]:
    """Each example's gradient, by one backward pass an example."""
    found = []
    for row, target in zip(data.inputs, data.targets, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(row.unsqueeze(0)), target.unsqueeze(0)).backward()  # type: ignore[no-untyped-call]
        found.append(
            torch.cat(
                [torch.Tensor(parameter.grad).reshape(-1) for parameter in model.parameters()]
            )
        )
    return found


def clipped(vectors: Sequence[Tensor], clip_norm: float, *, order: float = 2) -> Tensor:
    """The sum of vectors, each scaled to a norm of at most `clip_norm`."""
    scaled = [
        vector / max(1.0, float(torch.linalg.vector_norm(vector, order)) / clip_norm)
        for vector in vectors
    ]
    return torch.stack(scaled).sum(0)


def write(model: nn.Module, params: Tensor) -> None:
    """Puts a vector into a model, by hand."""
    start = 0
    for parameter in model.parameters():
        parameter.data = params[start : start + parameter.numel()].reshape(parameter.shape).clone()
        start += parameter.numel()


def rejects_gaussian(noise: Tensor, stddev: float) -> bool:
    """Chi-square test of a standard deviation; false-alarm rate 1e-6."""
    values = noise.double().numpy()
    statistic = float(np.sum(values**2)) / stddev**2
    return bool(
        min(stats.chi2.sf(statistic, len(values)), stats.chi2.cdf(statistic, len(values))) < 5e-7
    )


def rejects_laplace(noise: Tensor, scale: float) -> bool:
    """Test of a Laplace scale: |x| / scale adds up to a Gamma(n). False-alarm rate 1e-6."""
    values = noise.double().numpy()
    statistic = float(np.sum(np.abs(values))) / scale
    return bool(
        min(stats.gamma.sf(statistic, len(values)), stats.gamma.cdf(statistic, len(values))) < 5e-7
    )


def request_with(request: TrainRequest, change: Mapping[str, object]) -> dict[str, object]:
    """A request as it travels with other values, by dotted names; one that is "gone" is left
    out."""
    items: dict[str, object] = {**request_items(request)}
    tree = json.loads(str(items["request"]))
    for name, value in change.items():
        *groups, last = name.split(".")
        inner = tree
        for group in groups:
            inner[group] = inner[group] or {}
            inner = inner[group]
        inner[last] = value
        if value == "gone":
            del inner[last]
    return items | {"request": json.dumps(tree)}


def encode_reply(reply: TrainReply) -> RecordDict:
    """The content of a reply, as a client sends it."""
    arrays = [
        vector.detach().cpu().numpy()
        for vector in (reply.update, reply.answer)
        if vector is not None
    ]
    return encode_arrays(arrays, reply_numbers(reply))
