"""What the wheel holds beside the package: the files that a new project starts from, below discreet/app."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The same places below discreet/app as in a checkout: `discreet.settings.places` finds them in either.
PLACES = (
    *("conf", "client_app", "server_app", "strategies", "benchmarks", "examples/own", "examples/project"),
    "constraints.txt",
)


class AppFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the app's own folders into a wheel. An editable install needs none of it: the checkout is there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is standard or editable."""
        if version == "standard":
            build_data["force_include"] |= {place: f"discreet/app/{place}" for place in PLACES}
