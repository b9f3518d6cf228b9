"""The policy of a client's owner: a client refuses work with less privacy than the policy
requires."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from discreet.mechanisms.mechanism import PURE
from discreet.node.account import Budget, Refused
from discreet.node.promise import Promise
from discreet.settings.adjacency import GUARANTEES, USER
from discreet.settings.foreign_files import one_line
from discreet.settings.privacy import OWNER, SECURE
from discreet.settings.rules import (
    ConfigError,
    Count,
    CountOrZero,
    Probability,
    Rule,
    brief,
    did_you_mean,
    hyphened,
    require,
    rules,
    section,
    unknown,
    within,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.ledger.durable_ledger import Charge
    from discreet.node.work import Work
    from discreet.training.local_training import LocalSettings


ROUNDING = 1e-6  # of a multiplier: the shares of the noise are whole numbers
REQUIRABLE = (*GUARANTEES, OWNER, SECURE)


@section(
    "",
    **hyphened("", "min_noise_multiplier", "max_epsilon", "max_delta", "max_steps", "max_seconds"),
    **hyphened("", "public_num_examples", "min_colluding", "min_summands", "min_groups"),
)
class ClientPolicy:
    """The least privacy that a client's owner accepts.

    Attributes:
      min_noise_multiplier: the least noise over sensitivity, for each release of every enabled
        guarantee.
      max_epsilon: the budget at `max_delta` for all that the client accounts itself (example,
        local, masked sums), over all runs and guarantees together, since each is about the same
        examples. At user level in the clear, each run's planned epsilon must be within it. If this
        or `min_noise_multiplier` is given, at least one guarantee must be on.
      max_delta: the largest delta of a run, and the delta at which `max_epsilon` holds, since a
        delta that the server chooses makes no budget. It must be given with `max_epsilon`; 1 is no
        limit.
      require: guarantees that must be on; `secure`: nothing leaves except under secure aggregation;
        `owner`: the unit of the example level is an owner with all its rows.
      public_num_examples: DP-SGD at this client uses it instead of the run's
        `data.public_num_examples`; None: as the run says.
      min_colluding: how many colluding nodes a run under secure aggregation must allow for.
      min_summands: the least number of honest nodes' vectors in a masked sum after all allowed
        losses.
      min_groups: the least number of groups that take turns; the node then trains only in its own
        turn. 0: it trains whenever it is asked.
      max_steps: the most local steps that one message may ask for.
      max_seconds: the longest that the work of one message may take.
    """

    min_noise_multiplier: Annotated[
        float, Rule("a finite number of at least 0", lambda noise: noise >= 0)
    ] = 0.0
    max_epsilon: Annotated[
        float, Field(allow_inf_nan=True), Rule("above 0", lambda epsilon: epsilon > 0)
    ] = math.inf
    max_delta: Probability = 1.0
    require: Annotated[
        tuple[str, ...], Rule(f"of {', '.join(REQUIRABLE)}", set(REQUIRABLE).issuperset)
    ] = ()
    public_num_examples: Count | None = None
    min_colluding: CountOrZero = 0
    min_summands: CountOrZero = 0
    min_groups: CountOrZero = 0
    max_steps: Count = 1_000_000
    max_seconds: Annotated[float, within(1, 1e8)] = 86_400.0

    def __post_init__(self) -> None:
        both = (
            "given with max-epsilon, below 1 / the number of this node's examples, for instance "
            "1e-5"
        )
        require(
            self.max_epsilon == math.inf or self.max_delta < 1, "max-delta", both, self.max_delta
        )


NOTHING = ClientPolicy()  # requires nothing
FIELDS = {key: key.replace("-", "_") for key, _ in rules(ClientPolicy)}
FILE = "policy"  # the key of a node that names a file with a policy
TASK = "task"  # the key of a node that names the demonstration data of which it has a share
# A node's other keys, listed so that none of them is taken for a misspelt policy key.
OTHERS = {
    "data",
    "ledger",
    "name",
    "identity-key",
    "peers",
    "masking-state",
    "partition-id",
    "num-partitions",
    TASK,
}
OF_PRIVACY = ("epsilon", "delta", "noise", "privacy", "policy", "secure")  # a policy key is meant
ALIKE = 0.7  # a key of which so large a share is like one of a policy is a misspelt one


def policy_from(node_config: Mapping[str, object]) -> ClientPolicy:
    """The policy of a node: from the file that `policy` names, and from the node's own keys,
    which take precedence.

    Raises:
      Refused: a file, a key or a value is invalid. An unreadable policy never counts as no
    policy.
    """
    try:
        _check_spelling(node_config)
        if FILE in node_config:
            settings = _policy_file(Path(str(node_config[FILE])))
        else:
            settings = {}
        settings |= {key: node_config[key] for key in FIELDS if key in node_config}
        for key in settings.keys() - FIELDS.keys():
            raise ValueError(unknown(key, ClientPolicy))
        return ClientPolicy(**{FIELDS[key]: _value(key, value) for key, value in settings.items()})
    except ValueError as error:
        raise Refused(f"the policy of this client can't be read: {error}") from error


def words_of(policy: ClientPolicy) -> str:
    """A policy in one line for a node's log: its requirements, or that it has none."""
    asked = {key: getattr(policy, name) for key, name in FIELDS.items()}
    said = [
        f"{key}={','.join(value) if isinstance(value, tuple) else format(value, 'g')}"
        for key, value in asked.items()
        if value != getattr(NOTHING, FIELDS[key])
    ]
    if said:
        return f"this node's policy: {', '.join(said)}"
    return "this node has no policy: it accepts any work that a server requests"


