"""Rounds in which clients share a step at example level, replayed with one example more or less:
see tests/replay.py.

A round is whole: from the clients' examples, through what either engine makes of them, to what the
server opens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.data.partition import PartitionedExamples
from discreet.mechanisms.sums import UnopenedSum
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.node.work import work_of
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.planning.plan import Plan
from discreet.planning.state import initial_state
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest
from discreet.simulation.chunk import shared_examples
from discreet.simulation.cohort import BatchedTransport, Engine
from discreet.simulation.in_process import UnmaskedSum
from discreet.simulation.layer_sequence import sequence_of
from tests.node.clients import DIMS, config, examples, linear, params_of, request
from tests.replay import Replay, replay
from tests.rounds import round_of

ROUNDS, PUBLIC = 3, 8  # training.batch_size: what stands for a client's number of examples
WORDS = (
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
    "privacy.accountant=rdp",
    f"rounds={ROUNDS}",
    "privacy.example.enabled=true",
    "privacy.example.aggregation=secure",
    "privacy.example.noise_multiplier=1.5",
    "privacy.example.clip_norm=0.5",
    "sampling.kind=everyone",
    "data.num_clients=3",
    "privacy.secure.dropouts=0",
    "training.epochs=1",
    f"training.batch_size={PUBLIC}",
    "training.learning_rate=0.7",
    "server.momentum=0.9",
    "seed=7919",
)
RUN = config(*WORDS)
Shares = Sequence[Examples]


def perceptron() -> nn.Module:
    """With hidden units."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(40693)
        return nn.Sequential(nn.Linear(DIMS, 4), nn.ReLU(), nn.Linear(4, 3))


def vector_of_model(model: nn.Module) -> SecureSum:
    vector = plan_of(model).mechanism.participation.vector
    assert vector is not None
    return vector


def plan_of(model: nn.Module) -> Plan:
    return Plan(RUN, num_params=params_of(model).numel())


def sequential(
    model: nn.Module, shares: Shares, params: Tensor, number: int, *, source: RandomSource
) -> UnopenedSum:
    """What nodes do, each by itself."""
    vector, asked = vector_of_model(model), request(RUN, number)
    total = torch.zeros(vector.length, dtype=torch.int64)
    for name, share in enumerate(shares):
        own = source.child("client", number, name)
        total += Client(model, share, None, ClientPolicy(), own).vector(
            work_of(asked), params, vector
        )
    return UnopenedSum(lambda: vector.centred(total), len(shares))


def together(model: nn.Module, shares: Shares, params: Tensor, number: int) -> UnopenedSum:
    """What the simulation does for many clients at once."""
    layers, vector = sequence_of(nn.Sequential(model), (DIMS,)), vector_of_model(model)
    whole = Examples(
        torch.cat([each.inputs for each in shares]), torch.cat([each.targets for each in shares])
    )
    rows = torch.split(torch.arange(len(whole)), [len(each) for each in shares])
    plan, data, held = (
        Plan(RUN),
        shared_examples(whole, torch.device("cpu")),
        PartitionedExamples.of(rows),
    )
    engine = Engine(
        plan.settings.seed, plan.mechanism, data, held, layers, chunk=3, workers=1, vector=vector
    )
    with BatchedTransport(plan, engine, accounts=None) as transport:
        clear = UnmaskedSum(transport, vector, 3)
        (unopened,) = clear.ask(
            TrainRequest(number, math.inf, transport.plan.run), params, range(3)
        )
        return unopened


def rounds(shares: Shares, source: RandomSource, *, engine: str, model: nn.Module) -> list[object]:
    """Everything that the server learns of a run."""
    plan = plan_of(model)
    state, left = initial_state(params_of(model), clip_norm=math.inf), list[object]()
    for number in range(1, ROUNDS + 1):
        ask = together if engine == "together" else partial(sequential, source=source)
        unopened = ask(model, shares, state.params, number)
        state, metrics = round_of(
            plan.mechanism, state, [unopened], source, optimizer=plan.optimizer
        )
        left += [state, metrics]
    return left


ENGINES = ("sequential", "together")


def cancelling(dtype: torch.dtype = torch.float32, *, half: int = 32) -> nn.Module:
    """What a server may choose: hidden units twice, whose huge weights cancel, so that rounding
    alone decides."""
    draws = torch.Generator().manual_seed(40693)
    order, first = torch.randperm(half, generator=draws), torch.randn(half, DIMS, generator=draws)
    second = torch.randn(3, half, generator=draws) / torch.finfo(dtype).eps
    model = nn.Sequential(nn.Linear(DIMS, 2 * half), nn.Tanh(), nn.Linear(2 * half, 3))
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
        model[0].weight.copy_(torch.cat([first, first[order]]))
        model[2].weight.copy_(torch.cat([second, -second[:, order]], 1))
    return model


OTHERS = [examples(6, seed=1), examples(3, seed=2)]
CROWD = Examples(torch.full((2 * PUBLIC, DIMS), 1e4), torch.zeros(2 * PUBLIC, dtype=torch.int64))
DATA_OWNERS = {
    "one with others": examples(5, seed=3),
    "empty": examples(0),
    "one with too many": CROWD,
}
ORDINARY = examples(1, seed=50021)


def scaled(factor: float) -> Examples:
    return Examples(factor * ORDINARY.inputs, ORDINARY.targets)


def flipped(share: Examples) -> Examples:
    """Its first example with another label."""
    return Examples(share.inputs[:1], (share.targets[:1] + 1) % 3)


def mistaken(factor: float) -> Examples:
    """An example with a label that the first model is wrong about."""
    inputs = factor * ORDINARY.inputs
    return Examples(inputs, (linear()(inputs).argmax(dim=1) + 1) % 3)


