"""What a dishonest server may try, and what each node says to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from discreet.masking.agreement import MaskingRefused
from discreet.masking.identity import Identity
from discreet.masking.server import Exchange, Opened
from discreet.masking.signed_keys import place_of, read_keys, sign_keys
from discreet.masking.store import FolderStore
from discreet.masking.wire import Part, Stage, join, join_named, read_request, split_named, write_request
from tests.masking.federation import Federation, MemoryStore, altered, body_of, federation, lists, terms_of

NAMES = tuple(f"node-{number:02d}" for number in range(5))
ME = NAMES[1]


@pytest.fixture
def ours() -> Federation:
    return federation(terms_of(5, dropouts=2))


def refuses(ours: Federation, request: bytes, reason: str, name: str = ME) -> None:
    with pytest.raises(MaskingRefused, match=reason):
        ours.answer(name, request)


def rerun(ours: Federation, stage: Stage, *, round: int = 1) -> bytes:
    """This node's request of a stage in a new attempt, which the others have come to as well."""
    return ours.until(stage, round=round).requests[ME]


# Both shares of a node.


def test_a_node_in_both_lists_is_refused(ours: Federation) -> None:
    request = ours.until(Stage.CONFIRM).requests[ME]
    refuses(ours, altered(request, lists(NAMES, NAMES[4:])), "'node-04' is in both lists")


def test_for_each_node_one_share_is_given_and_never_both(ours: Federation) -> None:
    exchange = ours.until(Stage.UNMASK, gone={Stage.MASKED: frozenset({NAMES[4]})})
    given = split_named(body_of(ours.answer(ME, exchange.requests[ME])))
    assert {name: len(share) for name, share in given.items()} == {**dict.fromkeys(NAMES[:4], 16), NAMES[4]: 32}


def test_the_other_list_can_not_be_had_after_the_first_was_signed(ours: Federation) -> None:
    exchange = ours.until(Stage.CONFIRM)
    ours.answer(ME, exchange.requests[ME])
    refuses(ours, altered(exchange.requests[ME], lists(NAMES[:4], NAMES[4:])), "CONFIRM of this attempt is answered")


def test_the_other_list_can_not_be_had_after_the_sum_was_opened(ours: Federation) -> None:
    request = ours.until(Stage.CONFIRM).requests[ME]
    ours.sum(1)
    refuses(ours, altered(request, lists(NAMES[:4], NAMES[4:])), "round 1 is over")


# Different lists for different nodes.


def test_nodes_that_were_told_different_lists_open_nothing(ours: Federation) -> None:
    exchange = ours.until(Stage.CONFIRM)
    first, second = lists(NAMES), lists(NAMES[:4], NAMES[4:])
    told = dict(zip(NAMES, (first, first, second, second, first), strict=True))
    signatures = {name: body_of(ours.answer(name, altered(exchange.requests[name], told[name]))) for name in NAMES}
    _, (part,) = read_request(exchange.requests[ME])
    asked = write_request(ours.terms, [Part(Stage.UNMASK, 1, part.attempt, join_named(signatures))])
    for name in NAMES[:4]:
        refuses(ours, asked, "did not sign the lists that this node signed|which is not in the sum", name)


def test_fewer_signatures_than_the_threshold_open_nothing(ours: Federation) -> None:
    request = ours.until(Stage.UNMASK).requests[ME]
    signatures = split_named(body_of(request))
    few = dict(list(signatures.items())[: ours.terms.threshold - 1])
    refuses(ours, altered(request, join_named(few)), "2 nodes signed the lists, and it takes 3")


def test_the_signature_of_who_is_not_in_the_sum_does_not_count(ours: Federation) -> None:
    request = ours.until(Stage.UNMASK, gone={Stage.MASKED: frozenset({NAMES[4]})}).requests[ME]
    signatures = split_named(body_of(request)) | {NAMES[4]: b"signed"}
    refuses(ours, altered(request, join_named(signatures)), "'node-04', which is not in the sum")


def test_nodes_that_were_told_different_keys_can_not_open_each_others_shares(ours: Federation) -> None:
    exchange = ours.until(Stage.SHARES)
    fewer = split_named(body_of(exchange.requests[ME]))
    del fewer[NAMES[4]]
    replies = {name: ours.answer(name, exchange.requests[name]) for name in NAMES if name != ME}
    ours.answer(ME, altered(exchange.requests[ME], join_named(fewer)))
    sealed = {name: split_named(body_of(replies[name]))[ME] for name in (NAMES[0], *NAMES[2:4])}
    _, (part,) = read_request(exchange.requests[ME])
    request = write_request(ours.terms, [Part(Stage.MASKED, 1, part.attempt, join_named(sealed))])
    refuses(ours, request, "from 'node-00': shares that can't be opened")


# Replays.


