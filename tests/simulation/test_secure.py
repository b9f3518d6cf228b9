"""Secure aggregation in a simulation: the integers that masks would hide, the clients' own noise,
and what it costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from discreet.accounting.accounting import epsilon_spent
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import Stage
from discreet.mechanisms.mechanism import releases_of
from discreet.mechanisms.sums import PartialReply, UnopenedSum
from discreet.planning.plan import Plan
from discreet.planning.state import Outcome, State
from discreet.privacy.secure_grid import SecureCohort, SecureSum, example_secure_sum
from discreet.protocol.messages import TrainRequest
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.server.session import Session, prepare, training_run
from discreet.server.transport import Failure, NobodyAnswers, RoundAbandoned, Transport
from discreet.settings.rules import ConfigError
from discreet.simulation.cohort import masked_vector
from discreet.simulation.in_process import InProcessTransport, UnmaskedSum, simulate
from tests.masking.federation import federation, terms_of

NODES, DROPOUTS = 5, 1
BASE = (
    "sampling.kind=everyone",
    "privacy.accountant=rdp",
    f"data.num_clients={NODES}",
    "model.name=linear",
    "rounds=3",
    "training.epochs=1",
    "training.batch_size=64",
    "seed=55147",
    "privacy.user.too_noisy=warn",
    "engine=sequential",
    "privacy.user.noise_multiplier=1",
)
SECURE = (
    *BASE,
    "privacy.user.aggregation=secure",
    f"privacy.secure.dropouts={DROPOUTS}",
)
RATED = ("evaluation.kind=private", "evaluation.every=2", "evaluation.noise_multiplier=2")


def run(folder: Path, *words: str) -> Outcome:
    return simulate(*load_asked([*SECURE, *words, f"output_dir={folder}"]))


def ledger(folder: Path) -> DurableLedger:
    return DurableLedger(folder / "ledger.db")


@dataclass(frozen=True)
class Losing:
    """Virtual clients of which some are lost in some rounds."""

    inner: Transport
    lost: dict[int, set[int]]

    def available_clients(self) -> Sequence[int]:
        return self.inner.available_clients()

    def ask(self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]) -> Iterator[Any]:
        gone = self.lost.get(asked.round, set())
        yield from (Failure(client, "late", "gone") for client in sorted(gone))
        left = [client for client in cohort if client not in gone]
        yield from self.inner.ask(asked, params, left)


class Masked:
    """What `UnmaskedSum` adds up, under masks: a server and a node for each client, all in this
    process."""

    makes_sums = True

    def __init__(self, inner: Losing, vector: SecureSum) -> None:
        self.inner, self.vector, self.round = inner, vector, 0
        terms = terms_of(
            NODES, dropouts=DROPOUTS, colluding=1, length=vector.length, bits=vector.bits
        )
        self.federation = federation(terms)

    def available_clients(self) -> Sequence[int]:
        return self.inner.available_clients()

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterator[Failure | UnopenedSum]:
        replies = list(self.inner.ask(asked, params, cohort))
        failures = [reply for reply in replies if isinstance(reply, Failure)]
        alive = [
            client for client in cohort if client not in {failure.client for failure in failures}
        ]
        parts = [reply.values for reply in replies if isinstance(reply, PartialReply)]
        vectors = {
            f"node-{client:02d}": part.numpy() for client, part in zip(alive, parts, strict=True)
        }
        self.round += 1
        yield from failures
        yield UnopenedSum(lambda: self._opened(vectors), len(vectors))

    def _opened(self, vectors: dict[str, Any]) -> Tensor:
        self.federation.vectors = vectors
        gone = frozenset(self.federation.nodes) - vectors.keys()
        opened = self.federation.sum(
            self.round, dict.fromkeys({*Stage} - {Stage.KEYS, Stage.SHARES}, gone)
        )
        assert set(opened.names) == vectors.keys()
        return self.vector.centred(torch.from_numpy(opened.total))


def last_of(folder: Path, words: Sequence[str], kind: Any) -> State:
    asked = load_asked([*SECURE, *words, f"output_dir={folder}"])
    with ExitStack() as held:
        session = prepare(*asked, simulated=True, held=held)
        vector = masked_vector(session.plan)
        inner = Losing(InProcessTransport(session.plan, str(folder), vector), {2: {3}})
        made = kind(inner, vector) if kind is Masked else kind(inner, vector, NODES - DROPOUTS)
        return training_run(session, made).run().checkpoint


@pytest.mark.parametrize("noise", ["1", "0"])
def test_under_masks_a_run_is_the_same_bit_by_bit_a_lost_client_included(
    tmp_path: Path, noise: str
) -> None:
    words = (f"privacy.user.noise_multiplier={noise}", *RATED, "evaluation.cohort=same")
    masked, clear = (
        last_of(tmp_path / "masked", words, Masked),
        last_of(tmp_path / "clear", words, UnmaskedSum),
    )
    assert torch.equal(masked.params, clear.params)
    assert masked.clip_norm == clear.clip_norm
    rows = [RunFolder(tmp_path / name).read_metrics() for name in ("masked", "clear")]
    assert [row["accuracy"] for row in rows[0]] == [row["accuracy"] for row in rows[1]]
    assert [row["replies"] for row in rows[0]] == [5, 4, 5]


def test_without_noise_the_sum_is_the_plain_sum_on_the_grid_bit_by_bit(tmp_path: Path) -> None:
    words = [
        "privacy.user.noise_multiplier=0",
        "privacy.user.clip.kind=fixed",
        "privacy.user.clip.norm=0.5",
    ]
    secure = run(tmp_path / "secure", *words).checkpoint
    plain = simulate(*load_asked([*BASE, *words, f"output_dir={tmp_path / 'plain'}"])).checkpoint
    assert torch.equal(secure.params, plain.params)


def test_the_noise_in_the_model_is_that_of_all_clients(tmp_path: Path) -> None:
    words = ["rounds=1", "privacy.user.clip.kind=fixed", "privacy.user.clip.norm=0.3"]
    words += ["server.learning_rate=1", "server.momentum=0"]
    noised, clear = (
        run(tmp_path / z, *words, f"privacy.user.noise_multiplier={z}").checkpoint for z in "40"
    )
    # 650 values: their root mean square is within 25 % but with a chance below 1e-12; the noise of
    # h alone has 0.77.
    found = float((noised.params - clear.params).square().mean().sqrt())
    assert found == pytest.approx(4 * math.sqrt(NODES / 3) * 0.3 / NODES, rel=0.15)


def test_a_target_is_reached_at_the_planned_round_and_never_passed(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, "privacy.user.noise_multiplier=null", "privacy.user.target_epsilon=3", *RATED
    )
    assert outcome.stopped is None
    assert 0.999 * 3 <= ledger(tmp_path).spent("user").epsilon(1e-3, "rdp") <= 3


def test_the_ledger_holds_what_was_planned(tmp_path: Path) -> None:
    run(tmp_path, *RATED, "evaluation.cohort=same")
    config = RunFolder(tmp_path).read_config()
    spent = ledger(tmp_path).spent("user")
    planned = releases_of(Plan(config).mechanism, Plan(config).run, 3)
    assert sorted(count for _, count in spent.entries) == [1, 1, 2]
    assert spent.epsilon(1e-3, "rdp") == pytest.approx(sum_of(planned), rel=1e-4)


def sum_of(releases: Any) -> float:
    """By zero-concentrated privacy: noise multipliers' inverse squares add up, and RDP turns that
    into epsilon."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    rho = sum(
        count * event.sensitivity_squared / (event.summands * event.variance)
        for event, count in releases
    )
    return float(RdpAccountant().compose(GaussianDpEvent(rho**-0.5)).get_epsilon(1e-3))


