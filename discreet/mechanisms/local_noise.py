"""Local privacy: a client noises its whole update, so that not even the server has to be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from discreet.mechanisms.mechanism import NOT_COVERED, Slack, Statement, shared_examples
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import LOCAL

LOCAL_SETTINGS = tuple(f"privacy.local.{name}" for name in ("kind", "epsilon", "noise_multiplier", "clip_norm"))
EPSILONS = ("epsilon_local", "epsilon_local_pure")
NORMS = {"gaussian": "L2, Gaussian", "laplace": "L1, Laplace"}


@dataclass(frozen=True)
class LocalNoise:
    """All data of one client, from everybody else; nobody but the client itself is trusted."""

    run: ClientSettings
    guarantee: ClassVar[str] = LOCAL
    masked: ClassVar[bool] = False
    at_server: ClassVar[bool] = False
    at_client: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    reported: ClassVar[tuple[str, ...]] = EPSILONS
    deciding: ClassVar[tuple[str, ...]] = LOCAL_SETTINGS
    decided: ClassVar[Mapping[str, object]] = {}
    only_rdp: ClassVar[bool] = False

    def statement(self, *, account: bool = False) -> Statement:
        norm = NORMS.get(self.run.local.kind)  # no kind: this guarantee is off
        how = f"the update is clipped in {norm} noise for 2 * clip_norm at the client" if norm else "none"
        return local_statement(self.run, unit="all data of one client", mechanism=how)

    @property
    def finite(self) -> tuple[str, ...]:
        return EPSILONS if self.run.local.kind == "laplace" else EPSILONS[:1]

    @property
    def grid_slack(self) -> Slack | None:
        from discreet.privacy.grid import grid_slack, laplace_grid_slack

        slack = laplace_grid_slack if self.run.local.kind == "laplace" else grid_slack
        return slack if self.run.noise == "grid" else None


def local_statement(run: ClientSettings, *, unit: str, mechanism: str, uncovered: tuple[str, ...] = ()) -> Statement:
    """The statement of a client that noises what it sends for an untrusted server."""
    asked, rated, priced = run.evaluation, "", ""
    if asked.private:
        rated = (
            f"; the client rates the model every {asked.every} rounds and at the end, its answer clipped and noised "
            f"the same way for twice its largest norm, with the noise multiplier {asked.noise_multiplier:g}"
        )
        priced = " and another for each answer"
    return Statement(
        unit=unit,
        adjacency="replace",
        trusted="nobody but the client itself",
        observer="everybody else, the server too",
        mechanism=mechanism + rated,
        accounting=f"a Gaussian or Laplace event a round in which the client takes part{priced}, over every run in "
        "its ledger",
        not_covered=(*NOT_COVERED, "that a client took part", *uncovered, *shared_examples(run)),
    )
