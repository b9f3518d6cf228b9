"""Every mechanism of Discreet, replayed on neighbouring inputs: see tests/replay.py for what is
compared."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor

from discreet.accounting.events import fixed_size_round_event
from discreet.data.examples import Examples
from discreet.mechanisms.central_gaussian import CentralGaussian
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.mechanisms.local_noise import release_step
from discreet.mechanisms.masked_sums import MaskedGaussian
from discreet.mechanisms.sums import UnopenedSum, UpdateRows
from discreet.node.client import ExactReply, noised_vector
from discreet.node.work import work_of
from discreet.planning.server_optimizer import ServerSGD
from discreet.planning.state import State, initial_state
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainReply
from discreet.settings.settings import Settings
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from tests.mechanisms.made import central, masked
from tests.node.clients import EXAMPLE, OFF, client, config, examples, linear, params_of, request
from tests.replay import Replay, replay
from tests.rounds import round_of
from tests.sequences import BUILDERS, built, sequences

C, Z = 0.5, 1.3
Updates = list[TrainReply]

KINDS = {
    "fixed clip": central(Z),
    "adaptive clip": central(Z, 4.0),
    "on the grid": central(Z, 4.0, "grid"),
    "secure sum": central(Z, 4.0, "secure_sum"),
}
kinds = pytest.mark.parametrize("user", KINDS.values(), ids=KINDS.keys())

WILD = {
    "at the clip norm": torch.tensor([0.3, -0.4, 0.0]),
    "huge": torch.tensor([1e30, -1e30, 1e30]),
    "zero": torch.zeros(3),
    "NaN": torch.tensor([math.nan, 0.1, 0.1]),
    "infinite": torch.tensor([math.inf, 0.1, -math.inf]),
    "half precision": torch.tensor([6e4, 1.0, -6e4], dtype=torch.float16),
    "double precision": torch.tensor([1e300, 1e-300, 0.1], dtype=torch.float64),
}
wild = pytest.mark.parametrize("update", WILD.values(), ids=WILD.keys())

OTHERS = [
    TrainReply(1, torch.tensor([0.1, 0.2, -0.3]), below=True),
    TrainReply(1, torch.full((3,), 9.0), below=False),
]


def rounds(
    user: CentralGaussian, updates: Updates, source: RandomSource, *, number: int = 1
) -> list[object]:
    """Everything that rounds with these clients release, but the number of replies, which is not
    covered."""
    state, left = initial_state(torch.zeros(3), clip_norm=C), list[object]()
    for index in range(number):
        state, metrics = round_of(
            user, state, updates, source.child(index), optimizer=ServerSGD(0.7, momentum=0.9)
        )
        left += [state, replace(metrics, replies=0)]
    return left


def add_and_remove(user: CentralGaussian, who: TrainReply, *, number: int = 1) -> list[Replay]:
    with_it, without = [*OTHERS, who], list(OTHERS)
    pairs = [(with_it, without), (without, with_it), ([who], [])]
    return [
        replay(lambda u, s: rounds(user, u, s, number=number), one, other) for one, other in pairs
    ]


@kinds
@wild
@pytest.mark.parametrize("below", [True, False])
def test_one_client_more_or_less_moves_update_and_bits_within_their_sensitivities(
    user: CentralGaussian, update: Tensor, below: bool
) -> None:
    for found in add_and_remove(user, TrainReply(1, update, below)):
        assert found.faults == ()
        # what the round's event says both cost together
        assert found.gaussian_distance <= (1 + 1e-9) / Z


@kinds
def test_the_worst_client_costs_all_that_the_event_says(user: CentralGaussian) -> None:
    for found in add_and_remove(user, TrainReply(1, WILD["huge"], below=False)):
        # Updates on the grid are truncated towards zero, by less than 1 part in 1000.
        assert found.shares == pytest.approx([1.0] * len(found.shares), rel=1e-3)
        assert found.gaussian_distance == pytest.approx(1 / Z, rel=1e-3)


@kinds
@wild
def test_over_rounds_in_which_the_clip_norm_moves_each_step_keeps_to_its_sensitivity(
    user: CentralGaussian, update: Tensor
) -> None:
    for found in add_and_remove(user, TrainReply(1, update, below=False), number=3):
        assert found.faults == ()
        assert len(found.shares) == (6 if user.run.user.adaptive else 3)


def test_many_clients_at_once_are_summed_as_sequentially() -> None:
    rows = torch.stack(
        [update.update for update in [*OTHERS, TrainReply(1, WILD["huge"], below=True)]]
    )
    bits = torch.tensor([True, False, True])

    def run(count: int, source: RandomSource) -> list[object]:
        state, how = initial_state(torch.zeros(3), clip_norm=C), KINDS["on the grid"]
        part = how.add_up([UpdateRows(rows[:count], bits[:count])], state).part()
        state, _ = round_of(how, state, [part], source)
        return [state]

    assert replay(run, 3, 2).faults == ()


@kinds
@wild
def test_in_fixed_size_cohorts_replacing_a_client_moves_the_sum_by_two_clip_norms(
    user: CentralGaussian, update: Tensor
) -> None:
    one, other = (
        [*OTHERS, TrainReply(1, sign * update, below)] for sign, below in ((1, True), (-1, False))
    )
    found = replay(
        lambda updates, source: rounds(user, updates, source), one, other, sensitivities=2.0
    )
    assert found.faults == ()
    # That is why the event of such a round holds half the noise multiplier.
    event = fixed_size_round_event(3, population_size=10, noise_multiplier=Z)
    assert found.gaussian_distance <= (1 + 1e-9) / event.event.noise_multiplier


MASKED_MODEL = masked(Z, 4.0, nodes=3, size=params_of(linear()).numel())
MASKED = {
    "fixed clip": masked(Z, nodes=5, size=3),
    "adaptive clip": masked(Z, 4.0, nodes=5, size=3),
    "with answers": masked(Z, 4.0, nodes=5, size=3, answers=2),
}
each_masked = pytest.mark.parametrize("how", MASKED.values(), ids=MASKED.keys())
NOBODY = TrainReply(1, torch.zeros(3), below=False)


def masked_rounds(
    how: MaskedGaussian, updates: Updates, source: RandomSource, *, number: int = 1
) -> list[object]:
    """What the server learns of rounds under secure aggregation; `NOBODY` is a client that is
    zeroed out."""
    vector, optimizer = how.vector, ServerSGD(0.7, momentum=0.9)
    # the first round rates nothing
    state = replace(initial_state(torch.zeros(3), clip_norm=C), round=1)
    left = list[object]()
    for index in range(number):
        total = sum_of_vectors(vector, updates, state.clip_norm, source.child(index))
        unopened = UnopenedSum(partial(vector.centred, total), len(updates))
        state, metrics = round_of(how, state, [unopened], source, optimizer=optimizer)
        left += [state, metrics]
    return left


def sum_of_vectors(
    vector: SecureSum, updates: Updates, clip_norm: float, source: RandomSource
) -> Tensor:
    total = torch.zeros(vector.length, dtype=torch.int64)
    for number, who in enumerate(updates):
        answer = (
            who.update.new_full((2,), 9.0) if vector.answer_length and who is not NOBODY else None
        )
        below = None if who is NOBODY or not vector.bit_steps else who.below
        encoded = vector.encode(
            None if who is NOBODY else who.update, clip_norm, below=below, answer=answer
        )
        total += encoded + vector.noise(source.child("client", number))
    return total


@each_masked
@wild
@pytest.mark.parametrize("below", [True, False])
def test_zeroing_out_a_client_moves_a_masked_sum_within_its_sensitivity(
    how: MaskedGaussian, update: Tensor, below: bool
) -> None:
    there, gone = [*OTHERS, TrainReply(1, update, below)], [*OTHERS, NOBODY]
    for one, other in ((there, gone), (gone, there)):
        found = replay(lambda u, s: masked_rounds(how, u, s, number=3), one, other)
        assert found.faults == ()
        assert len(found.shares) == 3
        vector = how.vector
        cost = vector.sensitivity_squared / (vector.summands * vector.variance)
        assert found.gaussian_distance <= math.sqrt(3 * cost) * (1 + 1e-9)


@each_masked
def test_the_worst_client_costs_all_that_the_event_of_a_masked_sum_says(
    how: MaskedGaussian,
) -> None:
    update, answered = torch.tensor([30.0, 0.0, 0.0]), how.vector.answer_length > 0
    found = replay(
        partial(masked_rounds, how), [*OTHERS, TrainReply(1, update, False)], [*OTHERS, NOBODY]
    )
    # Update and answer are truncated towards zero, by less than 1 part in 1000; the event is of the
    # whole.
    assert found.shares == pytest.approx([1.0], rel=2e-3)
    assert answered or found.gaussian_distance == pytest.approx(1 / Z, rel=5e-3)


def masked_federation(shares: list[Examples | None], source: RandomSource) -> list[object]:
    """A whole round: every client trains, clips, goes on the grid and adds noise; None is one that
    is zeroed out."""
    run, params, vector = (
        config(*OFF, "training.epochs=2"),
        params_of(linear()),
        MASKED_MODEL.vector,
    )
    asked, total = request(run, clip_norm=C), torch.zeros(vector.length, dtype=torch.int64)
    for number, share in enumerate(shares):
        own = source.child("client", number)
        if share is None:
            total += vector.encode(None, C) + vector.noise(own)
        else:
            reply = client(share, source=own).answer(work_of(asked), params)
            total += noised_vector(vector, ExactReply(reply.update, reply.below), asked, own)
    state = State(0, params, torch.zeros_like(params), C)
    return list(
        round_of(MASKED_MODEL, state, [UnopenedSum(lambda: vector.centred(total), 3)], source)
    )


def test_a_whole_masked_round_from_the_clients_data_to_the_servers_model() -> None:
    three = shares_of(3)
    outlier = Examples(three[2].inputs * 1e6, three[2].targets)
    for last in (three[2], outlier):
        found = replay(masked_federation, [*three[:2], last], [*three[:2], None])
        assert found.faults == ()
        assert found.shares[0] > 0.2


def shares_of(count: int) -> list[Examples]:
    return [examples(6, seed=number) for number in range(1, count + 1)]


def federation(shares: list[Examples], source: RandomSource) -> list[object]:
    """A whole round: every client trains, clips and sends its bit, and the server does the rest."""
    run, params, updates = config(*OFF, "training.epochs=2"), params_of(linear()), []
    for number, share in enumerate(shares):
        reply = client(share, source=source.child("client", number)).answer(
            work_of(request(run, clip_norm=C)), params
        )
        updates.append(TrainReply(1, reply.update, reply.below))
    state = State(0, params, torch.zeros_like(params), C)
    state, metrics = round_of(KINDS["on the grid"], state, updates, source.child("server"))
    return [state, replace(metrics, replies=0)]


def test_a_whole_round_from_the_clients_data_to_the_servers_model() -> None:
    three = shares_of(3)
    removed = replay(federation, three, three[:2])
    assert removed.faults == ()
    assert removed.shares[0] > 0.2
    outlier = Examples(three[2].inputs * 1e6, three[2].targets)
    assert replay(federation, [*three[:2], outlier], three[:2]).faults == ()
    assert replay(federation, three, [*three[:2], outlier], sensitivities=2.0).faults == ()


WILD_EXAMPLES = {"ordinary": 1.0, "outlier": 1e6, "overflow": 1e38, "NaN": math.nan, "zero": 0.0}
wild_examples = pytest.mark.parametrize("factor", WILD_EXAMPLES.values(), ids=WILD_EXAMPLES.keys())


def with_example(data: Examples, factor: float) -> Examples:
    more = examples(1, seed=50021)
    return Examples(
        torch.cat([data.inputs, factor * more.inputs]), torch.cat([data.targets, more.targets])
    )


def dp_sgd(
    data: Examples, source: RandomSource, *, batch_size: int = 8, declared: int | None = None
) -> Tensor:
    how = LocalSettings(3, batch_size, 0.5, 0.9, ExamplePrivacy(C, Z, public_num_examples=declared))
    return local_update(linear(), params_of(linear()), data, settings=how, source=source)


def check_steps(found: Replay, steps: int) -> None:
    assert found.faults == ()
    assert len(found.shares) == steps
    assert found.gaussian_distance <= math.sqrt(steps) / Z * (1 + 1e-6)


@wild_examples
@pytest.mark.parametrize("batch_size", [8, 3])
def test_zeroing_out_an_example_moves_each_dp_sgd_step_within_the_clip_norm(
    factor: float, batch_size: int
) -> None:
    # An example whose gradient is not finite is clipped to zero: n stays, and it contributes
    # nothing.
    there, zeroed = with_example(examples(6), factor), with_example(examples(6), math.nan)
    for one, other in ((there, zeroed), (zeroed, there)):
        found = replay(partial(dp_sgd, batch_size=batch_size), one, other)
        check_steps(found, 3 if batch_size == 8 else 9)


OWNERS = torch.tensor([0, 0, 1, 2, 2, 2, 3])
BY_OWNER = LocalSettings(3, 2, 0.5, 0.9, ExamplePrivacy(C, Z, rows_per_owner=3))


def by_owner(data: Examples, source: RandomSource) -> Tensor:
    return local_update(linear(), params_of(linear()), data, settings=BY_OWNER, source=source)


def with_owner(factor: float) -> Examples:
    # Five owners, of whom the last one has four rows.
    rest = examples(7)
    more = examples(4, seed=50021)
    owners = torch.cat([OWNERS, torch.full((4,), 4)])
    inputs = torch.cat([rest.inputs, factor * more.inputs])
    return Examples(inputs, torch.cat([rest.targets, torch.zeros(4).long()]), owners)


@wild_examples
def test_an_owner_whose_rows_contribute_nothing_moves_each_step_within_the_clip(
    factor: float,
) -> None:
    there, zeroed = with_owner(factor), with_owner(math.nan)
    for one, other in ((there, zeroed), (zeroed, there)):
        found = replay(by_owner, one, other)
        check_steps(found, 9)
    if factor == 1e6:
        assert max(found.shares) == pytest.approx(1.0, rel=1e-4)
    replaced = replay(by_owner, there, with_owner(-1.0), sensitivities=2.0)
    assert replaced.faults == ()


@wild_examples
@pytest.mark.parametrize("count", [0, 6, 9])
def test_with_a_declared_number_one_example_more_moves_each_step_within_the_clip(
    factor: float, count: int
) -> None:
    # 3 epochs of batches of 3 expected of 9 declared, also for a client that has none, and for one
    # that has more.
    data, run = examples(count), partial(dp_sgd, batch_size=3, declared=9)
    more = with_example(data, factor)
    check_steps(replay(run, data, more), 9)
    check_steps(replay(run, more, data), 9)


def test_without_a_declared_number_a_removal_changes_the_chances_of_all_others() -> None:
    # So the guarantee is zero-out: what a removal costs is in tests/node/test_adjacency.py.
    found = replay(partial(dp_sgd, batch_size=3), examples(6), with_example(examples(6), 0.0))
    assert any("the totals differ by" in fault for fault in found.faults)


def tagging(data: Examples, source: RandomSource, *, how: str, scale: float) -> Tensor:
    model = built(how)
    return local_update(model, scale * params_of(model), data, settings=SEQUENCES, source=source)


SEQUENCES = LocalSettings(3, 3, 0.5, 0.9, ExamplePrivacy(C, Z))


@pytest.mark.parametrize("how", BUILDERS)
@pytest.mark.parametrize(("longest", "scale"), [(1, 1.0), (6, 30.0)])
def test_a_sequence_of_padding_alone_instead_moves_each_step_within_the_clip(
    how: str, longest: int, scale: float
) -> None:
    # How many positions count differs, and with it nothing of the others: each divides by its own.
    rest, more = sequences(6), sequences(1, longest=longest)
    there, zeroed = (
        Examples(torch.cat([rest.inputs, one.inputs]), torch.cat([rest.targets, one.targets]))
        for one in (more, sequences(1, longest=0))
    )
    for one, other in ((there, zeroed), (zeroed, there)):
        found = replay(partial(tagging, how=how, scale=scale), one, other)
        check_steps(found, 9)
        assert max(found.shares) > 0.5


def test_an_outlier_puts_the_clip_of_dp_sgd_to_the_test() -> None:
    zeroed = with_example(examples(6), math.nan)
    assert replay(dp_sgd, zeroed, with_example(examples(6), 1e6)).shares == pytest.approx(
        [1.0] * 3, rel=1e-4
    )
    removed = replay(partial(dp_sgd, declared=8), examples(6), with_example(examples(6), 1e6))
    assert removed.shares == pytest.approx([1.0] * 3, rel=1e-4)


def dp_sgd_client(data: Examples, source: RandomSource, *words: str) -> object:
    run = config(*EXAMPLE, "training.epochs=3", "training.batch_size=8", *words)
    with TemporaryDirectory() as folder:
        who = client(data, Path(folder) / "ledger.db", source=source)
        return who.answer(work_of(request(run, clip_norm=C)), params_of(linear()))


@wild_examples
def test_a_client_with_dp_sgd_sends_nothing_beside_what_was_noised(factor: float) -> None:
    there, zeroed = with_example(examples(6), factor), with_example(examples(6), math.nan)
    assert replay(dp_sgd_client, there, zeroed).faults == ()


@wild_examples
@pytest.mark.parametrize("count", [0, 8])
def test_with_a_declared_number_the_number_of_examples_is_not_to_be_seen(
    factor: float, count: int
) -> None:
    def answer(data: Examples, source: RandomSource) -> object:
        return dp_sgd_client(data, source, "data.public_num_examples=16")

    found = replay(answer, examples(count), with_example(examples(count), factor))
    assert found.faults == ()
    assert len(found.shares) == 6


def test_the_number_of_steps_reveals_the_number_of_examples_which_counts_as_public() -> None:
    # docs/privacy.md says so under "not covered": with 9 examples in batches of 8 there are two
    # steps an epoch.
    (fault, *_) = replay(dp_sgd, examples(8), with_example(examples(8), 1.0)).faults
    assert fault == "noise was drawn 3 times for one input and 6 times for the other"


def local_round(run: Settings, data: Examples, source: RandomSource) -> object:
    with TemporaryDirectory() as folder:
        who = client(data, Path(folder) / "ledger.db", source=source)
        return who.answer(work_of(request(run)), params_of(linear()))


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@wild_examples
def test_replacing_all_data_of_a_client_moves_its_update_by_twice_the_clip_norm(
    kind: str, factor: float
) -> None:
    run = config(
        *OFF,
        f"privacy.local.kind={kind}",
        "privacy.local.noise_multiplier=2",
        "privacy.local.clip_norm=0.1",
    )
    other = Examples(factor * examples(9, seed=77).inputs, examples(9, seed=77).targets)
    assert (
        replay(lambda data, source: local_round(run, data, source), examples(6), other).faults == ()
    )


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("noise", ["float", "grid"])
def test_opposite_updates_put_the_local_clip_to_the_test(kind: str, noise: str) -> None:
    privacy, update = LocalPrivacy(kind, C, Z, noise), torch.tensor([30.0, -4.0, 5.0])
    found = replay(lambda u, source: release_update(u, privacy, source=source), update, -update)
    assert found.faults == ()
    assert found.shares == pytest.approx([1.0], rel=2e-3)


def laplace_step(data: Examples, source: RandomSource) -> Tensor:
    privacy, model = LocalPrivacy("laplace_step", C, Z), linear()
    return release_step(
        model, data, training=LocalSettings(1, 1, 0.3, 0.0), privacy=privacy, source=source
    )


@wild_examples
def test_replacing_one_example_moves_a_laplace_step_by_two_eta_c_over_n(factor: float) -> None:
    one, other = with_example(examples(6), 1.0), with_example(examples(6), factor)
    assert replay(laplace_step, one, other).faults == ()


def test_opposite_examples_put_the_clip_of_a_laplace_step_to_the_test() -> None:
    rest = examples(6)
    inputs = torch.full((1, 5), 1e4)
    one, other = (
        Examples(
            torch.cat([rest.inputs, sign * inputs]),
            torch.cat([rest.targets, torch.zeros(1, dtype=torch.int64)]),
        )
        for sign in (1.0, -1.0)
    )
    assert replay(laplace_step, one, other).shares[0] > 0.4
