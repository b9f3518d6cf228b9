"""The column of a table that says at which site each row is, for simulations of sites."""

from __future__ import annotations

from discreet.data.cells import owner_cells
from discreet.data.examples import Task
from discreet.data.folder import lines_in, opened
from discreet.data.table_files import file_in
from discreet.data.targets import Array, FolderError
from discreet.privacy.person import EXACT


def sites_of(task: Task, column: str) -> Array | None:
    """The cells of a column of the training table, (n,), as `owner_cells` has them; None for data
    that are no folder. FolderError: the table has no such column, or a cell is empty."""
    if task.folder is None or task.description is None:
        return None
    path = file_in(task.folder, task.description.file)
    # as the owner, so that its cells are read as they are written
    found = opened(path, task.description.model_copy(update={"owner": column}))
    if column not in found:
        raise FolderError(f"data.site: {path.name} has no column or array {column}")
    with lines_in(path, task.description):
        return owner_cells(found[column], column, EXACT)