def test_the_budget_ends_the_run_before_the_round_that_would_pass_it(tmp_path: Path) -> None:
    outcome = run(tmp_path, "rounds=50", "privacy.user.max_epsilon=6")
    spent = ledger(tmp_path).spent("user")
    assert "privacy.user.max_epsilon=6" in str(outcome.stopped)
    assert spent.epsilon(1e-3, "rdp") <= 6 < spent.record(spent.entries[0][0]).epsilon(1e-3, "rdp")
    assert spent.num_releases == outcome.checkpoint.round


def ready(folder: Path, held: ExitStack, *words: str) -> Session:
    return prepare(
        *load_asked([*SECURE, *words, f"output_dir={folder}"]), simulated=True, held=held
    )


@dataclass
class Fragile:
    """Abandons rounds before or while they are opened, as often as it is told."""

    inner: Transport
    before: int = 0
    opening: int = 0
    makes_sums = True

    def available_clients(self) -> Sequence[int]:
        return self.inner.available_clients()

    def ask(self, *given: Any) -> Iterator[Failure | UnopenedSum]:
        if self.before:
            self.before -= 1
            raise RoundAbandoned("3 of 5 clients are left", [Failure(1, "late", "gone")])
        *failures, unopened = self.inner.ask(*given)
        yield from failures
        yield UnopenedSum(lambda: self._open(unopened), unopened.replies)

    def _open(self, unopened: UnopenedSum) -> Tensor:
        if self.opening:
            self.opening -= 1
            raise RoundAbandoned("too few shares")
        return unopened.open()


@pytest.mark.parametrize(
    ("how", "charged"), [({"before": 2}, 3), ({"opening": 2}, 5), ({"before": 3}, 0)]
)
def test_an_abandoned_round_is_repeated_twice_and_charged_only_if_it_was_to_open(
    tmp_path: Path, how: dict[str, int], charged: int
) -> None:
    with ExitStack() as held:
        session = ready(tmp_path / "run", held)
        vector = masked_vector(session.plan)
        inner = InProcessTransport(session.plan, str(session.folder.path), vector)
        ready_run = training_run(
            session, Fragile(UnmaskedSum(inner, vector, NODES - DROPOUTS), **how)
        )
        if charged:
            assert ready_run.run().checkpoint.round == 3
        else:
            with pytest.raises(
                NobodyAnswers, match="round 1 was abandoned 3 times: 3 of 5 clients are left"
            ):
                ready_run.run()
    assert ledger(tmp_path / "run").spent("user").num_releases == charged


