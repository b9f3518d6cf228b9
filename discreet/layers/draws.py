"""The random numbers of a pass: each example has its own, which follow from a secret key, the
example's identity and the number of the call that draws.

So no example moves what another one draws, whatever their order and number and however they run,
side by side or one after the other. An example that is absent leaves the others' masks as they
were, for each key, unless the batch is padded to it: masks of other shapes are drawn anew, alike in
distribution, by the key that nobody knows. Nothing rests on the secrecy of a generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256

import torch
from torch import Tensor, nn

from discreet.privacy.randomness import RandomSource
from discreet.privacy.row_words import KEY_BYTES, RowWords, spread

_SEEDS = 2**22  # no pass draws so often
_UNIFORM = ("rand", "rand_like")
_NORMAL = ("randn", "randn_like")
# The bits of a uniform number of a type: with more, one just below 1 would be rounded to 1.
_BITS = {torch.float32: 24, torch.float64: 53}


class Key:
    """The key of a sum. If none was given it comes from PyTorch's generator, at the first draw."""

    def __init__(self, state: Tensor, given: bytes | None) -> None:
        self.words: RowWords | None = None if given is None else RowWords(given)
        self.state = state
        self.after: Tensor | None = None
        self.is_used = False

    def __call__(self, identities: Tensor, draw: int, count: int) -> Tensor:
        if self.words is None:
            source = torch.Generator().set_state(self.state)
            drawn = torch.empty(KEY_BYTES // 8, dtype=torch.int64)
            self.words = RowWords(drawn.random_(-(2**63), None, generator=source).numpy().tobytes())
            self.after = source.get_state()
        return self.words(identities, draw, count)


@dataclass
class Draws:
    """The draws of one pass.

    Attributes:
      key: None if nothing is drawn at random: a trial.
      identities: of the examples, int64 (n,), on the CPU.
      device: the model's.
      calls: the draws so far.
    """

    key: Key | None
    identities: Tensor
    device: torch.device
    calls: int = 0

    def of(self, places: Tensor) -> Draws:
        """The draws of some of the examples, from their first one."""
        return replace(self, identities=self.identities[places.cpu()], calls=0)

    def filled(self, rows: int) -> Draws:
        """The draws for a batch that is padded with copies of its last row, from the first one."""
        if len(self.identities) >= rows:
            return replace(self, calls=0)
        places = torch.arange(rows)
        return self.of(places.clamp(max=len(self.identities) - 1))

    def words(self, count: int, device: torch.device) -> Tensor:
        """The next uniform words of each example, int64 (n, count)."""
        assert self.key is not None
        self.key.is_used = True
        draw = self.calls
        self.calls += 1
        if device.type == "cpu":
            return self.key(self.identities, draw, count)
        return spread(self.key(self.identities, draw, 1).to(device), count)

    def sampled(self, name: str, call: Callable[[int], Tensor]) -> Tensor:
        """The results of a function of PyTorch that draws, (n, ...). `call` calls it for the
        example at a place; each has a seed of its own. Plain uniform and normal numbers are made
        for all examples at once."""
        count = len(self.identities)
        if self.key is None:
            return torch.stack([call(place) for place in range(count)])
        with generators_kept(self.device):
            if name in _UNIFORM:
                return self._uniform(call(0))
            if name in _NORMAL:
                return self._normal(call(0))
            found = []
            for place, (seed,) in enumerate(self.words(1, torch.device("cpu")).tolist()):
                seed_draws(seed, self.device)
                found.append(call(place))
        return torch.stack(found)

    def seeded(self) -> Iterator[int]:
        """The places of the examples; at each one the generators have its seed, for draws that
        can't be seen."""
        assert self.key is not None
        for place, (seed,) in enumerate(self.key(self.identities, _SEEDS, 1).tolist()):
            seed_draws(seed, self.device)
            before = generator_states(self.device)
            yield place
            self.key.is_used |= have_moved(before, generator_states(self.device))

    def _uniform(self, like: Tensor) -> Tensor:
        words = self.words(like.numel(), like.device)
        bits = _BITS.get(like.dtype, 8)
        values = ((words >> (64 - bits)) & ((1 << bits) - 1)).to(like.dtype) * 2.0**-bits
        return values.view(len(words), *like.shape)

    def _normal(self, like: Tensor) -> Tensor:
        """By Box and Muller's method (1958), in float64."""
        words = self.words(2 * like.numel(), like.device).double()
        radius = (words[:, ::2].abs() * 2.0**-63).clamp(2.0**-64, 1).log().mul(-2).sqrt()
        values = radius * (words[:, 1::2] * (torch.pi * 2.0**-63)).cos()
        return values.to(like.dtype).view(len(words), *like.shape)


@dataclass
class _Given:
    key: bytes
    identities: Tensor | None
    sums: int = 0

    def next(self) -> bytes:
        """The key of the next sum."""
        self.sums += 1
        return sha256(self.key + self.sums.to_bytes(8, "big")).digest()


_given: ContextVar[_Given | None] = ContextVar("discreet_draws", default=None)


@contextmanager
def drawn_from(key: bytes, identities: Tensor | None = None) -> Iterator[None]:
    """A context in which the draws of clipped sums follow from a secret key and the identities of
    the rows of their batches, (n,); by default their places."""
    token = _given.set(_Given(key, identities))
    try:
        yield
    finally:
        _given.reset(token)


@contextmanager
def identified(rows: Tensor) -> Iterator[None]:
    """A context within `drawn_from` in which the rows of a batch have these identities, (n,)."""
    given = _given.get()
    if given is None:
        yield
        return
    before = given.identities
    given.identities = rows
    try:
        yield
    finally:
        given.identities = before


@contextmanager
def own_draws(count: int, device: torch.device, units: Tensor | None = None) -> Iterator[Draws]:
    """The draws for a sum over `count` examples, or over `units` with identities, (n,).

    Without a key of `drawn_from` the key comes from PyTorch's generator, which moves on if anything
    is drawn. What a forward does to the generators does not outlast the sum.
    """
    given = _given.get()
    identities = _numbered(count) if units is None else units
    if given is not None and given.identities is not None and units is None:
        identities = given.identities
    if len(identities) != count:
        raise ValueError(f"identities must be one for each of {count} rows, not {len(identities)}")
    with generators_kept(device):
        held = Key(torch.get_rng_state(), None if given is None else given.next())
        yield Draws(held, identities.cpu(), device)
    if held.is_used and held.after is not None:
        torch.set_rng_state(held.after)


def no_draws(count: int) -> Draws:
    """Draws for a trial, in which nothing is drawn at random."""
    return Draws(None, _numbered(count), torch.device("cpu"))


@lru_cache(maxsize=64)
def _numbered(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a model on a device draws from."""
    found = [torch.get_rng_state()]
    if device.type == "cuda":
        found.append(torch.cuda.get_rng_state(device))
    return found


def have_moved(some: list[Tensor], others: list[Tensor]) -> bool:
    """True unless all states are the same."""
    return not all(map(torch.equal, some, others))


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """A context after which the generators are as before."""
    before = generator_states(device)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        for state in before[1:]:
            torch.cuda.set_rng_state(state, device)


def seed_draws(seed: int, device: torch.device) -> None:
    """Seeds the generators that a model on a device draws from. For the CPU alone this takes a
    hundredth of the time of torch.manual_seed, which looks for devices of every kind."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


@contextmanager
def torch_draws_from(
    source: RandomSource, model: nn.Module, identities: Tensor | None = None
) -> Iterator[None]:
    """A context in which PyTorch's generators are seeded by `source`, and clipped sums draw by a
    key of it: the same masks each time for a seeded source, different ones for a secure source.
    Afterwards the generators of the CPU and of the model's device are restored.

    Masks are not protecting noise. An example's follow from the key and its identity alone: for
    each key the contribution of one example to a clipped sum is at most the clip norm, and the
    others' do not change if it is absent. `identities`, (n,), of the rows of a batch; without them
    a row's place stands for it, places shift if an example is absent, and the key must be secret.
    That of a secure source never leaves this function."""
    key = source.child("masks").words(4).tobytes()
    seed = int(source.child("dropout").words(1)[0])
    devices = [value.device.index for value in [next(model.parameters())] if value.is_cuda]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        with drawn_from(key, identities):
            yield
