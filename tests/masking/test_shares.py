"""Shamir's shares, their seals, and what a wrong one does."""

from __future__ import annotations

import itertools
import os

import pytest

from discreet.masking.masks import combine, public_key, route, seal, split_secret, unseal
from discreet.masking.server import Exchange, Opened
from discreet.masking.signed_keys import read_keys
from discreet.masking.wire import (
    Abandoned,
    MalformedBytes,
    Stage,
    join,
    join_named,
    read_reply,
    split_named,
    write_reply,
)
from tests.masking.federation import Federation, federation, terms_of


def test_any_t_shares_open_the_secret_and_fewer_do_not() -> None:
    secret = os.urandom(48)
    shares = dict(enumerate(split_secret(secret, threshold=3, count=5), start=1))
    for count in (1, 2, 3):
        for places in itertools.combinations(shares, count):
            found = combine({place: shares[place] for place in places})
            assert (found == secret) == (count == 3)  # equal by chance: below 1e-36


def test_sealed_shares_open_for_their_receiver_in_their_attempt_alone() -> None:
    sender, receiver, bound = os.urandom(32), os.urandom(32), route(b"attempt", "a", "b")
    sealed = seal(b"share", sender, public_key(receiver), bound=bound)
    assert unseal(sealed, receiver, public_key(sender), bound=bound) == b"share"
    for data, key, place in (
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), receiver, bound),
        (sealed, os.urandom(32), bound),
        (sealed, receiver, route(b"attempt", "a", "c")),
        (sealed, receiver, route(b"tempt at", "a", "b")),
    ):
        with pytest.raises(MalformedBytes, match="can't be opened"):
            unseal(data, key, public_key(sender), bound=place)


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
    with pytest.raises(Abandoned, match="do not fit together"):
        unmask(federation(terms_of(3)), {"node-00", "node-01"})


def refused_by_server(stage: Stage, change: object, reason: str) -> None:
    """The server refuses a reply whose body is changed."""
    ours = federation(terms_of(3))
    exchange = ours.until(stage)
    (part,) = read_reply(ours.answer("node-00", exchange.requests["node-00"]))
    assert callable(change)
    with pytest.raises(MalformedBytes, match=reason):
        exchange.take("node-00", write_reply([part.answered(change(part.body))]))


def test_shares_of_another_size_and_keys_with_which_every_exchange_gives_zero_are_malformed() -> None:
    refused_by_server(
        Stage.UNMASK, lambda body: join_named(dict.fromkeys(split_named(body), bytes(17))), "share of another size"
    )
    for which in ("sealing", "masking"):
        refused_by_server(
            Stage.KEYS,
            lambda body, which=which: join(*read_keys(body)._replace(**{which: bytes(32)})),
            "public key that can't be used",
        )
