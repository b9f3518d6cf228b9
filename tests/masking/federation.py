"""A server and its nodes in one process, with a say in who answers what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from discreet.masking.identity import Directory, Identity
from discreet.masking.node import MaskingNode
from discreet.masking.wire import (
    Stage,
    Terms,
    join,
    join_names,
    read_reply,
    read_request,
    split,
    write_request,
)
from discreet.server.masking_server import Exchange, MaskingServer, Opened

RUN = "0123456789abcdef" * 2
Gone = Mapping[Stage, frozenset[str]]
NOBODY: Gone = {}


def terms_of(
    nodes: int, *, dropouts: int = 1, colluding: int = 0, length: int = 7, bits: int = 20
) -> Terms:
    return Terms(RUN, nodes, dropouts, colluding, (nodes + colluding) // 2 + 1, bits, length)


def identities(nodes: int) -> dict[str, Identity]:
    return {
        name: Identity.generate(name) for name in (f"node-{number:02d}" for number in range(nodes))
    }


class MemoryStore:
    """A `FolderStore` without a disk."""

    def __init__(self) -> None:
        self.states: dict[str, bytes] = {}

    @contextmanager
    def locked(self, run: str) -> Iterator[None]:
        yield

    def load(self, run: str) -> bytes | None:
        return self.states.get(run)

    def save(self, run: str, state: bytes) -> None:
        self.states[run] = state


@dataclass
class Federation:
    """All nodes of a run with their vectors; `charges` are the releases that each node paid for."""

    terms: Terms
    vectors: dict[str, NDArray[np.int64]]
    nodes: dict[str, MaskingNode]
    server: MaskingServer
    charges: list[str] = field(default_factory=list)
    asked: bytes = b""

    def answer(self, name: str, request: bytes) -> bytes:
        paid = lambda: self.charges.append(name)  # noqa: E731
        return self.nodes[name].answer(
            request, lambda _: self.vectors[name], paid, asked=self.asked
        )

    def send(self, exchange: Exchange, gone: Gone = NOBODY) -> Exchange | Opened:
        for name, request in exchange.requests.items():
            if name not in gone.get(exchange.stage, frozenset()):
                exchange.take(name, self.answer(name, request))
        return exchange.close()

    def until(self, stage: Stage, gone: Gone = NOBODY, *, round: int = 1) -> Exchange:
        """The exchange of a stage, not yet sent."""
        found: Exchange | Opened = self.server.begin(round)
        while isinstance(found, Exchange) and found.stage is not stage:
            found = self.send(found, gone)
        assert isinstance(found, Exchange)
        return found

    def sum(self, round: int = 1, gone: Gone = NOBODY, then: int | None = None) -> Opened:
        found: Exchange | Opened = self.server.begin(round, then=then)
        while isinstance(found, Exchange):
            found = self.send(found, gone)
        return found

    def plain_sum(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """What the sum should be: Python's integers, one by one."""
        columns = zip(*(self.vectors[name].tolist() for name in names), strict=True)
        return np.array([sum(column) % 2**self.terms.bits for column in columns], dtype=np.int64)


def federation(
    terms: Terms, *, seed: int = 71, store: Callable[[str], Any] = lambda name: MemoryStore()
) -> Federation:
    people, random = identities(terms.nodes), np.random.default_rng(seed)
    directory = Directory.of(people)
    vectors = {name: random.integers(-(2**40), 2**40, terms.length) for name in people}
    nodes = {
        name: MaskingNode(person, directory, terms, store(name)) for name, person in people.items()
    }
    return Federation(terms, vectors, nodes, MaskingServer(terms, tuple(people)))


def altered(request: bytes, body: bytes) -> bytes:
    """A request for the same stage of the same attempt that says something else."""
    terms, (part,) = read_request(request)
    return write_request(terms, [part.answered(body)])


def body_of(message: bytes) -> bytes:
    """What a request, or a reply, of one part says."""
    kind = split(message)[0]
    parts = read_reply(message) if kind.endswith(b"reply") else read_request(message)[1]
    return parts[0].body


def lists(alive: Iterable[str], gone: Iterable[str] = ()) -> bytes:
    """The body of a request to confirm."""
    return join(join_names(alive), join_names(gone))
