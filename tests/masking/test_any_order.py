"""A server that sends what it likes, in any order, again and again: what honest nodes never give away."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from discreet.masking.server import Exchange, Opened
from discreet.masking.wire import (
    Abandoned,
    MaskingRefused,
    Part,
    Stage,
    read_reply,
    read_request,
    split_named,
    write_request,
)
from tests.masking.federation import altered, federation, lists, terms_of

NAMES = [f"node-{number:02d}" for number in range(4)]
ANY = st.integers(0, 2**16)


class DishonestServer(RuleBasedStateMachine):
    """Honest steps of several attempts at two rounds, mixed with old requests and with lists of the server's own."""

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

    @rule(away=st.sets(st.sampled_from(NAMES), max_size=2))
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

    @rule(which=ANY, to=st.sampled_from(NAMES))
    def send_an_old_request(self, which: int, to: str) -> None:
        if self.sent:
            self.ask(to, self.sent[which % len(self.sent)][1])

    @rule(which=ANY, alive=st.sets(st.sampled_from(NAMES)), gone=st.sets(st.sampled_from(NAMES)))
    def send_lists_of_its_own(self, which: int, alive: set[str], gone: set[str]) -> None:
        asked = [(name, request) for name, request in self.sent if len(read_request(request)[1]) == 1]
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
