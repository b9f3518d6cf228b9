"""The sum that the server reads is the plain sum, bit by bit, whoever drops out within the limits."""

from __future__ import annotations

from discreet.masking.server import Exchange
from discreet.masking.signed_keys import read_keys
from discreet.masking.wire import Stage, read_request
from tests.masking.federation import body_of, federation, terms_of


def test_the_sum_is_the_plain_sum_modulo_2_to_the_k() -> None:
    ours = federation(terms_of(5))
    opened = ours.sum()
    assert opened.total.tolist() == ours.plain_sum(opened.names).tolist()
    assert len(opened.names) == 5


def test_a_round_whose_keys_rode_along_takes_three_exchanges() -> None:
    ours = federation(terms_of(3))
    ours.sum(1, then=2)
    found, stages = ours.server.begin(2, then=3), []
    while isinstance(found, Exchange):
        stages.append(found.stage)
        found = ours.send(found)
    assert stages == [Stage.MASKED, Stage.CONFIRM, Stage.UNMASK]
    assert found.total.tolist() == ours.plain_sum(found.names).tolist()


def test_the_sum_of_those_who_are_left_is_theirs() -> None:
    ours = federation(terms_of(7, dropouts=2))
    opened = ours.sum(gone={Stage.MASKED: frozenset({"node-01", "node-04"}), Stage.UNMASK: frozenset({"node-00"})})
    assert opened.names == ("node-00", "node-02", "node-03", "node-05", "node-06")
    assert opened.total.tolist() == ours.plain_sum(opened.names).tolist()


def test_each_round_is_paid_by_each_node_once() -> None:
    ours = federation(terms_of(3))
    for number in (1, 2):
        ours.sum(number, then=number + 1)
    assert sorted(ours.charges) == sorted([*ours.nodes, *ours.nodes])


def test_every_attempt_has_fresh_keys_and_a_fresh_seed() -> None:
    ours, seen = federation(terms_of(3)), []
    for _ in range(2):
        exchange = ours.until(Stage.KEYS)
        keys = read_keys(body_of(ours.answer("node-00", exchange.requests["node-00"])))
        seen += [keys.sealing, keys.masking, keys.check]
    assert len(set(seen)) == 6


def test_what_a_request_asks_for_can_be_read_by_who_carries_it() -> None:
    ours = federation(terms_of(3))
    terms, (part,) = read_request(ours.until(Stage.MASKED).requests["node-02"])
    assert (terms, part.stage, part.round) == (ours.terms, Stage.MASKED, 1)
