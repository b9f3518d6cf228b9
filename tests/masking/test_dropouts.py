"""Within the limits on dropouts the sum is the plain sum, bit by bit; beyond them there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discreet.masking.agreement import Abandoned, Terms
from discreet.masking.server import Exchange, Opened
from discreet.masking.wire import Stage
from tests.masking.federation import Federation, Gone, federation, terms_of

BEFORE_CONFIRM = (Stage.KEYS, Stage.SHARES, Stage.MASKED)


@st.composite
def dropouts(draw: st.DrawFn, terms: Terms) -> Gone:
    """Who is gone at which stage: at most d until the vectors are in, then at most so many that t are left."""
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


@given(federations(3))
@settings(max_examples=15, deadline=None)
def test_three_nodes(case: tuple[Federation, Gone]) -> None:
    check_sum(case)


@given(federations(5))
@settings(max_examples=10, deadline=None)
def test_five_nodes(case: tuple[Federation, Gone]) -> None:
    check_sum(case)


@given(federations(10))
@settings(max_examples=3, deadline=None)
def test_ten_nodes(case: tuple[Federation, Gone]) -> None:
    check_sum(case)


@given(federations(20))
@settings(max_examples=1, deadline=None)
def test_twenty_nodes(case: tuple[Federation, Gone]) -> None:
    check_sum(case)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [3, 5, 10, 20])
def test_many_cases(nodes: int) -> None:
    settings(max_examples=400 // nodes, deadline=None)(given(federations(nodes))(check_sum))()


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_one_dropout_too_many_before_the_lists_abandons_the_round_without_a_share_given(data: st.DataObject) -> None:
    ours = federation(terms_of(5, dropouts=data.draw(st.integers(0, 2))))
    stage = data.draw(st.sampled_from(BEFORE_CONFIRM))
    away = frozenset(list(ours.nodes)[: ours.terms.dropouts + 1])
    seen = abandoned(ours, {stage: away})
    assert seen[-1] is stage
    assert Stage.UNMASK not in seen


@pytest.mark.parametrize("stage", [Stage.CONFIRM, Stage.UNMASK], ids=lambda stage: stage.name)
def test_fewer_than_t_nodes_at_the_end_leave_the_sum_unread(stage: Stage) -> None:
    ours = federation(terms_of(5, dropouts=2))
    assert abandoned(ours, {stage: frozenset(list(ours.nodes)[:3])})[-1] is stage


def abandoned(ours: Federation, gone: Gone) -> list[Stage]:
    """The stages that nodes were asked, until the round was abandoned."""
    found: Exchange | Opened = ours.server.begin(1)
    seen: list[Stage] = []
    try:
        while isinstance(found, Exchange):
            seen.append(found.stage)
            found = ours.send(found, gone)
    except Abandoned:
        return seen
    raise AssertionError("the sum was opened")


def test_an_abandoned_round_can_be_tried_again_and_is_paid_once() -> None:
    ours = federation(terms_of(5, dropouts=1))
    with pytest.raises(Abandoned):
        ours.sum(gone={Stage.CONFIRM: frozenset(list(ours.nodes)[:3])})
    opened = ours.sum()
    assert opened.total.tolist() == ours.plain_sum(opened.names).tolist()
    assert sorted(ours.charges) == sorted(ours.nodes)


def test_a_node_that_missed_a_round_takes_part_in_the_next() -> None:
    ours = federation(terms_of(5, dropouts=1))
    ours.sum(1, then=2, gone={Stage.MASKED: frozenset({"node-03"})})
    assert ours.sum(2).names == tuple(ours.nodes)


def test_a_round_whose_early_keys_came_from_too_few_begins_anew() -> None:
    ours = federation(terms_of(5, dropouts=1))
    ours.sum(1, then=2, gone={Stage.CONFIRM: frozenset({"node-00", "node-01"})})
    first = ours.server.begin(2)
    assert first.stage is Stage.KEYS
    assert len(first.requests) == 5
