"""Within the limits on dropouts the server's sum is the plain sum, bit by bit; beyond them there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.masking.server import Exchange
from discreet.masking.wire import Abandoned, Stage, Terms
from tests.masking.federation import Federation, Gone, federation, terms_of

BEFORE_CONFIRM = (Stage.KEYS, Stage.SHARES, Stage.MASKED)


@st.composite
def dropouts(draw: st.DrawFn, terms: Terms) -> Gone:
    """The nodes that are gone at each stage: at most d until the vectors are in, then so many that t are left."""
    names = [f"node-{number:02d}" for number in range(terms.nodes)]
    order = draw(st.permutations(names))
    places = sorted(draw(st.integers(0, terms.dropouts)) for _ in BEFORE_CONFIRM)
    gone = dict(zip(BEFORE_CONFIRM, (frozenset(order[:place]) for place in places), strict=True))
    left = order[places[-1] :]
    for stage in (Stage.CONFIRM, Stage.UNMASK):
        left = left[draw(st.integers(0, len(left) - terms.threshold)) :]
        gone[stage] = frozenset(names) - frozenset(left)
    return gone


@st.composite
def federations(draw: st.DrawFn, nodes: int) -> tuple[Federation, Gone]:
    colluding = draw(st.integers(0, (nodes - 1) // 3))
    most = nodes - ((nodes + colluding) // 2 + 1)
    terms = terms_of(
        nodes,
        dropouts=draw(st.integers(0, min(most, nodes - colluding - 1))),
        colluding=colluding,
        length=draw(st.integers(1, 9)),
        bits=draw(st.integers(16, 32)),
    )
    return federation(terms, seed=draw(st.integers(0, 2**31))), draw(dropouts(terms))


def check_sum(case: tuple[Federation, Gone]) -> None:
    ours, gone = case
    opened = ours.sum(gone=gone)
    assert set(opened.names) == set(ours.nodes) - gone[Stage.MASKED]
    assert opened.total.tolist() == ours.plain_sum(opened.names).tolist()
    assert sorted(ours.charges) == list(opened.names)


MANY = [pytest.param(nodes, 400 // nodes, marks=pytest.mark.slow) for nodes in (3, 5, 10, 20)]


@pytest.mark.parametrize(("nodes", "cases"), [(3, 15), (5, 10), (10, 3), (20, 1), *MANY])
def test_the_sum_of_those_who_are_left_is_their_plain_sum_and_each_of_them_paid_once(nodes: int, cases: int) -> None:
    settings(max_examples=cases, deadline=None)(given(federations(nodes))(check_sum))()


@pytest.mark.parametrize("stage", Stage)
def test_a_round_is_abandoned_unread_at_the_stage_that_too_few_nodes_answer_and_tried_again_for_one_price(
    stage: Stage,
) -> None:
    for lost in (0, 1, 2):
        ours = federation(terms_of(5, dropouts=lost))
        least = 5 - lost if stage in BEFORE_CONFIRM else ours.terms.threshold
        gone = {stage: frozenset(list(ours.nodes)[least - 1 :])}
        exchange = ours.until(stage, gone)
        with pytest.raises(Abandoned):
            ours.send(exchange, gone)
    if stage is not Stage.UNMASK:  # else some have opened it
        check_sum((ours, {Stage.MASKED: frozenset()}))


def test_a_round_whose_keys_rode_along_takes_three_exchanges_with_a_node_that_missed_the_last_one() -> None:
    ours = federation(terms_of(5, dropouts=1))
    ours.sum(1, then=2, gone={Stage.MASKED: frozenset({"node-03"})})
    found, stages = ours.server.begin(2, then=3), []
    while isinstance(found, Exchange):
        stages.append(found.stage)
        found = ours.send(found)
    assert stages == [Stage.MASKED, Stage.CONFIRM, Stage.UNMASK]
    assert found.names == tuple(ours.nodes)
    assert found.total.tolist() == ours.plain_sum(found.names).tolist()


def test_a_round_whose_early_keys_came_from_too_few_begins_anew() -> None:
    ours = federation(terms_of(5, dropouts=1))
    ours.sum(1, then=2, gone={Stage.CONFIRM: frozenset({"node-00", "node-01"})})
    first = ours.server.begin(2)
    assert first.stage is Stage.KEYS
    assert len(first.requests) == 5