def _check_spelling(node_config: Mapping[str, object]) -> None:
    """Raises ValueError for a key that resembles a policy key: ignoring it silently would mean no
    policy at all."""
    for key in sorted(node_config.keys() - FIELDS.keys() - OTHERS - {FILE}):
        written = key.lower().replace("_", "-")
        meant = did_you_mean(written, (*FIELDS, FILE), cutoff=ALIKE)
        of_privacy = any(word in written for word in OF_PRIVACY) or "eps" in written.split("-")
        if not meant and of_privacy:
            meant = f"; there are {', '.join(FIELDS)}"
        if meant:
            raise ValueError(f"unknown setting {brief(key)}{meant}")


def _policy_file(path: Path) -> dict[str, object]:
    """The content of a policy file: TOML, as a guard's, or JSON."""
    if path.suffix == ".toml":
        parse: Callable[[str], Any] = tomllib.loads
        form = "TOML"
    else:
        parse = _parsed_json
        form = "JSON"
    name = "the policy file"  # its path is the node's own
    with one_line(name, ConfigError):
        text = path.read_text(encoding="utf-8-sig")  # Windows begins it with a mark
    with one_line(name, ConfigError, f"is not {form}"):
        read = parse(text)
    if not isinstance(read, dict):
        raise ValueError("the policy file must hold one JSON object")
    if not read:
        raise ValueError("the policy file names no setting: it may be cut short")
    return read


