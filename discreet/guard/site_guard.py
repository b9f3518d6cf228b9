"""The guard of a site: answers a server's messages with the release of its blocks, and with nothing
else."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dp_accounting import DpEvent
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.serde import context_to_proto, message_to_proto

from discreet.accounting.events import PLD
from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of_blocks
from discreet.flower.array_layout import ROUND, ArrayLayout, only_arrays
from discreet.guard.alerts import BUDGET, BUDGET_SHARE, LATE, REFUSED, Alerts
from discreet.guard.block_release import (
    BlockRelease,
    BlockSum,
    Vector,
    drawn_blocks,
    metric_of,
    of_metric,
    read_layout,
)
from discreet.guard.block_task import BlockTask
from discreet.guard.guard_policy import (
    LANDLOCK,
    GuardPolicy,
    GuardTerms,
    MetricSettings,
    check_app,
    check_budget,
    terms_of_run,
)
from discreet.guard.masked_blocks import read_masked
from discreet.guard.reply_slots import ReplySlots
from discreet.guard.sandbox import MOST_LOG, BlockInput, BlockResult, Sandbox
from discreet.guard.scratch import MEGABYTE, free_mb
from discreet.guard.site_blocks import marks_of, read_blocks
from discreet.guard.site_records import note, opened_records, printable
from discreet.guard.site_report import PRIVACY, privacy_facts
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.node.account import Refused
from discreet.node.secure_aggregation import answer_masking
from discreet.privacy.randomness import secure_source
from discreet.protocol.messages import MASKING, MalformedMessage
from discreet.run_files.whole_files import write_json
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet.guard")

TRAIN = "train"
EVALUATE = "evaluate"
MOST_RUNS = 2  # whose blocks' states are kept
NUM_EXAMPLES = "num-examples"  # as FedAvg weighs replies: the number of blocks
LOGS = "logs"
ROOM_MB = 16  # on the disk, for ledger, journal and records
MOST_ROUND = (1 << 31) - 1
MOST_DIGITS = 20  # of a round number: more of them are too many, however they go on
ALL_FAILED = (
    "by a noised count no block of this site gave a result in the first round of this run, so this "
    "site's guard runs no other: discreet site try shows an app's errors"
)


@dataclass(frozen=True)
class App:
    """The bundle of a run, as Flower identifies it."""

    run_id: int
    fab_id: str
    version: str
    digest: str
    bundle: bytes


@dataclass(frozen=True, eq=False)
class BlockWork:
    """The work that a message asks of the blocks: arrays to train, or a metric of a model.

    Attributes:
      release: the mechanism that releases the blocks' vectors.
      layout, key: the arrays' layout, and the name of their record; None for a metric.
      metric: None for arrays.
    """

    release: BlockRelease
    layout: ArrayLayout | None
    key: str
    metric: MetricSettings | None


@dataclass(frozen=True, eq=False)
class Answer:
    """The content of a reply. `charged`: blocks ran for it, and it leaves at the end of a slot."""

    content: RecordDict
    charged: bool


class SiteGuard:
    """Holds a site's policy, blocks, account and sandbox, and answers messages one at a time."""

    def __init__(self, policy: GuardPolicy, *, sandbox: Sandbox | None = None) -> None:
        """Opens the files that the policy names, and starts the sandbox. ConfigError, LedgerError:
        a file can't be used; the message says why."""
        self.policy = policy
        self.site = open_site(policy)
        self.records = opened_records(policy)
        self.blocks = read_blocks(self.site, id_column=policy.blocks.id, count=policy.blocks.count)
        self.marks = marks_of(self.blocks)
        self.ledger = guard_ledger(policy)
        self.states: dict[int, dict[int, bytes]] = {}  # that blocks keep, of each run
        self.failed: dict[int, bool] = {}  # by a run's noised count, of its first round
        self.sandbox = sandbox or Sandbox(policy)
        self.alerts = Alerts(policy.alert)

    def answer(
        self, message: Message, context: Context, app: App, slots: ReplySlots | None = None
    ) -> Answer:
        """The content of the reply, which leaves at the end of a slot. The round is on the ledger
        before any block starts. A round that is requested again, also after a crash, is charged
        again. `slots`: of a message that came before now.

        Raises:
          Refused: the bundle, the message or the run is not allowed, or the budget is spent. The
            message says why, and does not depend on any patient's data. Nothing was charged.
          LedgerError, SandboxError: something is wrong at the site.
        """
        if slots is None:
            slots = ReplySlots(time.monotonic(), self.policy.round_seconds)
        answer = self._answer(message, context, app, slots)
        if answer.charged and slots.over():
            logger.error("a reply leaves late: set reply-seconds to more than this round took")
            self.alerts.call(LATE)
        return answer

    def _answer(self, message: Message, context: Context, app: App, slots: ReplySlots) -> Answer:
        try:
            check_app(self.policy, app.digest)
            check_round(_number(message))
            check_room(self.site, self.policy.blocks.count)
            self._check_blocks()
            if self.failed.get(app.run_id):
                raise Refused(ALL_FAILED)
            if MASKING in message.content:
                return self._masked(message, context, app, slots)
            work = self._work(message, context)
            self._charge(_number(message), self.policy.event(work.release.terms.noise_multiplier))
        except (Refused, MalformedMessage) as refusal:
            self._note(message, app, refused=str(refusal))
            raise Refused(str(refusal)) from refusal
        summed = self._run(message, context, app, work=work)
        self._note_round(summed, message, app, slots)
        if work.release.counts:
            self.failed[app.run_id] = work.release.all_failed(summed, secure_source())
        mean = work.release.mean(summed, secure_source())
        metrics: dict[str, int | float] = {NUM_EXAMPLES: self.policy.blocks.count}
        if work.metric is not None:
            metrics[work.metric.name] = metric_of(work.metric, float(mean[0]))
            return Answer(RecordDict({"metrics": MetricRecord(dict(metrics))}), charged=True)
        assert work.layout is not None
        sent = work.layout.vector(only_arrays(message.content, "the message"))
        arrays = work.layout.record(sent.double().add_(mean).float())
        return Answer(
            RecordDict({work.key: arrays, "metrics": MetricRecord(dict(metrics))}), charged=True
        )

    def _masked(self, message: Message, context: Context, app: App, slots: ReplySlots) -> Answer:
        """The answer to one stage of a masked sum. If the stage asks for the vector, the answer is
        the blocks' vector."""
        asked = []

        def charge(event: DpEvent) -> None:
            self._charge(_number(message), event)
            asked.append(event)

        def run(plain: Message, release: BlockRelease, layout: ArrayLayout) -> BlockSum:
            summed = self._run(plain, context, app, work=BlockWork(release, layout, "", None))
            self._note_round(summed, message, app, slots)
            return summed

        work = partial(read_masked, message, self.policy, charge, run=run)
        least = {
            "min-colluding": self.policy.min_colluding,
            "min-summands": self.policy.min_summands,
        }
        config = {**context.node_config, **least}
        content = answer_masking(message.content, config, work=work, guarded=True)
        return Answer(content, charged=bool(asked))

    @property
    def epsilon(self) -> float:
        """The epsilon that one unit has spent over all runs, at the policy's delta."""
        return epsilon_of_blocks(self.ledger.total(), self.policy.max_delta, PLD)

    def _check_blocks(self) -> None:
        """Refuses blocks other than those of the start: of two splits one patient is in two blocks,
        and states that blocks have kept would reach other patients."""
        with suppress(FileNotFoundError):
            if marks_of(self.blocks) == self.marks:
                return
        raise Refused("this site's blocks have changed since its guard started: start it again")

    def _work(self, message: Message, context: Context) -> BlockWork:
        """The work that a message requests. Refused: a guard does not answer such messages."""
        terms = terms_of_run(self.policy, context.run_config)
        kind = message.metadata.message_type.partition(".")[0]
        if kind == EVALUATE:
            metric = self.policy.metric
        else:
            metric = None
        if kind != TRAIN and metric is None:
            raise Refused(f"this site's guard does not answer messages of type {kind}")
        try:
            arrays = only_arrays(message.content, "the message")
        except MalformedMessage as error:
            raise Refused(str(error)) from error
        layout = read_layout(arrays, self.policy, terms)
        if metric is not None:
            release = self._release(1, GuardTerms(1.0, metric.noise_multiplier))
            return BlockWork(release, None, "", metric)
        (key,) = (
            name for name, record in message.content.items() if isinstance(record, ArrayRecord)
        )
        if key.startswith("fitins."):
            raise Refused(
                "this site's guard answers apps with Flower's Message API, not NumPyClient"
            )
        release = self._release(layout.num_params, terms)
        counts = release.can_count and context.run_id not in self.failed
        return BlockWork(replace(release, counts=counts), layout, key, None)

    def _release(self, size: int, terms: GuardTerms) -> BlockRelease:
        return BlockRelease(size, terms, self.policy.q, self.policy.blocks.count)

    def _charge(self, number: int, event: DpEvent) -> None:
        def allowed(spent: PrivacyLedger) -> None:
            check_budget(self.policy, spent.record(event))

        self.ledger.charge([Charge(number, self.policy.unit, "", event)], allowed=allowed)

    def _run(self, message: Message, context: Context, app: App, *, work: BlockWork) -> BlockSum:
        """The sum over the drawn blocks. Their states and logs are kept when the last one has
        ended: states in memory, because a disk takes longer, the more there is."""
        task = self._task(message, context, app, work=work)
        drawn = drawn_blocks(self.policy, secure_source())
        states = self.states.pop(app.run_id, {})
        self.states = dict([*self.states.items(), (app.run_id, states)][-MOST_RUNS:])
        results: list[BlockResult] = []
        sent = _sent(work, message)
        with opened_blocks(self.blocks, drawn, states) as inputs, closed(self.policy):
            vectors = self._vectors(task, inputs, work=work, sent=sent, results=results)
            summed = work.release.add_up(vectors)
        states |= {each.number: each.state for each in results if each.state}
        _store_logs(results, self.site / LOGS)
        return summed

    def _note_round(self, summed: BlockSum, message: Message, app: App, slots: ReplySlots) -> None:
        """Writes what came of the blocks to the site's records. That they ended late is a fact for
        its operators, and changes nothing of the sum."""
        write_json(self.records / PRIVACY, privacy_facts(self.policy, self.ledger))
        told = {"drawn": summed.drawn, "failed": summed.failed, "late": slots.over()}
        self._note(message, app, epsilon=self.epsilon, **told)

    def _vectors(
        self, task: BlockTask, inputs: Sequence[BlockInput], *, work: BlockWork, sent: Vector,
        results: list[BlockResult],
    ) -> Iterator[Vector | None]:  # fmt: skip
        for result in self.sandbox.run(task, inputs):
            results.append(BlockResult(result.number, None, result.state, result.log))
            if result.vector is None:
                yield None
            elif work.metric is not None:
                yield of_metric(work.metric, float(result.vector[0]))
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    yield result.vector - sent  # what is not finite is dropped where it is added up

    def _task(self, message: Message, context: Context, app: App, *, work: BlockWork) -> BlockTask:
        plain = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config={},
            state=RecordDict(),
            run_config=context.run_config,
            series_id=context.series_id,
        )
        if work.layout is None:
            learned = []
        else:
            learned = [part for part in work.layout.parts if part.learned]
        return BlockTask(
            app=(app.fab_id, app.version, app.digest),
            bundle=app.bundle,
            message=message_to_proto(message).SerializeToString(),
            context=context_to_proto(plain).SerializeToString(),
            run_id=context.run_id,
            node_id=context.node_id,
            names=tuple(part.name for part in learned),
            sizes=tuple(part.size for part in learned),
            metric="" if work.metric is None else work.metric.name,
            limits=block_limits(self.policy),
        )

    def _note(self, message: Message, app: App, **what: object) -> None:
        """Writes the outcome of a message to the journal, for the site's operators only, and logs
        it."""
        row = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": app.run_id,
            "app": f"{app.fab_id} {app.version}",
            "digest": app.digest,
            "round": _number(message),
            "kind": message.metadata.message_type,
            **what,
        }
        note(self.records, row)
        self._alert(what)
        told = ", ".join(f"{name} {_short(value)}" for name, value in what.items())
        logger.info("run %d, round %d: %s", app.run_id, _number(message), printable(told))

    def _alert(self, what: Mapping[str, object]) -> None:
        """Tells the operators of an outcome that they should look at."""
        refused = what.get("refused")
        epsilon = what.get("epsilon")
        if refused is not None:
            self.alerts.call(REFUSED)
        if isinstance(epsilon, float) and epsilon >= BUDGET_SHARE * self.policy.max_epsilon:
            self.alerts.call(BUDGET)


