"""The terms of a masked sum are those that a node signed its keys for: no stage is answered on
others."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discreet.masking.identity import Identity
from discreet.masking.wire import Abandoned, Stage, join_named, split_named
from discreet.server.masking_server import Exchange, Opened
from tests.masking.federation import altered, body_of
from tests.node.dishonest import NAMES, Dishonest, NotGiven, Told, server_of

ME, *OTHERS = NAMES
WEAKER = {
    "fewer that collude and more that are lost": (
        "privacy.secure.dropouts=2",
        "privacy.secure.colluding=0",
    ),
    "another threshold": (
        "privacy.secure.threshold=4",
        "privacy.secure.colluding=0",
        "privacy.secure.dropouts=1",
    ),
    "another noise": ("privacy.user.noise_multiplier=0.001",),
    "another length": ("privacy.user.clip.kind=fixed",),
    "another grid": ("privacy.user.clip.count_stddev=2",),
    "another delta": ("privacy.delta=0.1",),
    "another number of rounds": ("rounds=1",),
}


@pytest.mark.parametrize("words", WEAKER.values(), ids=list(WEAKER))
def test_no_stage_is_answered_on_other_terms_than_those_of_the_keys(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    server, lie = server_of(tmp_path, Told.of()), Told.of(*words)
    found: Exchange | Opened = server.until(Stage.SHARES)
    while isinstance(found, Exchange):
        with pytest.raises(NotGiven, match=r"signed its keys .*other terms"):
            server.ask(ME, found.requests[ME], lie)
        found = server.go_on(found)


def with_another_key(server: Dishonest, name: str, folder: Path) -> str:
    """A list of peers that has another key for a node."""
    keys = json.loads(Path(str(server.configs[ME]["peers"])).read_text())
    path = folder / "changed.json"
    path.write_text(json.dumps({**keys, name: Identity.generate(name).public_text()}))
    return str(path)


def test_no_stage_is_answered_with_another_list_of_peers_than_that_of_the_keys(
    tmp_path: Path,
) -> None:
    server = server_of(tmp_path, Told.of())
    true, changed = server.configs[ME]["peers"], with_another_key(server, OTHERS[0], tmp_path)
    found: Exchange | Opened = server.until(Stage.SHARES)
    while isinstance(found, Exchange):
        server.configs[ME]["peers"] = changed
        with pytest.raises(NotGiven, match="another list of peers"):
            server.ask(ME, found.requests[ME])
        server.configs[ME]["peers"] = true
        found = server.go_on(found)


def test_nodes_with_different_lists_of_peers_share_nothing(tmp_path: Path) -> None:
    server = server_of(tmp_path, Told.of())
    server.configs[ME]["peers"] = with_another_key(server, OTHERS[0], tmp_path)
    request = server.until(Stage.SHARES).requests[OTHERS[1]]
    without = {
        name: keys for name, keys in split_named(body_of(request)).items() if name != OTHERS[0]
    }
    with pytest.raises(NotGiven, match=f"keys of '{ME}' are not signed"):
        server.ask(OTHERS[1], altered(request, join_named(without)))


def opened(server: Dishonest, lies: dict[str, Told]) -> Opened:
    """What the server reads with the shares of the nodes that it did not lie to."""
    exchange = server.until(Stage.UNMASK, lies)
    signed = {
        name: each
        for name, each in split_named(body_of(exchange.requests[OTHERS[0]])).items()
        if name not in lies
    }
    for name in signed:
        exchange.take(name, server.ask(name, altered(exchange.requests[name], join_named(signed))))
    found = exchange.close()
    assert isinstance(found, Opened)
    return found


def largest(server: Dishonest, found: Opened) -> float:
    """Over half the modulus, which a sum fills with 12 standard deviations of its noise."""
    half = 2 ** (server.told.terms.bits - 1)
    return float(max(abs((found.total + half) % (2 * half) - half)) / half)


def test_what_nodes_with_different_clip_norms_send_can_not_be_read_together(tmp_path: Path) -> None:
    alike = server_of(tmp_path / "alike", Told.of())
    assert largest(alike, opened(alike, {})) < 0.6
    server = server_of(tmp_path / "unlike", Told.of())
    # Masks that do not cancel are uniform: of 63 values none is beyond 0.6 with a chance of 1e-14.
    assert largest(server, opened(server, {ME: replace(server.told, clip_norm=5.0)})) > 0.6


@pytest.mark.parametrize("policy", [{"min-colluding": "2"}, {"min-summands": "4"}], ids=str)
def test_a_node_gives_no_keys_for_a_sum_that_its_owner_does_not_allow(
    policy: dict[str, str], tmp_path: Path
) -> None:
    server = server_of(tmp_path, Told.of(), policy)
    with pytest.raises(NotGiven, match=r"the run has privacy\.secure\.colluding=1, and 3 summands"):
        server.ask(ME, server.until(Stage.KEYS).requests[ME])


class ChangingTerms(RuleBasedStateMachine):
    """Attempts at several rounds, at each stage of which a node may be told something else."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.server, self.open = server_of(Path(self.folder.name), Told.of()), list[Exchange]()
        self.round = 1

    def teardown(self) -> None:
        self.folder.cleanup()

    @precondition(lambda self: not self.open)
    @rule(again=st.booleans())
    def begin(self, again: bool) -> None:
        self.round += not again
        self.open = [self.server.begin(self.round)]

    @precondition(lambda self: self.open)
    @rule()
    def tell_all_the_same(self) -> None:
        self.go_on("", ())

    @precondition(lambda self: self.open)
    @rule(who=st.sampled_from(NAMES), words=st.sampled_from([*WEAKER.values()]))
    def go_on(self, who: str, words: tuple[str, ...]) -> None:
        exchange = self.open.pop()
        for name, request in exchange.requests.items():
            try:
                exchange.take(
                    name, self.server.ask(name, request, Told.of(*words) if name == who else None)
                )
            except NotGiven:
                continue
        try:
            found = exchange.close()
        except Abandoned:
            return
        self.open = [found] if isinstance(found, Exchange) else []

    @invariant()
    def all_that_a_node_gives_in_an_attempt_is_on_the_same_terms(self) -> None:
        told: dict[tuple[str, bytes], set[str]] = defaultdict(set)
        for name, part, each in self.server.given:
            told[name, part.attempt].add(each.terms.encode().decode())
        assert all(len(terms) == 1 for terms in told.values())

    @invariant()
    def all_whose_vectors_are_in_a_sum_were_told_the_same_terms(self) -> None:
        masked: dict[bytes, set[str]] = defaultdict(set)
        for _, part, each in self.server.given:
            if part.stage is Stage.MASKED:
                masked[part.attempt].add(each.terms.encode().decode())
        assert all(len(terms) == 1 for terms in masked.values())


TestChangingTerms = ChangingTerms.TestCase
TestChangingTerms.settings = settings(
    max_examples=6, stateful_step_count=12, deadline=None, phases=[Phase.generate]
)
