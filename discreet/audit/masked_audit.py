"""The audits of secure aggregation: one masked sum is opened again and again, with the canary's part and without.

Only the honest clients of the worst case take part, n - d - c of them: what more of them add, and the noise that
colluding clients know and take off, makes no sum easier to read. The canary is one of them, or an example of one. What
the others add but noise is known to the auditor, who would take it off: they add nothing else. Masks change no bit of a
sum, so that there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from dp_accounting import DpEvent
from torch import Tensor, nn

from discreet.audit.canaries import Auditor, draw_canaries, noised_sum
from discreet.audit.canary_scores import Experiment, Facts
from discreet.audit.example_audit import model_and_examples
from discreet.audit.repeated_release import Release, Score, noise_multiplier_of, repeated
from discreet.data.examples import Examples, Task
from discreet.mechanisms.masked_gaussian import MaskedSum
from discreet.mechanisms.sums import UnopenedSum
from discreet.models.models import flatten_parameters
from discreet.node.account import Refused
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.node.release import Values, noised_vector
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.randomness import RandomSource, source_of
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TRAIN, TrainRequest, Work
from discreet.queries.query import EVALUATION
from discreet.server.plan import Plan
from discreet.server.round import RoundSettings, dp_fedavg_round
from discreet.server.run_plan import evaluation_plan, round_settings
from discreet.server.session import resolve
from discreet.server.state import initial_state
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import EXAMPLE, USER
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.training.losses import loss_of

NOTHING = "nothing"  # the query of a request that asks for no update, and that no client answers
LONG = 1e4  # times the norm that clips: the canary's update and answer; times its inputs if it is an example
LOOKED_AT = 256  # examples, of which the canary is one

# One client's vector, noise included: `discreet.node.release.noised_vector`, or a faulty one in tests.
MakeVector = Callable[[SecureSum, Values, TrainRequest, RandomSource], Tensor]
# A request, and the answer that goes into the sum.
Part = tuple[TrainRequest, Values]


def audit_secure(
    config: Settings, *, releases: int, of_answers: bool = False, make: MakeVector = noised_vector
) -> Experiment:
    """Repeats a round under secure aggregation at user level, and scores the canary by all that it opens: the update,
    the count, and with `evaluation.cohort=same` the answers; they are one vector, which is charged as a whole. A canary
    that is out is zeroed out but for its noise, as neighbours have it.

    Args:
      of_answers: audits the sum that rates the model, if a cohort of its own is asked for that.

    Raises:
      ConfigError: the user level has no secure aggregation with noise, the answers of clients that answer nothing are
        to be audited, or there are fewer than two releases.
    """
    plan, _ = resolve(config)
    if not plan.noised(USER, masked=True):
        raise ConfigError("an audit of masked sums needs privacy.user.aggregation=secure, with noise")
    rated, own = evaluation_plan(plan), plan.run.evaluation.cohort == "own"
    if of_answers and rated is None:
        raise ConfigError("evaluation.kind must be private: otherwise clients answer nothing that could be audited")
    mechanism, work, settings = "a masked sum", TRAIN, round_settings(plan)
    event = settings.release.event
    if rated is not None and (of_answers or not own):
        settings, work, mechanism = rated.joined, Work(query=EVALUATION), "a masked sum that also rates the model"
        event = settings.release.event
        if own:
            work, mechanism, event = Work(trains=False, query=EVALUATION), "a masked sum of ratings", rated.event
    score, facts = _user_score(plan, settings, work, event, make), _facts(_vector(settings), event)
    return repeated(plan, Release(mechanism, event, plan.guarantees[0].adjacency, score, facts), releases)


def _facts(vector: SecureSum, event: DpEvent) -> Facts:
    noise = noise_multiplier_of(event) or 0.0
    return {"nodes": vector.nodes, "honest survivors": vector.summands, "noise_multiplier": noise}


def _vector(settings: RoundSettings) -> SecureSum:
    assert isinstance(settings.release, MaskedSum)
    return settings.release.vector


def _sum_of(vector: SecureSum, parts: Sequence[Part], make: MakeVector, source: RandomSource) -> UnopenedSum:
    """The sum of clients' noised vectors, as a server reads it."""
    vectors = [make(vector, values, request, source.child(number)) for number, (request, values) in enumerate(parts)]
    total = torch.stack(vectors).sum(dim=0) % 2**vector.bits
    return UnopenedSum(lambda: vector.centred(total), len(vectors))