def _parsed_json(text: str) -> Any:
    """JSON in which no name stands twice and each number is finite: of the two, or of 1e999, it is
    not known what the owner meant."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name stands twice")
        return found

    def finite(written: str) -> float:
        if not math.isfinite(float(written)):
            raise ValueError(f"{brief(written)} is no finite number")
        return float(written)

    return json.loads(text, object_pairs_hook=once, parse_float=finite, parse_constant=finite)


def _value(key: str, value: object) -> Any:
    """A value in the policy's type: Flower and users may write a number as text, and a single name
    without a list."""
    if key == "require":
        return tuple(
            map(str, value if isinstance(value, list) else str(value).replace(",", " ").split())
        )
    with suppress(ValueError):
        if isinstance(value, str):
            value = float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def check_deltas(
    policy: ClientPolicy, work: Work, *, num_examples: int, training: LocalSettings | None
) -> None:
    """Refuses a delta of 1 / n or more of this client's examples: one of them might be revealed as
    it is."""
    from discreet.training.local_training import counted_examples  # with PyTorch, for work alone

    if training is None:
        counted = num_examples
    else:
        counted = counted_examples(num_examples, training)
    terms = work.terms
    if share := terms.noised_share:
        # the largest possible number, including held-out examples
        counted = math.ceil((counted + 1) / (1 - share))
    deltas = {"privacy.delta": terms.promise.delta}
    if math.isfinite(policy.max_epsilon):
        deltas["max-delta of this client's policy"] = policy.max_delta
    for name, delta in deltas.items():
        if counted > 1 and delta >= 1 / counted:
            raise Refused(
                f"{name} must be below 1 / n of this client's n {terms.unit}s (it is {delta:g})"
            )


def check_policy(policy: ClientPolicy, work: Work, *, noise_multipliers: dict[str, float]) -> None:
    """Refuses work below the policy. `noise_multipliers` has those of an update for the enabled
    guarantees.

    The client draws its own noise, so it can enforce the policy. The server draws user-level noise:
    the client can check the server's declaration, not its actions.

    Raises:
      Refused: with the setting that is too weak.
    """
    noises = dict(noise_multipliers)
    promise = work.terms.promise
    # For masked sums it is the declared noise; `check_own_count` checks the actual noise.
    if USER in noises and policy.min_noise_multiplier and promise.sums is None:
        noises[USER] = work.least_user_noise()
    check_promise(policy, replace(promise, noises=noises))
    if USER in noises and math.isfinite(policy.max_epsilon):
        planned = work.planned_user_epsilon(policy.max_delta)
        allowed = f"allows epsilon up to {policy.max_epsilon:g}; the run plans a user-level"
        _hold(
            planned <= policy.max_epsilon, f"{allowed} {planned:.4g} at delta {policy.max_delta:g}"
        )


def check_promise(policy: ClientPolicy, promised: Promise) -> None:
    """Refuses a reply that promises less than the policy. Every way to an answer passes here
    (`tests/node/test_doors.py` lists them).

    Raises:
      Refused: with the setting that is too weak.
    """
    noises = promised.noises
    kind, groups = promised.turns
    cyclic = f"requires sampling.kind=cyclic with {policy.min_groups} groups or more; the run"
    _hold(groups >= policy.min_groups, f"{cyclic} has sampling.kind={kind} and {groups}")
    plain = SECURE in policy.require and promised.sums is None
    _hold(not plain, "requires secure aggregation, but the run would read its update")
    given = {*noises, *promised.units, SECURE}
    for name in policy.require:
        _hold(name in given, f"requires the {name}-level guarantee, which is off")
    asks = policy.min_noise_multiplier > 0 or math.isfinite(policy.max_epsilon)
    _hold(bool(noises) or not asks, "requires noise or a largest epsilon, but no guarantee is on")
    least = f"requires a noise multiplier of {policy.min_noise_multiplier:g}"
    for name, noise in noises.items():
        enough = noise >= policy.min_noise_multiplier * (1 - ROUNDING)
        _hold(enough, f"{least}; the {name}-level one is {noise:g}")
    _hold(
        promised.delta <= policy.max_delta,
        f"allows delta up to {policy.max_delta:g}; the run has {promised.delta:g}",
    )
    if promised.sums is not None:
        colluding, summands = promised.sums
        check_sums(policy, colluding=colluding, summands=summands)


def _hold(holds: bool, said: str) -> None:
    if not holds:
        raise Refused(f"the policy of this client {said}")


def check_turn(groups: int, number: int, node_id: int | None) -> None:
    """Refuses to train out of turn, for a policy with `min_groups`. The node's own number decides
    its turn, and the server finds the same turn. `node_id`: None if it is not known."""
    from discreet.privacy.sampling import in_turn  # not in a guard

    if node_id is None or not in_turn(node_id, number, groups=groups):
        raise Refused(
            f"round {number} is not this client's turn, and its policy only allows its "
            f"own turns ({groups} groups)"
        )


def check_sums(policy: ClientPolicy, *, colluding: int, summands: int) -> None:
    """Refuses masked sums that allow for fewer colluding nodes, or have fewer honest summands, than
    the policy requires."""
    wanted = f"min-colluding={policy.min_colluding} and min-summands={policy.min_summands}"
    said = (
        f"requires {wanted}; the run has privacy.secure.colluding={colluding}, and {summands} "
        "summands"
    )
    _hold(colluding >= policy.min_colluding and summands >= policy.min_summands, said)


def check_own_count(policy: ClientPolicy, event: DpEvent) -> None:
    """Refuses a masked sum whose noise, by the client's own count, is below `min_noise_multiplier`.
    The count is the sum of noise that honest clients' shares are sure to reach, over the largest
    contribution of one client."""
    noise = getattr(event, "renyi_noise_multiplier", 0.0)  # an event without noise has none
    wanted = f"requires a noise multiplier of {policy.min_noise_multiplier:g}"
    enough = noise >= policy.min_noise_multiplier * (1 - ROUNDING)
    _hold(enough, f"{wanted}; the sum has {noise:.4g} by this client's own count")


def check_clipped(clip_norm: float) -> None:
    """Refuses a masked sum of updates without a clip norm: each would count as zero."""
    if math.isinf(clip_norm):
        raise Refused("updates are added up under masks only with a finite clip norm")


def budgets_of(policy: ClientPolicy, work: Work, charges: Sequence[Charge]) -> tuple[Budget, ...]:
    """The run's budgets for the guarantees that are charged to the client itself, and the owner's
    budget for all releases about the client's data, each at its own delta.

    Laplace releases are limited by `privacy.local.epsilon` in pure epsilon, the unit in which it is
    spread over rounds. With PLD at a delta the same releases would cost less, and a repeated round
    would still fit. This does not apply if `max_epsilon` gives a budget at delta instead.
    """
    charged = {charge.guarantee for charge in charges}
    pure = {name for name in charged if PURE in work.mechanisms[name].accountants}
    budgets = [
        each for each in work.terms.budgets if each.guarantee in (charged if each.delta else pure)
    ]
    if math.isfinite(policy.max_epsilon):
        budgets.append(Budget(policy.max_epsilon, policy.max_delta))
    return tuple(budgets)