WORST = {
    **{
        name: scaled(factor)
        for name, factor in {"ordinary": 1.0, "huge": 1e6, "overflow": 1e38, "zero": 0.0}.items()
    },
    **{name: scaled(factor) for name, factor in {"NaN": math.nan, "infinite": math.inf}.items()},
    "flipped": flipped(DATA_OWNERS["one with others"]),
    "huge and mistaken": mistaken(1e9),
}


def joined(share: Examples, more: Examples) -> Examples:
    return Examples(
        torch.cat([share.inputs, more.inputs]), torch.cat([share.targets, more.targets])
    )


def found_by(one: Shares, other: Shares, engine: str, **how: float) -> Replay:
    return replay(partial(rounds, engine=engine, model=linear()), one, other, **how)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("data_owner", DATA_OWNERS.values(), ids=DATA_OWNERS.keys())
@pytest.mark.parametrize("worst", WORST.values(), ids=WORST.keys())
def test_one_example_more_or_less_moves_a_shared_step_within_its_sensitivity(
    engine: str, data_owner: Examples, worst: Examples
) -> None:
    there, gone = [*OTHERS, joined(data_owner, worst)], [*OTHERS, data_owner]
    vector = vector_of_model(linear())
    for one, other in ((there, gone), (gone, there)):
        found = found_by(one, other, engine)
        assert found.faults == ()
        assert len(found.shares) == ROUNDS
        cost = vector.sensitivity_squared / (vector.summands * vector.variance)
        assert found.gaussian_distance <= math.sqrt(ROUNDS * cost) * (1 + 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "data_owner",
    [DATA_OWNERS["one with others"], DATA_OWNERS["empty"]],
    ids=["with others", "empty"],
)
def test_a_huge_example_costs_all_that_the_event_of_a_shared_step_says(
    engine: str, data_owner: Examples
) -> None:
    found = found_by(
        [*OTHERS, joined(data_owner, WORST["huge and mistaken"])], [*OTHERS, data_owner], engine
    )
    # What truncation and float64 may add is counted: 7 of 8199 steps of this model.
    assert found.shares[0] == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flipped_label_replaces_an_example_which_is_two_steps_of_the_guarantee(
    engine: str,
) -> None:
    found = found_by(
        [*OTHERS, mistaken(1e4)], [*OTHERS, flipped(mistaken(1e4))], engine, sensitivities=2.0
    )
    assert found.faults == ()
    assert found.shares[0] > 0.45


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("worst", WORST.values(), ids=WORST.keys())
def test_of_a_model_with_hidden_units_too(engine: str, worst: Examples) -> None:
    there, gone = (
        [*OTHERS, joined(DATA_OWNERS["one with others"], worst)],
        [*OTHERS, DATA_OWNERS["one with others"]],
    )
    assert replay(partial(rounds, engine=engine, model=perceptron()), there, gone).faults == ()


@pytest.mark.parametrize("others", [1, 3])
def test_parameters_that_cancel_do_not_make_the_gradients_of_others_round_otherwise(
    others: int,
) -> None:
    data_owner, model = examples(others, seed=4), cancelling(torch.float64)
    there, gone = [*OTHERS, joined(data_owner, ORDINARY)], [*OTHERS, data_owner]
    assert replay(partial(rounds, engine="sequential", model=model), there, gone).faults == ()


def test_a_batch_of_one_runs_the_kernels_of_a_larger_one() -> None:
    model, data = cancelling(), examples(2, seed=4)
    sums = [
        clipped_gradient_sum(
            model, data.inputs[:count], targets=data.targets[:count], clip_norm=0.5
        )[0]
        for count in (1, 2)
    ]
    assert float((sums[1] - sums[0]).double().norm()) <= 0.5 * (1 + 1e-5)


def vector_of(model: nn.Module, share: Examples, policy: ClientPolicy | None = None) -> Tensor:
    """What a node's vector is, with the same noise each time."""
    vector = vector_of_model(model)
    source = seeded_source(40693).child("client", 1)
    node = Client(model, share, None, policy or ClientPolicy(), source)
    return vector.centred(node.vector(work_of(request(RUN, 1)), params_of(model), vector))


@pytest.mark.parametrize(
    ("count", "policy"),
    [(16 * PUBLIC, ClientPolicy()), (5 * PUBLIC, ClientPolicy(max_steps=5))],
    ids=["batches", "steps"],
)
def test_no_number_of_examples_silences_all_others(count: int, policy: ClientPolicy) -> None:
    draws = torch.Generator().manual_seed(40693)
    alike = 3 + 0.01 * torch.randn(count + 2, DIMS, generator=draws)
    zeros = torch.zeros(count + 2, dtype=torch.int64)
    vectors = [
        vector_of(linear(), Examples(alike[:n], zeros[:n]), policy)
        for n in range(count - 1, count + 3)
    ]
    most = math.sqrt(vector_of_model(linear()).sensitivity_squared)
    moved = [float((b - a).double().norm()) for a, b in itertools.pairwise(vectors)]
    assert max(moved) <= most
    assert min(moved) > 0  # each example counts


class Raising(nn.Module):
    """A site's model that fails for a large input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        if float(inputs.abs().max()) > 1e20:
            raise RuntimeError("out of range")
        found: Tensor = self.inner(inputs)
        return found


def test_an_example_that_fails_moves_no_bit_of_the_others() -> None:
    model, data_owner = Raising(cancelling(torch.float64)), examples(8, seed=4)
    without = vector_of(model, data_owner)
    for there in (joined(data_owner, scaled(1e30)), joined(scaled(1e30), data_owner)):
        assert torch.equal(vector_of(model, there), without)