def _user_score(plan: Plan, settings: RoundSettings, work: Work, event: DpEvent, make: MakeVector) -> Score:
    """Of one sum: the log-likelihood ratio of in and out, up to a constant and to rounding."""
    vector, clip_norm = _vector(settings), plan.clip.norm
    canaries = draw_canaries(1, vector.num_params, source_of(plan.seed).child("audit").child("direction"))
    update = (LONG * clip_norm * canaries.direction(0)).float()
    answer = torch.zeros(max(1, vector.answer_length))
    answer[0] = LONG
    request = TrainRequest(1, clip_norm, plan.run, work=work)
    canary = request, Values(update, bool(canaries.bits[0]), answer if work.query else None)
    silent = replace(request, work=Work(trains=False, query=NOTHING)), Values(update)
    start = initial_state(torch.zeros_like(update), clip_norm=clip_norm)
    # Of the noise on an entry, in units of what the canary adds: so many steps.
    of_update, of_bit, of_answer = (
        vector.summands * vector.variance / steps**2 if steps else None
        for steps in (vector.clip_steps, vector.bit_steps, vector.answer_steps)
    )
    assert of_update is not None
    auditor = Auditor(settings, canaries, (of_update, of_bit))

    def score(included: int, source: RandomSource) -> float:
        parts = [canary if included else silent, *[silent] * (vector.summands - 1)]
        total = _sum_of(vector, parts, make, source)
        if not work.trains:
            at = settings.of_round(start, source, lambda _: None)
            return float(settings.release.rate([total], at, event).values[0])
        after, seen = dp_fedavg_round(start, [total], settings, source=source, charge=lambda _: None)
        found = float(auditor.scores(start, after, seen.fraction_below)[0])
        return found + seen.answers.values[0] / of_answer if seen.answers and of_answer else found

    return score


def audit_shared_step(
    config: Settings, *, releases: int, client: int = 0, make: MakeVector = noised_vector
) -> Experiment:
    """Repeats the first step of a run with `privacy.example.aggregation=secure`, and scores an example of a client by
    what it moves the opened sum by.

    The canary is the one with the longest gradient, after its inputs were made far larger. It goes the way of all
    examples, through the client's own clip and sum.

    Raises:
      ConfigError: there is no secure aggregation with noise at example level, the client has no example or more than
        it may have, or there are fewer than two releases.
    """
    plan, task = resolve(config)
    if not plan.noised(EXAMPLE, masked=True):
        raise ConfigError("an audit of a shared step needs privacy.example.aggregation=secure, with noise")
    settings = round_settings(plan)
    vector, norm = _vector(settings), settings.release.norm(math.inf)
    request, params, without, within = step_parts(plan, task, client)
    added, start = within.update - without.update, initial_state(params, clip_norm=math.inf)
    silent = replace(without, update=torch.zeros_like(added))

    def score(included: int, source: RandomSource) -> float:
        """The log-likelihood ratio of in and out, up to rounding."""
        values = [within if included else without, *[silent] * (vector.summands - 1)]
        total = _sum_of(vector, [(request, each) for each in values], make, source)
        after, _ = dp_fedavg_round(start, [total], settings, source=source, charge=lambda _: None)
        unknown = noised_sum(settings, start, after) - without.update
        return float(unknown @ added) / (norm * vector.noise_stddev) ** 2

    facts = _facts(vector, vector.event)
    release = Release("a step that clients share", vector.event, plan.guarantees[1].adjacency, score, facts)
    return repeated(plan, release, releases)


def step_parts(plan: Plan, task: Task, client: int) -> tuple[TrainRequest, Tensor, Values, Values]:
    """The request of a run's first step, its parameters, and a client's answer without the canary and with it.

    Raises:
      ConfigError: the client has no example, or more than it may have.
    """
    model, examples = model_and_examples(plan.run, task, client)
    if len(examples) == 0:
        raise ConfigError(f"client {client} has no example that could be a canary")
    request, params = TrainRequest(1, math.inf, plan.run), flatten_parameters(model)
    canary = _worst_of(examples, model, plan.run)
    more = Examples(torch.cat([examples.inputs, canary.inputs]), torch.cat([examples.targets, canary.targets]))
    nodes = (Client(model, share, None, ClientPolicy(), source_of(plan.seed)) for share in (examples, more))
    try:
        without, within = (node._values(request, params)[0] for node in nodes)  # no client of a run gives them away
    except Refused as refusal:
        raise ConfigError(str(refusal)) from refusal
    return request, params, without, within


def _worst_of(examples: Examples, model: nn.Module, run: ClientSettings) -> Examples:
    """The one of the first examples whose gradient is the longest, with far larger inputs if they are numbers."""
    few = examples.subset(torch.arange(min(LOOKED_AT, len(examples))))
    if few.inputs.is_floating_point():
        few = Examples(few.inputs * LONG, few.targets)
    clip, loss = run.example.clip_norm, loss_of(run.task)
    _, norms = clipped_gradient_sum(model, few.inputs, targets=few.targets, clip_norm=clip, loss=loss)
    return few.subset(norms.nan_to_num(posinf=0.0).argmax().reshape(1))
