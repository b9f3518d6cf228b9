"""Shamir's shares, how they travel, and what a wrong one does."""

from __future__ import annotations

import itertools
import os

import pytest

from discreet.masking.agreement import Abandoned, MaskingRefused
from discreet.masking.masks import public_key, seed_check
from discreet.masking.server import Exchange, Opened
from discreet.masking.shares import combine, route, seal, split_secret, unseal
from discreet.masking.signed_keys import read_keys
from discreet.masking.wire import MalformedBytes, Stage, join, join_named, read_reply, split_named, write_reply
from tests.masking.federation import Federation, altered, body_of, federation, terms_of


def test_any_t_shares_open_the_secret() -> None:
    secret = os.urandom(48)
    shares = dict(enumerate(split_secret(secret, threshold=3, count=5), start=1))
    for places in itertools.combinations(shares, 3):
        assert combine({place: shares[place] for place in places}) == secret


def test_fewer_than_t_shares_do_not_open_it() -> None:
    secret = os.urandom(16)
    shares = dict(enumerate(split_secret(secret, threshold=3, count=5), start=1))
    for count in (1, 2):
        for places in itertools.combinations(shares, count):
            assert combine({place: shares[place] for place in places}) != secret  # equal by chance: below 1e-36


@pytest.mark.parametrize("change", ["a byte", "another receiver", "another attempt", "another key"])
def test_sealed_shares_open_for_their_receiver_in_their_attempt_alone(change: str) -> None:
    sender, receiver = os.urandom(32), os.urandom(32)
    sealed = seal(b"share", sender, public_key(receiver), bound=route(b"attempt", "a", "b"))
    bound = {
        "another receiver": route(b"attempt", "a", "c"),
        "another attempt": route(b"tempt at", "a", "b"),
    }.get(change, route(b"attempt", "a", "b"))
    if change == "a byte":
        sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    key = os.urandom(32) if change == "another key" else receiver
    with pytest.raises(MalformedBytes, match="can't be opened"):
        unseal(sealed, key, public_key(sender), bound=bound)


def test_sealed_shares_open() -> None:
    sender, receiver = os.urandom(32), os.urandom(32)
    bound = route(b"attempt", "a", "b")
    sealed = seal(b"share", sender, public_key(receiver), bound=bound)
    assert unseal(sealed, receiver, public_key(sender), bound=bound) == b"share"


def unmask(ours: Federation, liars: set[str], gone: frozenset[str] = frozenset()) -> Exchange | Opened:
    """The last exchange, in which `liars` give shares that are not theirs to give."""
    exchange = ours.until(Stage.UNMASK, gone={Stage.MASKED: gone})
    for name, request in exchange.requests.items():
        (part,) = read_reply(ours.answer(name, request))
        given = split_named(part.body)
        if name in liars:
            given = {of: os.urandom(len(share)) for of, share in given.items()}
        exchange.take(name, write_reply([part.answered(join_named(given))]))
    return exchange.close()


def test_one_node_that_gives_wrong_shares_is_left_out() -> None:
    ours = federation(terms_of(5, dropouts=2))
    opened = unmask(ours, {"node-01"}, gone=frozenset({"node-04"}))
    assert isinstance(opened, Opened)
    assert opened.total.tolist() == ours.plain_sum(opened.names).tolist()


def test_wrong_shares_that_can_not_be_left_out_never_become_a_sum() -> None:
    ours = federation(terms_of(3))
    with pytest.raises(Abandoned, match="do not fit together"):
        unmask(ours, {"node-00", "node-01"})


def test_a_share_of_another_size_is_malformed() -> None:
    ours = federation(terms_of(3))
    exchange = ours.until(Stage.UNMASK)
    (part,) = read_reply(ours.answer("node-00", exchange.requests["node-00"]))
    given = dict.fromkeys(split_named(part.body), bytes(17))
    with pytest.raises(MalformedBytes, match="share of another size"):
        exchange.take("node-00", write_reply([part.answered(join_named(given))]))


def test_a_public_key_with_which_every_exchange_gives_zero_is_refused_by_the_server() -> None:
    ours = federation(terms_of(3))
    exchange = ours.until(Stage.KEYS)
    (part,) = read_reply(ours.answer("node-00", exchange.requests["node-00"]))
    keys = read_keys(part.body)
    zero = keys._replace(sealing=bytes(32))
    with pytest.raises(MalformedBytes, match="public key that can't be used"):
        exchange.take("node-00", write_reply([part.answered(join(*zero))]))


def test_shares_that_can_not_be_opened_are_refused_by_name_before_anything_is_masked() -> None:
    ours = federation(terms_of(3))
    request = ours.until(Stage.MASKED).requests["node-00"]
    sealed = {**split_named(body_of(request)), "node-02": bytes(76)}
    with pytest.raises(MaskingRefused, match="from 'node-02': shares that can't be opened"):
        ours.answer("node-00", altered(request, join_named(sealed)))
    assert ours.charges == []


def test_the_check_of_a_seed_is_of_this_seed() -> None:
    one, other = os.urandom(16), os.urandom(16)
    assert seed_check(one) == seed_check(one) != seed_check(other)