def test_a_sum_of_fewer_clients_than_may_be_left_is_not_opened(tmp_path: Path) -> None:
    with ExitStack() as held:
        session = ready(tmp_path / "run", held)
        vector = masked_vector(session.plan)
        inner = Losing(
            InProcessTransport(session.plan, str(session.folder.path), vector), {1: {0, 4}}
        )
        clear, params = UnmaskedSum(inner, vector, NODES - DROPOUTS), session.context.state.params
        with pytest.raises(
            RoundAbandoned, match="3 of 5 clients are left, and 4 must be"
        ) as abandoned:
            list(clear.ask(TrainRequest(1, 0.3, session.plan.run), params, range(NODES)))
    assert [failure.client for failure in abandoned.value.failures] == [0, 4]


def test_a_transport_that_reads_updates_is_refused(tmp_path: Path) -> None:
    with ExitStack() as held:
        session = ready(tmp_path / "run", held)
        with pytest.raises(ConfigError, match=r"privacy\.user\.aggregation=secure"):
            training_run(session, InProcessTransport(session.plan, str(tmp_path)))


CLIENTS, ROUNDS, NOISE = 4, 3, 3.0
OF_EXAMPLES = (
    "sampling.kind=everyone",
    "privacy.accountant=rdp",
    f"data.num_clients={CLIENTS}",
    "model.name=linear",
    f"rounds={ROUNDS}",
    "training.epochs=1",
    "training.batch_size=400",
    "training.learning_rate=0.5",
    "seed=55147",
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
    "privacy.example.enabled=true",
    "privacy.example.clip_norm=0.5",
)
SHARED = (*OF_EXAMPLES, "privacy.example.aggregation=secure", "privacy.secure.dropouts=0")
NOISED = (*SHARED, f"privacy.example.noise_multiplier={NOISE}")


def run_shared(folder: Path, *words: str) -> Outcome:
    return simulate(*load_asked([*words, f"output_dir={folder}"]))


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_without_noise_it_is_the_plain_step_of_clients_that_noise_nothing(
    tmp_path: Path, engine: str
) -> None:
    nothing = ("privacy.example.noise_multiplier=0", f"engine={engine}")
    shared = run_shared(tmp_path / "shared", *SHARED, *nothing).checkpoint.params
    plain = run_shared(tmp_path / "plain", *OF_EXAMPLES, *nothing).checkpoint.params
    assert torch.allclose(shared, plain, atol=2e-4)
    assert float(shared.norm()) > 0.1


def test_the_account_is_that_of_the_honest_clients_shares_by_renyi_divergence(
    tmp_path: Path,
) -> None:
    params = run_shared(tmp_path, *NOISED).checkpoint.params.numel()
    expected = example_secure_sum(
        params, SecureCohort(CLIENTS, 3), noise_multiplier=NOISE, largest_sum=400
    ).event_of()
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((expected, ROUNDS),)
    epsilon = epsilon_spent([(expected, ROUNDS)], delta=1e-3, accountant="rdp")
    assert RunFolder(tmp_path).read_metrics()[-1]["epsilon_example"] == pytest.approx(
        epsilon, rel=1e-9
    )
    said = json.loads((tmp_path / "privacy.json").read_text())["guarantees"][1]
    assert said["epsilon"] == {"rdp": pytest.approx(epsilon, rel=1e-9)}
    assert said["adjacency"] == "add or remove one example"
    assert "not the server" in said["trusted"]


def test_the_target_chooses_the_noise_and_is_the_budget_of_a_longer_run(tmp_path: Path) -> None:
    target = (*SHARED, "privacy.example.target_epsilon=2")
    run_shared(tmp_path, *target)
    assert 1.99 < float(RunFolder(tmp_path).read_metrics()[-1]["epsilon_example"] or 0) <= 2.0
    longer = load_asked(
        [*NOISED, "privacy.example.max_epsilon=2", f"output_dir={tmp_path / 'budget'}", "rounds=50"]
    )
    ended = simulate(*longer)
    assert "privacy.example.max_epsilon=2" in ended.stopped
    assert float(RunFolder(tmp_path / "budget").read_metrics()[-1]["epsilon_example"] or 0) <= 2.0


REFUSED = (
    ("training.epochs=2", "training.epochs must be 1 with privacy.example.aggregation=secure"),
    ("training.optimizer=adam", "training.optimizer must be sgd"),
    ("training.weight_decay=0.1", "training.weight_decay must be 0"),
    ("data.public_num_examples=400", "data.public_num_examples must be omitted"),
    ("evaluation.kind=private", "evaluation.kind must be public or none"),
    ("sampling.kind=poisson", "sampling.kind must be everyone"),
    ("privacy.accountant=pld", "privacy.accountant must be rdp"),
    ("privacy.example.enabled=false", "privacy.example.aggregation must be plain"),
)


def test_what_would_not_be_one_plain_step_over_all_examples_is_refused(tmp_path: Path) -> None:
    for word, said in REFUSED:
        with pytest.raises(ConfigError, match=said):
            run_shared(tmp_path, *NOISED, word)
