"""Optional packages that `pip install discreet` leaves out, and the line that says how to get them."""

from __future__ import annotations

from importlib.util import find_spec

from discreet.settings.rules import ConfigError


class MissingExtra(ConfigError):
    """A package is needed that comes with an extra. The message names the extra and the command."""


def require(*modules: str, extra: str, why: str) -> None:
    """Passes if every module is installed; imports none of them.

    >>> require("tomllib", extra="simulation", why="reading a table")

    Args:
      modules: top-level names.
      extra: the extra of pyproject.toml that brings them.
      why: what needs them, as the subject of a sentence.

    Raises:
      MissingExtra: one of them is not installed.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingExtra(f'{why} needs {module}, which is not installed: pip install "discreet[{extra}]"')