def _number(message: Message) -> int:
    """The round number of a message, as Flower's strategies give it; 0 if it has none."""
    group = message.metadata.group_id
    if group.isdecimal():
        return int(group[:MOST_DIGITS])
    given = [
        record.get(ROUND) for record in message.content.values() if isinstance(record, ConfigRecord)
    ]
    return next((each for each in given if isinstance(each, int)), 0)


def check_round(number: int) -> None:
    """Refuses a round number that a ledger can't hold."""
    if not 0 <= number <= MOST_ROUND:
        raise Refused(f"the round must be within [0, {MOST_ROUND}] (got {number})")


def block_limits(policy: GuardPolicy) -> dict[str, float]:
    """A block's limits, as `enclosure.BlockLimits`."""
    limits = policy.limits
    return {
        "memory_mb": limits.memory_mb,
        "disk_mb": limits.disk_mb,
        "processes": limits.processes,
        "seconds": policy.block_seconds,
    }


def guard_ledger(policy: GuardPolicy) -> DurableLedger:
    """The guard's account. LedgerError: it is missing, damaged or old. ConfigError: it has accounts
    of another unit."""
    ledger = DurableLedger(Path(policy.ledger))
    ledger.check()
    others = ", ".join(sorted(ledger.guarantees() - {policy.unit}))
    if others:
        raise ConfigError(
            f"{policy.ledger} has releases of {others}: a guard needs an account of its own"
        )
    return ledger


