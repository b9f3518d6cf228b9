"""A dishonest server's requests, and each node's refusal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from discreet.masking.identity import Identity, attempt_bytes, read_keys, sign_keys
from discreet.masking.store import FolderStore
from discreet.masking.wire import (
    Abandoned,
    MaskingRefused,
    Part,
    Stage,
    join,
    join_named,
    read_reply,
    read_request,
    split_named,
    write_request,
)
from discreet.server.masking_server import Exchange, Opened
from tests.masking.federation import (
    Federation,
    MemoryStore,
    altered,
    body_of,
    federation,
    lists,
    terms_of,
)

NAMES = tuple(f"node-{number:02d}" for number in range(5))
ME = NAMES[1]
FIRST, LAST_GONE = lists(NAMES), lists(NAMES[:4], NAMES[4:])
WITHOUT_LAST = {Stage.MASKED: frozenset({NAMES[4]})}


@pytest.fixture
def ours() -> Federation:
    return federation(terms_of(5, dropouts=2))


def refuses(ours: Federation, request: bytes, reason: str, name: str = ME) -> None:
    with pytest.raises(MaskingRefused, match=reason):
        ours.answer(name, request)


def mine(ours: Federation, stage: Stage, *, round: int = 1) -> bytes:
    """This node's request of a stage in a new attempt, which the others have come to as well."""
    return ours.until(stage, round=round).requests[ME]


def another_stage(ours: Federation, request: bytes, stage: Stage, body: bytes) -> bytes:
    _, (part,) = read_request(request)
    return write_request(ours.terms, [Part(stage, part.round, part.attempt, body)])


# Both shares of a node.


def test_for_each_node_one_share_is_given_and_never_both(ours: Federation) -> None:
    exchange = ours.until(Stage.UNMASK, WITHOUT_LAST)
    given = split_named(body_of(ours.answer(ME, exchange.requests[ME])))
    assert {name: len(share) for name, share in given.items()} == {
        **dict.fromkeys(NAMES[:4], 16),
        NAMES[4]: 32,
    }


def test_a_node_in_both_lists_is_refused(ours: Federation) -> None:
    refuses(
        ours,
        altered(mine(ours, Stage.CONFIRM), lists(NAMES, NAMES[4:])),
        "'node-04' is in both lists",
    )


def test_lists_that_are_not_of_those_who_shared_or_leave_this_node_out_are_refused(
    ours: Federation,
) -> None:
    request, others = mine(ours, Stage.CONFIRM), [name for name in NAMES if name != ME]
    refuses(ours, altered(request, lists(others, [ME])), "lacks this node")
    for alive in ((*NAMES, "node-99"), NAMES[:4]):
        refuses(ours, altered(request, lists(alive)), "together must be the nodes")


def test_the_other_list_can_not_be_had_after_the_first_was_signed(ours: Federation) -> None:
    exchange = ours.until(Stage.CONFIRM)
    ours.answer(ME, exchange.requests[ME])
    refuses(
        ours,
        altered(exchange.requests[ME], LAST_GONE),
        "CONFIRM .*answered already",
    )


def test_nodes_that_were_told_different_lists_open_nothing(ours: Federation) -> None:
    exchange = ours.until(Stage.CONFIRM)
    told = dict(zip(NAMES, (FIRST, FIRST, LAST_GONE, LAST_GONE, FIRST), strict=True))
    signatures = {
        name: body_of(ours.answer(name, altered(exchange.requests[name], told[name])))
        for name in NAMES
    }
    asked = another_stage(ours, exchange.requests[ME], Stage.UNMASK, join_named(signatures))
    for name in NAMES[:4]:
        refuses(
            ours,
            asked,
            "did not sign the lists|not in the sum",
            name,
        )


def test_fewer_signatures_than_the_threshold_open_nothing(ours: Federation) -> None:
    request = ours.until(Stage.UNMASK, WITHOUT_LAST).requests[ME]
    signatures = split_named(body_of(request))
    few = dict(list(signatures.items())[: ours.terms.threshold - 1])
    refuses(ours, altered(request, join_named(few)), "2 nodes .*but 3 are needed")
    stranger = join_named(few | {NAMES[4]: b"signed"})
    refuses(ours, altered(request, stranger), "'node-04', .*not in the sum")


