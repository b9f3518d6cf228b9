"""Within the limits on dropouts the server's sum is the plain sum, bit by bit, and uniform before;
beyond them
there is none."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from discreet.masking.identity import read_keys
from discreet.masking.masks import (
    add_mask,
    combine,
    own_key,
    public_key,
    route,
    seal,
    split_secret,
    unseal,
)
from discreet.masking.wire import (
    Abandoned,
    MalformedBytes,
    Stage,
    Terms,
    join,
    join_named,
    read_reply,
    split_named,
    write_reply,
)
from discreet.server.masking_server import Exchange, Opened
from tests.masking.federation import Federation, Gone, body_of, federation, terms_of

BEFORE_CONFIRM = (Stage.KEYS, Stage.SHARES, Stage.MASKED)


@st.composite
def dropouts(draw: st.DrawFn, terms: Terms) -> Gone:
    """The nodes that are gone at each stage: at most d until the vectors are in, then so many that
    t are left."""
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
def test_the_sum_of_those_who_are_left_is_their_plain_sum_and_each_of_them_paid_once(
    nodes: int, cases: int
) -> None:
    settings(max_examples=cases, deadline=None)(given(federations(nodes))(check_sum))()


@pytest.mark.parametrize("stage", Stage)
def test_a_round_with_too_few_nodes_is_abandoned_unread_and_retried_for_one_price(
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


def test_a_round_with_early_keys_takes_three_exchanges_despite_a_node_that_was_away() -> None:
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


def unmask(
    ours: Federation, liars: set[str], gone: frozenset[str] = frozenset()
) -> Exchange | Opened:
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
    with pytest.raises(Abandoned, match="are inconsistent"):
        unmask(federation(terms_of(3)), {"node-00", "node-01"})


def refused_by_server(stage: Stage, change: object, reason: str) -> None:
    """The server refuses a reply whose body is changed."""
    ours = federation(terms_of(3))
    exchange = ours.until(stage)
    (part,) = read_reply(ours.answer("node-00", exchange.requests["node-00"]))
    assert callable(change)
    with pytest.raises(MalformedBytes, match=reason):
        exchange.take("node-00", write_reply([part.answered(change(part.body))]))


def test_shares_of_another_size_and_keys_of_small_order_are_malformed() -> None:
    refused_by_server(
        Stage.UNMASK,
        lambda body: join_named(dict.fromkeys(split_named(body), bytes(17))),
        "share of a wrong size",
    )
    for which in ("sealing", "masking"):
        refused_by_server(
            Stage.KEYS,
            lambda body, which=which: join(*read_keys(body)._replace(**{which: bytes(32)})),
            "public key that can't be used",
        )


FALSE_ALARM = 1e-10
LENGTH = 40_000


def is_uniform(data: bytes) -> bool:
    """Chi-square of the bytes' counts against equal counts, with 255 degrees of freedom."""
    return (
        float(chisquare(np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)).pvalue)
        >= FALSE_ALARM
    )


def constant(bits: int) -> Federation:
    """A federation whose nodes all sum the same small constant: as far from uniform as vectors can
    be."""
    ours = federation(terms_of(3, bits=bits, length=LENGTH))
    ours.vectors = {name: np.full(LENGTH, 3, dtype=np.int64) for name in ours.vectors}
    return ours


@pytest.mark.parametrize("bits", [16, 21, 24, 32])
def test_each_masked_vector_and_their_sum_are_uniform_before_unmasking(bits: int) -> None:
    ours = constant(bits)
    exchange = ours.until(Stage.MASKED)
    replies = {name: ours.answer(name, request) for name, request in exchange.requests.items()}
    assert all(is_uniform(body_of(reply)) for reply in replies.values())
    for name, reply in replies.items():
        exchange.take(name, reply)
    held = exchange._attempts[0].total & np.uint32((1 << bits) - 1)
    assert is_uniform((held >> np.uint32(bits - 16)).astype(np.uint16).tobytes())


def test_a_vector_is_uniform_to_the_server_even_if_it_knows_every_vector() -> None:
    ours = constant(32)
    exchange = ours.until(Stage.MASKED)
    masked = [
        np.frombuffer(body_of(ours.answer(name, exchange.requests[name])), dtype=np.uint8)
        for name in ours.nodes
    ]
    assert all(is_uniform((one - other).tobytes()) for one, other in itertools.pairwise(masked))


def test_the_masks_of_two_attempts_have_nothing_in_common() -> None:
    ours, masked = constant(32), []
    for _ in range(2):
        exchange = ours.until(Stage.MASKED)
        body = body_of(ours.answer("node-00", exchange.requests["node-00"]))
        masked.append(np.frombuffer(body, dtype=np.uint8))
    assert is_uniform((masked[0] - masked[1]).tobytes())


def test_the_test_finds_what_is_not_masked() -> None:
    words = np.random.default_rng(83).integers(0, 2**16, LENGTH).astype(np.uint16)
    # one value in twenty is in the clear
    some = np.where(np.arange(LENGTH) % 20 == 0, np.uint16(3), words)
    for fault in (np.full_like(words, 3), some, words & np.uint16(0x7FFF), words - words):
        assert is_uniform(words.tobytes())
        assert not is_uniform(fault.tobytes())


def ours_of(seed: bytes) -> NDArray[np.uint32]:
    words = np.zeros(LENGTH, dtype=np.uint32)
    add_mask(words, own_key(seed, b"context"), subtract=False)
    return words


def flowers_of(seed: bytes) -> NDArray[np.uint32]:
    return pseudo_rand_gen(seed, 2**32, [(LENGTH,)])[0].astype(np.uint32)


def test_masks_of_two_secrets_have_nothing_in_common_and_flowers_fail_that_test() -> None:
    seed = bytes(range(16))
    # another secret, whose words of 32 bits have the same XOR
    swapped = seed[4:8] + seed[:4] + seed[8:]
    assert is_uniform((ours_of(seed) - ours_of(swapped)).tobytes())
    assert not is_uniform((flowers_of(seed) - flowers_of(swapped)).tobytes())
