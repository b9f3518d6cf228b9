"""The names of the guarantees, and the neighbouring data sets that they are for."""

from __future__ import annotations

USER = "user"
EXAMPLE = "example"
LOCAL = "local"
GUARANTEES = (USER, EXAMPLE, LOCAL)
# The neighbouring data sets at example level.
ZERO_OUT = "zero-out: one example contributes nothing, n stays"
ADD_OR_REMOVE = "add or remove one example"
# The same if the unit is an owner with all its rows.
OF_OWNERS = {
    ZERO_OUT: "zero-out: one owner, with all its rows, contributes nothing, n stays",
    ADD_OR_REMOVE: "add or remove one owner, with all its rows",
}