def test_nodes_that_were_told_different_keys_can_not_open_each_others_shares(
    ours: Federation,
) -> None:
    exchange = ours.until(Stage.SHARES)
    fewer = split_named(body_of(exchange.requests[ME]))
    del fewer[NAMES[4]]
    replies = {name: ours.answer(name, exchange.requests[name]) for name in NAMES if name != ME}
    ours.answer(ME, altered(exchange.requests[ME], join_named(fewer)))
    sealed = {name: split_named(body_of(replies[name]))[ME] for name in (NAMES[0], *NAMES[2:4])}
    request = another_stage(ours, exchange.requests[ME], Stage.MASKED, join_named(sealed))
    refuses(ours, request, "'node-00': .*can't be opened")


# Replays.


def test_no_request_of_a_round_that_is_over_is_answered_again(ours: Federation) -> None:
    requests, found = [], ours.server.begin(1)
    while isinstance(found, Exchange):
        requests.append(found.requests[ME])
        found = ours.send(found)
    for request in [*requests, another_stage(ours, requests[0], Stage.CONFIRM, LAST_GONE)]:
        refuses(ours, request, "round 1 is over")


@pytest.mark.parametrize("stage", Stage)
def test_no_stage_is_answered_twice_after_a_restart(tmp_path: Path, stage: Stage) -> None:
    ours = federation(terms_of(3), store=lambda name: FolderStore(tmp_path / name))
    request = mine(ours, stage)
    ours.answer(ME, request)
    ours.nodes[ME] = replace(ours.nodes[ME], store=FolderStore(tmp_path / ME))
    refuses(ours, request, "answered|round 1 is over|has begun already")


def test_an_earlier_attempt_is_over_once_a_new_one_has_begun(ours: Federation) -> None:
    first = mine(ours, Stage.KEYS)
    ours.answer(ME, first)
    old = mine(ours, Stage.CONFIRM)
    mine(ours, Stage.SHARES)
    refuses(ours, old, "attempt at round 1: .*never began")
    refuses(ours, first, "attempt at round 1 has begun")


def test_no_round_before_the_last_masked_vector_is_answered(ours: Federation) -> None:
    old = mine(ours, Stage.CONFIRM, round=3)
    mine(ours, Stage.CONFIRM, round=4)
    refuses(ours, old, "round 3 is over")


def test_a_round_that_was_opened_can_not_be_tried_again(ours: Federation) -> None:
    ours.sum(1)
    refuses(ours, ours.server.begin(1).requests[ME], "round 1 is over")


def test_keys_and_signatures_of_an_earlier_attempt_are_none_of_this_one(ours: Federation) -> None:
    old = split_named(body_of(mine(ours, Stage.SHARES)))
    request = mine(ours, Stage.SHARES)
    mixed = split_named(body_of(request)) | {NAMES[2]: old[NAMES[2]]}
    refuses(
        ours,
        altered(request, join_named(mixed)),
        "keys of 'node-02' are not signed .* for this attempt",
    )
    signatures = body_of(mine(ours, Stage.UNMASK))
    refuses(
        ours,
        altered(mine(ours, Stage.UNMASK), signatures),
        "did not sign the lists",
    )


def test_every_attempt_has_fresh_keys_and_a_fresh_seed(ours: Federation) -> None:
    keys = [read_keys(body_of(ours.answer(ME, mine(ours, Stage.KEYS)))) for _ in range(2)]
    assert len({value for each in keys for value in each[:3]}) == 6


# Swapped keys.


def test_a_key_that_was_swapped_under_a_true_signature_is_found_out(ours: Federation) -> None:
    request = mine(ours, Stage.SHARES)
    keys = split_named(body_of(request))
    true, other = read_keys(keys[NAMES[3]]), read_keys(keys[NAMES[2]])
    for which in ("sealing", "masking", "check"):
        swapped = join(*true._replace(**{which: getattr(other, which)}))
        asked = altered(request, join_named(keys | {NAMES[3]: swapped}))
        refuses(ours, asked, "keys of 'node-03' are not signed .*key")


