"""The noise outlook: predicts, before a run spends anything, whether it can learn despite its
noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from discreet.mechanisms.mechanism import ClientRound
from discreet.planning.linear_outlook import LinearOutlook, linear_outlook
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerSGD
from discreet.privacy.mechanisms import Laplace
from discreet.settings.rules import ConfigError
from discreet.settings.wording import Key, Phrase, Wording, joined

# The largest noise feedback with which a run learns, and that of steps as long as their signal.
# Measured: docs/pitfalls.md.
LARGEST_FEEDBACK = 6.5
LARGEST_FEEDBACK_SHRINKING = 23.0
EARLY_ROUNDS = 10  # a run that is over by then ends before noise that feeds itself has grown
FEWEST_ROUNDS = 5  # that are advised
FEW_CLIENTS = 30  # below it noise that hides one of them leaves little to learn from
EXAMPLES_INSTEAD = (
    f"with fewer than {FEW_CLIENTS} clients, protect examples rather than clients: "
    "DPSGD in the client's own training (discreet new; docs/index.md), or privacy.example in a run "
    "of discreet's own clients"
)
EXAMPLE_CLIP = "privacy.example.clip_norm"
FULL_LOCAL_WORK = 0.2  # clients that learn less than this in a round answer noise in proportion


def noise_ratio(noise_multiplier: float, *, num_params: int, expected_cohort: float) -> float:
    """The expected norm of a round's noise, as a multiple of its clip norm: z * sqrt(num_params) /
    expected_cohort.

    `noise_multiplier` is the multiplier of the update (`central_gaussian.update_noise_multiplier`).

    >>> round(noise_ratio(1.03, num_params=9610, expected_cohort=60), 2)
    1.68
    """
    return noise_multiplier * math.sqrt(num_params) / expected_cohort


def noise_feedback(
    ratio: float, *, learning_rate: float, momentum: float, local_work: float
) -> float:
    """The noise feedback of a run: ratio * sqrt(eta / (1 - m)) * min(1, w / 0.2), with
    `noise_ratio` for the ratio.

    Noise moves the model away from the clients' optimum. Their updates grow with the distance, an
    adaptive clip norm follows the updates, and the noise follows the clip norm. Heavy-ball steps of
    the server's rate eta and momentum m on an error whose noise is proportional to it have a
    stationary mean square only while ratio^2 * eta / (1 - m) is below a constant of the task; above
    it the error grows by a factor each round. If the local work w = epochs * learning rate / (1 -
    momentum) is small, updates are proportional to w.

    >>> round(noise_feedback(1.68, learning_rate=1.0, momentum=0.8, local_work=1.0), 2)
    3.76
    """
    return (
        ratio * math.sqrt(learning_rate / (1 - momentum)) * min(1.0, local_work / FULL_LOCAL_WORK)
    )


@dataclass(frozen=True)
class NoiseOutlook:
    """The expected effect of a run's noise.

    Attributes:
      ratio: the norm of a round's noise, in clip norms.
      feedback, limit: `noise_feedback` (docs/pitfalls.md), 0 if noise does not feed back; and the
        largest feedback with which a run learns.
      early: the run ends before the noise has grown, so it gets a warning and is not refused.
      remedies: the numbers of clients and of parameters at which the feedback would be at its
        limit.
      few: True if there are so few clients that examples should be protected instead.
      linear: the outlook for a linear model of a table; None for another model.
    """

    ratio: float
    feedback: float = 0.0
    limit: float = math.inf
    clip_setting: str | None = None
    early: bool = False
    remedies: tuple[Phrase, ...] = ()
    few: bool = False
    linear: LinearOutlook | None = None

    @property
    def loud(self) -> bool:
        """True if noise feedback is above its limit."""
        return self.feedback > self.limit

    @property
    def verdict(self) -> str:
        """The prediction of the rule of noise feedback: the run will learn, or not."""
        if self.linear is not None:
            return self.linear.verdict
        if self.loud:
            return "it will not learn"
        if math.isinf(self.limit) and self.ratio > 1:
            return "no rule says whether it learns"
        return "it can learn"

    @property
    def refused(self) -> bool:
        """True if the run will not learn and is refused for it."""
        return self.loud and not self.early

    def __str__(self) -> str:
        if self.linear is not None:
            return str(self.linear)
        if self.clip_setting is not None:
            if self.clip_setting == EXAMPLE_CLIP:
                noise = "the noise in a step's mean gradient"
            else:
                noise = "a round's noise"
            return (
                f"{noise} is expected to be {self.ratio:.3g} times "
                f"{self.clip_setting}, which is fixed, so noise can't feed back"
            )
        said = f"a round's noise is expected to be {self.ratio:.3g} times the clip norm"
        if self.loud:
            said += f" (noise feedback {self.feedback:.3g}, limit {self.limit:g}: docs/pitfalls.md)"
        return said

    @property
    def line(self) -> str:
        """The noise and the verdict; for a short run also what could learn."""
        said = f"{self}: {self.verdict}"
        if self.loud and self.early and self.linear is None:
            advice = self.advice(self.remedies)
            said += f". Runs of at most {EARLY_ROUNDS} rounds are not refused{advice}"
        return said

    def advice(self, remedies: Sequence[Phrase]) -> Wording:
        """The advice at the end of a message about a run that will not learn."""
        parts: list[Phrase] = []
        if remedies:
            parts += ("; it could learn with ", joined(", or with ", remedies))
        if self.few:
            parts.append(f"; {EXAMPLES_INSTEAD}")
        return Wording(*parts)


def noise_outlook(plan: Plan) -> NoiseOutlook:
    """The outlook for the noise of a plan."""
    mechanism = plan.mechanism
    optimizer = plan.optimizer
    if not plan.charges_server:
        return NoiseOutlook(0.0)
    noise = mechanism.expected_noise(plan.first_clip_norm)
    ratio = noise_ratio(
        noise.multiplier, num_params=plan.num_params, expected_cohort=noise.denominator
    )
    if noise.clip_setting is not None or not isinstance(optimizer, ServerSGD):
        # Adam and Yogi divide each step by its own size, noise included, so noise does not feed
        # back.
        return NoiseOutlook(ratio, clip_setting=noise.clip_setting)
    training = plan.run.training
    work = math.inf
    # The learning rate alone decides the length of Adam's steps, however small gradients are:
    # assume full local work.
    if training.optimizer == "sgd":
        work = training.epochs * training.learning_rate / (1 - training.momentum)
    feedback = noise_feedback(
        ratio, learning_rate=optimizer.learning_rate, momentum=optimizer.momentum, local_work=work
    )
    if plan.clip.kind != "adaptive":
        return NoiseOutlook(ratio, feedback, linear=linear_outlook(plan))
    if optimizer.shrink_with_noise:
        limit = LARGEST_FEEDBACK_SHRINKING
    else:
        limit = LARGEST_FEEDBACK
    excess = max(1.0, feedback / limit)
    population = math.ceil(plan.run.user.population_size * excess)
    params = math.floor(plan.num_params / excess**2)
    remedies = []
    if population * plan.run.delta < 1:
        remedies.append(f"{population} clients")
    if params:
        remedies.append(f"{params} parameters")
    few = plan.run.user.population_size < FEW_CLIENTS
    early = plan.run.rounds <= EARLY_ROUNDS
    return NoiseOutlook(ratio, feedback, limit, early=early, remedies=tuple(remedies), few=few)


def outlook_at_clients(plan: Plan, work: ClientRound) -> NoiseOutlook | None:
    """The outlook for noise that each client adds to its own steps, or to its update, which other
    data move by up to twice the clip norm: in the mean over the clients of a round. None if the
    client does neither."""
    spread = math.sqrt(plan.num_params / plan.run.expected_cohort)
    if work.training is not None:
        ratio = work.noise_multiplier * spread / work.training.batch_size
        return NoiseOutlook(ratio, clip_setting=EXAMPLE_CLIP)
    if work.local is None:
        return None
    ratio = 2 * work.noise_multiplier * spread
    if isinstance(work.local.mechanism, Laplace):
        ratio *= math.sqrt(2)
    return NoiseOutlook(ratio)


def check_noise(plan: Plan, of_rounds: Callable[[int], Plan]) -> None:
    """Raises ConfigError, with settings that would work, if a run will not learn, unless its
    settings ask for a warning or for statistics only. `of_rounds`: the plan of the same settings
    for a number of rounds; the noise for a target epsilon is computed anew."""
    if plan.only_warns or plan.run.statistics.only:
        return
    outlook = noise_outlook(plan)
    if outlook.refused:
        advice = outlook.advice(list(_remedies(plan, outlook, of_rounds)))
        all_the_same = Key("privacy.user.too_noisy=warn")
        said = f"this run will not learn: {outlook}"
        raise ConfigError(Wording(said, advice, "; ", all_the_same, " runs it anyway"))


def _remedies(
    plan: Plan, outlook: NoiseOutlook, of_rounds: Callable[[int], Plan]
) -> Iterator[Phrase]:
    """Changes of one setting with which the noise would not swamp the updates by the same rule."""
    rounds = plan.run.rounds // 2
    optimizer = plan.optimizer
    while rounds > FEWEST_ROUNDS and noise_outlook(of_rounds(rounds)).loud:
        rounds //= 2
    if rounds >= FEWEST_ROUNDS and not noise_outlook(of_rounds(rounds)).loud:
        yield Key(f"rounds={rounds}")
    shrinks = isinstance(optimizer, ServerSGD) and optimizer.shrink_with_noise
    if not shrinks and outlook.feedback <= LARGEST_FEEDBACK_SHRINKING:
        yield Key("server.shrink_with_noise=true")
    yield from outlook.remedies