def _sent(work: BlockWork, message: Message) -> Vector:
    if work.layout is None:
        return torch.zeros(1).numpy()
    return work.layout.vector(only_arrays(message.content, "the message")).numpy()


@contextmanager
def opened_blocks(
    archives: Sequence[Path], numbers: Sequence[int], states: Mapping[int, bytes]
) -> Iterator[list[BlockInput]]:
    """The open archives of some blocks, with the states that they have kept in this run."""
    inputs = []
    try:
        for number in numbers:
            archive = os.open(archives[number], os.O_RDONLY)
            inputs.append(BlockInput(number, archive, states.get(number, b"")))
        yield inputs
    finally:
        for each in inputs:
            os.close(each.archive)


@contextmanager
def closed(policy: GuardPolicy) -> Iterator[None]:
    """Closes the site's folder and its records to everybody while Landlock confines running blocks,
    because Landlock does not hide the size and date of a file."""
    if policy.enclosure != LANDLOCK:
        yield
        return
    Path(policy.blocks.folder).chmod(0)
    opened_records(policy).chmod(0)
    try:
        yield
    finally:
        open_site(policy)
        opened_records(policy)


def open_site(policy: GuardPolicy) -> Path:
    """The site's folder, opened for its owner, also after a crash of the guard."""
    folder = Path(policy.blocks.folder)
    if folder.exists():
        folder.chmod(0o700)
    return folder


def check_room(site: Path, blocks: int) -> None:
    """Raises Refused unless the longest possible logs of blocks and all that a round writes beside
    them fit on the site's disk, whatever blocks have left there. So what one block prints does not
    decide whether the site releases anything."""
    wanted = blocks * MOST_LOG + ROOM_MB * MEGABYTE
    taken = sum(512 * path.stat().st_blocks for path in (site / LOGS).glob("*"))
    if free_mb(site) * MEGABYTE + taken < wanted:
        raise Refused(f"this site's guard needs {wanted / MEGABYTE:.1f} MB of free disk space")


def _store_logs(results: Sequence[BlockResult], logs: Path) -> None:
    logs.mkdir(mode=0o700, exist_ok=True)
    for each in results:
        (logs / f"{each.number:05d}.log").write_bytes(each.log)


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
