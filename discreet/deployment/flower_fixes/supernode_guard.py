"""A SuperNode that sends only the guard's replies: the process of `python -m
discreet.deployment.supernode --guard`.

Flower's SuperNode starts the app as its own user, with its key, its ledger and its connection, and
sends everything that the app stores: any number of records, the text of an exception, the seconds
that it took. Here no ClientApp is started and no runtime API listens. The guard takes the message,
and stores the only reply that is sent.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import SubStatus
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStore
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from discreet.deployment.flower_fixes.supernode_fixes import (
    PushObject,
    Send,
    last_message,
    push_what_lies_there,
)
from discreet.flower.tested_flower import GUARD_PLACES, refusal
from discreet.guard import alerts
from discreet.guard.guard_policy import KERNEL, read_guard
from discreet.guard.operating import broken_walls
from discreet.guard.reply_slots import ReplySlots
from discreet.guard.sandbox import Sandbox, SandboxError
from discreet.guard.site_check import check_site
from discreet.guard.site_guard import App, SiteGuard
from discreet.guard.site_records import mark_active, printable, site_lock
from discreet.ledger.durable_ledger import LedgerError
from discreet.node.account import Refused
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet.guard")

RUNTIME = 1.0  # the app's run time that each reply states, in seconds
PROMPT_REFUSALS = 10
LONGEST_PAUSE = 60.0
REFUSED = 0  # the error code of a refusal
LOCKS = ExitStack()  # of this process
FAILED = "this site's guard could not answer; its log says why"

SUPERNODE = "flwr.supernode.cli.flower_supernode"


class GuardedReplies:
    """Replaces Flower's `_push_messages`: sends the guard's answer to the last message."""

    def __init__(self, guard: SiteGuard) -> None:
        self.guard = guard
        self.broken = False
        self.refused = 0  # messages since the last answer

    def __call__(
        self,
        state: InMemoryNodeState,
        object_store: ObjectStore,
        send: Send,
        push_object: PushObject,
    ) -> None:
        """Answers, and sends. A charged reply is sent at the end of a slot."""
        slots = ReplySlots(time.monotonic(), self.guard.policy.round_seconds)
        for task in state.get_tasks():
            state.finish_task(task.task_id, sub_status=SubStatus.STOPPED, details="")
        message = last_message(state)
        reply = self._reply(message, state, object_store, slots=slots)
        object_store.delete(message.metadata.message_id)
        state.get_message_processing_duration = lambda message_id: RUNTIME  # type: ignore[method-assign]
        start_client_internal._insert_message(reply, state, object_store)
        push_what_lies_there(state, object_store, send, push_object)
        if self.broken:
            logger.error(
                "the sandbox has ended, and so does this node: systemd or compose starts both again"
            )
            self.guard.alerts.call(alerts.FAILED)
            self.guard.alerts.finish()
            sys.stdout.flush()
            os._exit(1)

    def _reply(
        self, message: Message, state: InMemoryNodeState, store: ObjectStore, *, slots: ReplySlots
    ) -> Message:
        run = state.get_run(message.metadata.run_id)
        fab = None
        context = None
        if run is not None:
            fab = state.get_fab(run.fab_hash)
            context = state.get_run_series_context(run.series_id)
        if run is None or fab is None or context is None:
            return Message(
                Error(REFUSED, "this site's guard does not know the run"), reply_to=message
            )
        digest = hashlib.sha256(fab.content).hexdigest()
        app = App(run.run_id, run.fab_id, run.fab_version, digest, fab.content)
        try:
            answer = self.guard.answer(_whole(message, store), context, app, slots)
        except Refused as refusal:
            logger.warning("refused: %s", printable(str(refusal)))
            self.refused += 1
            time.sleep(pause_after(self.refused))
            return Message(Error(REFUSED, str(refusal)), reply_to=message)
        except (
            SandboxError,
            LedgerError,
            ConfigError,
            OSError,
            ValueError,
            ArithmeticError,
        ) as error:
            logger.exception("nothing was released")
            self.broken = isinstance(error, SandboxError)
            slots.wait()
            return Message(Error(REFUSED, FAILED), reply_to=message)
        if answer.charged:
            self.refused = 0
            slots.wait()
        return Message(answer.content, reply_to=message)


def pause_after(refused: int) -> float:
    """The seconds before a refusal is sent: more after each of many in a row, so that a server that
    tries on neither fills the journal nor keeps the machine busy."""
    if refused <= PROMPT_REFUSALS:
        return 0.0
    return min(LONGEST_PAUSE, 2.0 ** (refused - PROMPT_REFUSALS - 1))


def _whole(message: Message, store: ObjectStore) -> Message:
    """The message with its content, which the store holds in parts."""
    number = message.metadata.message_id
    trees = iterate_object_tree(store.get_object_tree(number))
    contents = {tree.object_id: store.get(tree.object_id) or b"" for tree in trees}
    whole = inflate_object_from_contents(number, contents)
    if not isinstance(whole, Message):
        raise Refused("the content is not a message")
    whole.metadata.__dict__["_message_id"] = number
    return whole


def no_runtime_api(config: object, state_factory: object) -> tuple[object, threading.Thread]:
    """Replaces Flower's runtime API, through which any process of the machine could take a message
    and answer it."""
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    return SimpleNamespace(should_exit=False, force_exit=False), ended


def install(path: Path) -> None:
    """Makes this process's SuperNode answer by the guard of `path`, after the sandbox was tested.
    Raises ConfigError, LedgerError, SandboxError: the sandbox does not hold, or something is
    missing; no SuperNode starts."""
    if reason := refusal(GUARD_PLACES, "that the guard's replies alone leave"):
        raise ConfigError(reason)
    written = read_guard(path)
    LOCKS.enter_context(site_lock(written))  # until this process ends
    try:
        guard = _tested_guard(path)
    except (ConfigError, LedgerError, SandboxError, OSError):
        called = alerts.Alerts(written.alert)
        called.call(alerts.FAILED)
        called.finish()
        raise
    start_client_internal._push_messages = GuardedReplies(guard)  # type: ignore[assignment]
    importlib.import_module(SUPERNODE)._start_supernode_http_api = no_runtime_api  # type: ignore[attr-defined]
    mark_active(written)
    said = "this site's guard answers for %d blocks of patients, enclosed by %s"
    logger.info(said, len(guard.blocks), guard.policy.enclosure)
    if guard.policy.enclosure != KERNEL:
        logger.info("%s", guard.sandbox.counting())


def _tested_guard(path: Path) -> SiteGuard:
    """The guard of a site, whose sandbox has been tested."""
    policy = check_site(path)
    sandbox = Sandbox(policy)
    if reached := broken_walls(sandbox):
        sandbox.close()
        raise SandboxError(f"a block would reach {', '.join(reached)}")
    return SiteGuard(policy, sandbox=sandbox)
