"""What the wheel holds beside the package, below discreet/app: the files that a new project starts
from. And what an index is told: the README, whose links lead to the repository, and its
addresses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# The same places below discreet/app as in a checkout: `discreet.run_files.places` finds them in
# either.
PLACES = (
    *(
        "conf",
        "client_app",
        "server_app",
        "strategies",
        "benchmarks",
        "examples/own",
        "examples/project",
    ),
    "constraints.txt",
)


class AppFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the app's own folders into a wheel. An editable install needs none of it: the checkout
    is there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling; `version` is standard or editable."""
        if version == "standard":
            build_data["force_include"] |= {place: f"discreet/app/{place}" for place in PLACES}


PAGES = {
    "Documentation": "blob/main/docs/index.md",
    "Changelog": "blob/main/CHANGELOG.md",
    "Issues": "issues",
}
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def with_addresses(text: str, home: str) -> str:
    """A page whose links and pictures lead to a repository.

    >>> with_addresses("[a](docs/a.md) ![b](b.svg) [c](https://c)", "https://forge/x")
    '[a](https://forge/x/blob/main/docs/a.md) ![b](https://forge/x/raw/main/b.svg) [c](https://c)'
    """

    def address(found: re.Match[str]) -> str:
        mark, words, path = found.groups()
        return f"{mark}[{words}]({home}/{'raw' if mark else 'blob'}/main/{path})"

    return RELATIVE.sub(address, text)


class Described(MetadataHookInterface):  # type: ignore[misc]
    """The README, and the addresses of the repository at `home`; without one links stay as they
    are."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        home, text = self.config["home"].rstrip("/"), Path(self.root, "README.md").read_text()
        shown = with_addresses(text, home) if home else text
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
        metadata["urls"] = (
            {"Source": home, **{name: f"{home}/{path}" for name, path in PAGES.items()}}
            if home
            else {}
        )
