"""A SuperLink's state in a file, as tests of its replacements use it."""

from __future__ import annotations

from pathlib import Path

from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager


class LinkState:
    """The state, the store of objects in the same file, and a run that nobody has started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = SqlObjectStore(str(path))
        self.store.initialize()
        self.state = SqlLinkState(str(path), NoOpFederationManager(), self.store)
        self.state.initialize()
        words = {"fab_id": None, "fab_version": None, "fab_hash": None, "override_config": {}}
        more = {"federation_id": NOOP_FEDERATION_ID, "federation_config": None, "flwr_aid": None}
        self.run = self.state.create_run(**words, **more, primary_task_type=TaskType.SERVER_APP)