def test_no_request_of_a_round_that_is_over_is_answered_again(ours: Federation) -> None:
    requests, found = [], ours.server.begin(1)
    while isinstance(found, Exchange):
        requests.append(found.requests[ME])
        found = ours.send(found)
    assert isinstance(found, Opened)
    for request in requests:
        refuses(ours, request, "round 1 is over")


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_no_stage_is_answered_twice(ours: Federation, stage: Stage) -> None:
    request = ours.until(stage).requests[ME]
    ours.answer(ME, request)
    refuses(ours, request, "answered|round 1 is over|has begun already")


@pytest.mark.parametrize("stage", Stage, ids=lambda stage: stage.name)
def test_no_stage_is_answered_twice_after_a_restart(tmp_path: Path, stage: Stage) -> None:
    ours = federation(terms_of(3), store=lambda name: FolderStore(tmp_path / name))
    request = ours.until(stage).requests[ME]
    ours.answer(ME, request)
    ours.nodes[ME] = replace(ours.nodes[ME], store=FolderStore(tmp_path / ME))
    refuses(ours, request, "answered|round 1 is over|has begun already")


def test_an_earlier_attempt_is_over_once_a_new_one_has_begun(ours: Federation) -> None:
    old = ours.until(Stage.CONFIRM).requests[ME]
    rerun(ours, Stage.SHARES)
    refuses(ours, old, "no part in this attempt at round 1: it ended, or never began")


def test_no_round_before_the_last_masked_vector_is_answered(ours: Federation) -> None:
    old = ours.until(Stage.CONFIRM, round=3).requests[ME]
    rerun(ours, Stage.CONFIRM, round=4)
    refuses(ours, old, "round 3 is over for this node")


def test_a_round_that_was_opened_can_not_be_tried_again(ours: Federation) -> None:
    ours.sum(1)
    refuses(ours, ours.server.begin(1).requests[ME], "round 1 is over for this node")


def test_the_keys_of_an_earlier_attempt_are_no_keys_of_this_one(ours: Federation) -> None:
    old = split_named(body_of(ours.until(Stage.SHARES).requests[ME]))
    request = rerun(ours, Stage.SHARES)
    mixed = split_named(body_of(request)) | {NAMES[2]: old[NAMES[2]]}
    refuses(ours, altered(request, join_named(mixed)), "keys of 'node-02' are not signed .* for this attempt")


def test_the_signatures_of_an_earlier_attempt_are_no_signatures_of_this_one(ours: Federation) -> None:
    old = body_of(ours.until(Stage.UNMASK).requests[ME])
    request = rerun(ours, Stage.UNMASK)
    refuses(ours, altered(request, old), "did not sign the lists that this node signed")


def test_an_attempt_can_not_be_begun_again_after_another_one(ours: Federation) -> None:
    first = ours.until(Stage.KEYS).requests[ME]
    ours.answer(ME, first)
    rerun(ours, Stage.SHARES)
    refuses(ours, first, "this attempt at round 1 has begun already")


# Swapped keys.


def test_a_key_that_the_server_made_and_signed_itself_is_found_out(ours: Federation) -> None:
    request = ours.until(Stage.SHARES).requests[ME]
    terms, (part,) = read_request(request)
    other, public = Identity.generate(NAMES[3]), (bytes(31) + b"\t",) * 2
    forged = sign_keys(other, ours.nodes[ME].directory, place_of(terms, part), (*public, bytes(16)))
    keys = split_named(part.body) | {NAMES[3]: join(*forged)}
    refuses(ours, altered(request, join_named(keys)), "keys of 'node-03' are not signed with its registered key")


@pytest.mark.parametrize("which", ["sealing", "masking", "check"])
def test_a_key_that_was_swapped_under_a_true_signature_is_found_out(ours: Federation, which: str) -> None:
    request = ours.until(Stage.SHARES).requests[ME]
    keys = split_named(body_of(request))
    true = read_keys(keys[NAMES[3]])
    other = getattr(read_keys(keys[NAMES[2]]), which)
    keys[NAMES[3]] = join(*true._replace(**{which: other}))
    refuses(ours, altered(request, join_named(keys)), "keys of 'node-03' are not signed with its registered key")


def test_a_node_knows_its_own_keys(ours: Federation) -> None:
    request = ours.until(Stage.SHARES).requests[ME]
    keys = split_named(body_of(request))
    keys[ME] = keys[NAMES[0]]
    refuses(ours, altered(request, join_named(keys)), "not those that it made for this attempt")


def test_shares_that_the_server_sends_under_another_name_are_refused(ours: Federation) -> None:
    request = ours.until(Stage.MASKED).requests[ME]
    sealed = split_named(body_of(request))
    sealed[NAMES[0]], sealed[NAMES[2]] = sealed[NAMES[2]], sealed[NAMES[0]]
    refuses(ours, altered(request, join_named(sealed)), "from 'node-00': shares that can't be opened")
    assert ours.charges == []


# Too many dropouts, and wrong names.