def test_a_key_that_the_server_made_and_signed_itself_is_found_out(ours: Federation) -> None:
    request = mine(ours, Stage.SHARES)
    terms, (part,) = read_request(request)
    public = (bytes(31) + b"\t", bytes(31) + b"\t", bytes(16))
    forged = sign_keys(
        Identity.generate(NAMES[3]), ours.nodes[ME].directory, attempt_bytes(terms, part), public
    )
    keys = split_named(part.body) | {NAMES[3]: join(*forged)}
    refuses(
        ours,
        altered(request, join_named(keys)),
        "keys of 'node-03' are not signed .*key",
    )


def test_a_node_knows_its_own_keys_and_who_is_in_its_list(ours: Federation) -> None:
    request = mine(ours, Stage.SHARES)
    keys = split_named(body_of(request))
    own, stranger = keys | {ME: keys[NAMES[0]]}, keys | {"node-99": keys[ME]}
    refuses(ours, altered(request, join_named(own)), "not the keys that it made")
    refuses(ours, altered(request, join_named(stranger)), "'node-99' is not in .*list")


def test_shares_under_another_name_or_of_a_stranger_are_refused_before_masking(
    ours: Federation,
) -> None:
    request = ours.until(Stage.MASKED, {Stage.KEYS: frozenset({NAMES[4]})}).requests[ME]
    sealed = split_named(body_of(request))
    exchanged = sealed | {NAMES[0]: sealed[NAMES[2]], NAMES[2]: sealed[NAMES[0]]}
    refuses(ours, altered(request, join_named(exchanged)), "'node-00': .*can't be opened")
    refuses(
        ours,
        altered(request, join_named(sealed | {NAMES[4]: sealed[NAMES[0]]})),
        "not among the others",
    )
    assert ours.charges == []


# Fewer nodes, other terms, another order.


def test_fewer_than_n_minus_d_nodes_get_no_masked_vector(ours: Federation) -> None:
    for stage in (Stage.SHARES, Stage.MASKED):
        request = mine(ours, stage)
        few = {
            name: value
            for name, value in split_named(body_of(request)).items()
            if name in NAMES[:2]
        }
        refuses(ours, altered(request, join_named(few)), "only 2 nodes .* fewer than 3 is none")
    refuses(
        ours,
        altered(mine(ours, Stage.CONFIRM), lists(NAMES[:2], NAMES[2:])),
        "only 2 nodes are in the sum",
    )


def test_other_terms_than_the_nodes_own_are_refused(ours: Federation) -> None:
    request = mine(ours, Stage.KEYS)
    weaker = write_request(replace(ours.terms, dropouts=0, threshold=5), read_request(request)[1])
    refuses(ours, weaker, "other terms: dropouts is 0 in the request and 2 here")
    ours.nodes[ME] = replace(ours.nodes[ME], terms=replace(ours.terms, run="f" * 32))
    refuses(ours, request, "other terms: run is")


def test_a_stage_can_not_be_skipped(ours: Federation) -> None:
    request = another_stage(ours, mine(ours, Stage.MASKED), Stage.CONFIRM, FIRST)
    refuses(ours, request, "CONFIRM comes after MASKED, not after SHARES")


def test_attempts_without_end_are_refused(ours: Federation) -> None:
    for _ in range(100):
        ours.answer(ME, mine(ours, Stage.KEYS))
    refuses(ours, mine(ours, Stage.KEYS), "100 attempts have begun")


# Less noise, or a smaller price, than a node counts on.


def test_a_node_that_was_told_of_another_noise_signs_keys_that_the_others_refuse(
    ours: Federation,
) -> None:
    exchange = ours.until(Stage.KEYS)
    louder = replace(ours.terms, variance=100)
    told_otherwise = replace(ours.nodes[NAMES[3]], terms=louder, store=MemoryStore())
    _, parts = read_request(exchange.requests[NAMES[3]])
    others = {
        name: body_of(ours.answer(name, exchange.requests[name]))
        for name in NAMES
        if name != NAMES[3]
    }
    forged = told_otherwise.answer(
        write_request(louder, parts), lambda: ours.vectors[ME], lambda: None
    )
    keys = join_named(others | {NAMES[3]: body_of(forged)})
    request = another_stage(ours, exchange.requests[ME], Stage.SHARES, keys)
    refuses(ours, request, "keys of 'node-03' are not signed .*for this attempt")


