"""The guarantee of a guarded site: in words, and as the `privacy.json` of its folder.

The server may be anyone's, may use Flower's own averaging, and knows nothing of this guarantee. The
site can state it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from discreet.accounting.events import PLD, RDP
from discreet.accounting.privacy_ledger import epsilon_of_blocks
from discreet.guard.guard_policy import ALL_BLOCKS, KERNEL, PATIENT, GuardPolicy
from discreet.guard.site_blocks import counted
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.mechanism import Statement
from discreet.privacy.blocks_grid import MOVES

PRIVACY = "privacy.json"
OWN_KERNELS = f"{MOVES}C: each block has a kernel of its own, and no app needs to be read"
APPROVED_APPS = (
    f"{MOVES}C: somebody at this site has read and approved each app. Blocks share a kernel, and "
    f"an app that talks through it moves the sum by up to {MOVES}Ck (k blocks)"
)
ALL_TALK = f"{MOVES}Ck: blocks share a kernel, and all k of them may follow one unit"
ONE_UNIT = f"{MOVES}C: all data of the site are one block"
SHARED_KERNEL = "blocks that talk through the kernel that they share: that no approved app does so"
SHARED_PROCESSOR = "blocks that talk through caches of the processor, or clocks"


def charged_for(policy: GuardPolicy) -> str:
    """The most that one unit moves a sum of updates, by what a round is charged, and why."""
    if policy.blocks.count == 1:
        return ONE_UNIT
    if policy.charge == ALL_BLOCKS:
        return ALL_TALK
    if policy.enclosure == KERNEL:
        return OWN_KERNELS
    return APPROVED_APPS


def statement_of(policy: GuardPolicy) -> Statement:
    """The guarantee that a guard with this policy gives."""
    if policy.unit == PATIENT:
        unit = "all records of one patient id at this site"
    else:
        unit = "all data of this site"
    drawn = "each in every round"
    if policy.q < 1:
        drawn = f"each drawn with q = {policy.q:g}"
    talk = {OWN_KERNELS: (SHARED_PROCESSOR,), APPROVED_APPS: (SHARED_KERNEL,)}
    a_round = "a Gaussian a round"
    if policy.q < 1:
        a_round = f"a Gaussian a round, Poisson-sampled with q = {policy.q:g}"
    charged = charged_for(policy)
    moved = MOVES * policy.moved_blocks
    return Statement(
        unit=unit,
        adjacency="add, remove or change them; the number of blocks is public and stays",
        trusted="this site's operator and machine; not the server, and not its choice of clip "
        "norm, model or number of rounds",
        observer="the server, the researcher and other sites, over all rounds and runs",
        mechanism=f"the app runs once for each of {counted(policy.blocks.count)}, {drawn}, in "
        f"{policy.enclosure}; a block's update is clipped to C, and the sum, which one unit moves "
        f"by {moved}C, has noise of at least {policy.min_noise_multiplier:g} times {MOVES}C",
        accounting=f"charged for {charged}; {a_round}, on this site's "
        "ledger before a block starts; a masked sum by this site's own count of honest noise",
        not_covered=(
            *talk.get(charged, ()),
            "faults of the kernel",
            "a patient at two sites, or with two ids",
            "that the site takes part, refuses, or has spent its budget",
        ),
        name=policy.unit,
    )


def privacy_facts(policy: GuardPolicy, ledger: DurableLedger) -> dict[str, object]:
    """The content of `privacy.json`."""
    spent = ledger.spent(policy.unit)
    delta = policy.max_delta
    epsilons = {name: epsilon_of_blocks(spent, delta, name) for name in (PLD, RDP)}
    guarantee = {
        **asdict(statement_of(policy)),
        "blocks": policy.blocks.count,
        "q": policy.q,
        "charged_for": charged_for(policy),
        "clip_norms_moved": MOVES * policy.moved_blocks,
        "epsilon": epsilons,
        "epsilon_is": "of this site's ledger, over all runs",
        "events": spent.facts(),
    }
    return {
        "delta": delta,
        "max_epsilon": policy.max_epsilon,
        "ledger_head": ledger.position().head,
        "guarantees": [guarantee],
    }


def statement_lines(policy: GuardPolicy) -> Iterator[str]:
    """The guarantee of this policy, one sentence each."""
    said = statement_of(policy)
    yield f"unit: {said.unit}; {said.adjacency}"
    yield f"mechanism: {said.mechanism}"
    yield f"trusted: {said.trusted}"
    yield f"observer: {said.observer}"
    yield f"accounting: {said.accounting}"
    yield f"not covered: {'; '.join(said.not_covered)}"
    yield f"budget: epsilon {policy.max_epsilon:g} at delta {policy.max_delta:g}, over all runs"


def spending_lines(policy: GuardPolicy, ledger: DurableLedger) -> Iterator[str]:
    """The spending of one unit, and the remaining budget."""
    spent = ledger.spent(policy.unit)
    epsilon = epsilon_of_blocks(spent, policy.max_delta, PLD)
    left = max(0.0, policy.max_epsilon - epsilon)
    yield f"spent: epsilon {epsilon:.4g} in {spent.num_releases} releases; {left:.4g} left"