@pytest.mark.parametrize("stage", [Stage.SHARES, Stage.MASKED], ids=lambda stage: stage.name)
def test_fewer_than_n_minus_d_nodes_get_no_masked_vector(ours: Federation, stage: Stage) -> None:
    request = ours.until(stage).requests[ME]
    few = {name: value for name, value in split_named(body_of(request)).items() if name in NAMES[:2]}
    refuses(ours, altered(request, join_named(few)), "only 2 nodes .* fewer than 3 is none")


def test_a_list_of_fewer_than_n_minus_d_survivors_is_refused(ours: Federation) -> None:
    request = ours.until(Stage.CONFIRM).requests[ME]
    refuses(ours, altered(request, lists(NAMES[:2], NAMES[2:])), "only 2 nodes are in the sum")


def test_a_list_that_leaves_the_node_itself_out_is_refused(ours: Federation) -> None:
    request = ours.until(Stage.CONFIRM).requests[ME]
    others = [name for name in NAMES if name != ME]
    refuses(ours, altered(request, lists(others, [ME])), "leaves this node out")


def test_a_list_with_a_stranger_is_refused(ours: Federation) -> None:
    request = ours.until(Stage.CONFIRM).requests[ME]
    refuses(ours, altered(request, lists((*NAMES, "node-99"))), "not, together, the nodes whose shares")


def test_lists_that_leave_out_who_shared_are_refused(ours: Federation) -> None:
    request = ours.until(Stage.CONFIRM).requests[ME]
    refuses(ours, altered(request, lists(NAMES[:4])), "not, together, the nodes whose shares")


def test_a_stranger_among_the_keys_is_refused(ours: Federation) -> None:
    request = ours.until(Stage.SHARES).requests[ME]
    keys = split_named(body_of(request))
    refuses(ours, altered(request, join_named(keys | {"node-99": keys[ME]})), "'node-99' is not in this node's list")


def test_shares_of_who_made_no_keys_are_refused(ours: Federation) -> None:
    request = ours.until(Stage.MASKED, gone={Stage.KEYS: frozenset({NAMES[4]})}).requests[ME]
    sealed = split_named(body_of(request))
    refuses(ours, altered(request, join_named(sealed | {NAMES[4]: sealed[NAMES[0]]})), "not among the others")


def test_other_terms_than_the_nodes_own_are_refused(ours: Federation) -> None:
    _, parts = read_request(ours.until(Stage.KEYS).requests[ME])
    weaker = replace(ours.terms, dropouts=0, threshold=5)
    refuses(ours, write_request(weaker, parts), "other terms: dropouts is 0 in the request and 2 here")


def test_a_stage_can_not_be_skipped(ours: Federation) -> None:
    _, (part,) = read_request(ours.until(Stage.MASKED).requests[ME])
    request = write_request(ours.terms, [Part(Stage.CONFIRM, 1, part.attempt, lists(NAMES))])
    refuses(ours, request, "CONFIRM comes after MASKED, not after SHARES")


def test_a_node_of_another_run_has_no_state_of_this_one(ours: Federation) -> None:
    ours.nodes[ME] = replace(ours.nodes[ME], terms=replace(ours.terms, run="f" * 32))
    refuses(ours, ours.until(Stage.KEYS).requests[ME], "other terms: run is")


def test_attempts_without_end_are_refused(ours: Federation) -> None:
    for _ in range(100):
        ours.answer(ME, ours.until(Stage.KEYS).requests[ME])
    refuses(ours, ours.until(Stage.KEYS).requests[ME], "100 attempts have begun since the last sum")


# Less noise, or a smaller price, than a node counts on.


def test_a_node_that_was_told_of_another_noise_signs_keys_that_the_others_refuse(ours: Federation) -> None:
    exchange = ours.until(Stage.KEYS)
    louder = replace(ours.terms, variance=100)
    told_otherwise = replace(ours.nodes[NAMES[3]], terms=louder, store=MemoryStore())
    _, parts = read_request(exchange.requests[NAMES[3]])
    others = {name: body_of(ours.answer(name, exchange.requests[name])) for name in NAMES if name != NAMES[3]}
    forged = told_otherwise.answer(write_request(louder, parts), lambda: ours.vectors[ME], lambda: None)
    keys = join_named(others | {NAMES[3]: body_of(forged)})
    request = write_request(ours.terms, [Part(Stage.SHARES, 1, parts[0].attempt, keys)])
    refuses(ours, request, "keys of 'node-03' are not signed with its registered key for this attempt")


def test_another_attempt_at_another_price_is_paid_anew(ours: Federation) -> None:
    for ours.asked in (b"cheap", b"cheap", b"dear"):
        ours.answer(ME, ours.until(Stage.MASKED).requests[ME])
    assert ours.charges == [ME, ME]


def test_after_a_dear_attempt_a_cheap_one_is_paid_as_well(ours: Federation) -> None:
    for ours.asked in (b"dear", b"cheap", b"dear"):
        ours.answer(ME, ours.until(Stage.MASKED).requests[ME])
    assert ours.charges == [ME] * 3