def test_another_attempt_at_another_price_is_paid_anew(ours: Federation) -> None:
    for ours.asked in (b"cheap", b"cheap", b"dear", b"cheap"):
        ours.answer(ME, mine(ours, Stage.MASKED))
    assert ours.charges == [ME] * 3


FOUR = [f"node-{number:02d}" for number in range(4)]
ANY = st.integers(0, 2**16)


class DishonestServer(RuleBasedStateMachine):
    """Honest steps of several attempts at two rounds, mixed with old requests and with lists of the
    server's own."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = federation(terms_of(4, dropouts=1, length=2))
        self.open: list[Exchange] = []
        self.sent: list[tuple[str, bytes]] = []
        self.answered: list[tuple[str, Part]] = []

    def ask(self, name: str, request: bytes) -> bytes | None:
        self.sent.append((name, request))
        try:
            reply = self.ours.answer(name, request)
        except MaskingRefused:
            return None
        self.answered += [(name, part) for part in read_reply(reply)]
        return reply

    @rule(round=st.integers(1, 2))
    def begin(self, round: int) -> None:
        self.open = [self.ours.server.begin(round, then=round + 1)]

    @rule(away=st.sets(st.sampled_from(FOUR), max_size=2))
    def go_on(self, away: set[str]) -> None:
        if not self.open:
            return
        exchange = self.open.pop()
        for name, request in exchange.requests.items():
            if name not in away and (reply := self.ask(name, request)) is not None:
                exchange.take(name, reply)
        try:
            found = exchange.close()
        except Abandoned:
            return
        if isinstance(found, Opened):
            assert found.total.tolist() == self.ours.plain_sum(found.names).tolist()
        else:
            self.open = [found]

    @rule(which=ANY, to=st.sampled_from(FOUR))
    def send_an_old_request(self, which: int, to: str) -> None:
        if self.sent:
            self.ask(to, self.sent[which % len(self.sent)][1])

    @rule(which=ANY, alive=st.sets(st.sampled_from(FOUR)), gone=st.sets(st.sampled_from(FOUR)))
    def send_lists_of_its_own(self, which: int, alive: set[str], gone: set[str]) -> None:
        asked = [
            (name, request) for name, request in self.sent if len(read_request(request)[1]) == 1
        ]
        if asked:
            name, request = asked[which % len(asked)]
            terms, (part,) = read_request(request)
            confirm = write_request(terms, [Part(Stage.CONFIRM, part.round, part.attempt, b"")])
            self.ask(name, altered(confirm, lists(alive, gone)))

    @invariant()
    def each_node_answers_each_stage_of_an_attempt_once(self) -> None:
        told = [(name, part.stage, part.attempt) for name, part in self.answered]
        assert len(set(told)) == len(told)

    @invariant()
    def nobody_gives_both_shares_and_all_give_the_same(self) -> None:
        kinds: dict[tuple[bytes, str], set[int]] = defaultdict(set)
        for _, part in self.answered:
            if part.stage is Stage.UNMASK:
                for of, share in split_named(part.body).items():
                    kinds[part.attempt, of].add(len(share))
        assert all(len(sizes) == 1 for sizes in kinds.values())

    @invariant()
    def at_most_one_attempt_at_a_round_can_be_opened(self) -> None:
        givers: dict[int, dict[bytes, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, part in self.answered:
            if part.stage is Stage.UNMASK:
                givers[part.round][part.attempt].add(name)
        for attempts in givers.values():
            assert sum(len(names) >= self.ours.terms.threshold for names in attempts.values()) <= 1

    @invariant()
    def whoever_sends_a_masked_vector_has_paid_for_its_round(self) -> None:
        rounds = {(name, part.round) for name, part in self.answered if part.stage is Stage.MASKED}
        assert sorted(self.ours.charges) == sorted(name for name, _ in rounds)


TestDishonestServer = DishonestServer.TestCase
TestDishonestServer.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
