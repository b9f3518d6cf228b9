"""A client's work in a round, under its own guarantees, policy and account. It does not depend on
Flower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.data.examples import Examples, TaskShape
from discreet.mechanisms.client_noise import release_update
from discreet.models.models import (
    frozen_digest,
    is_partly_fixed,
    load_parameters,
    outputs_of,
)
from discreet.node.account import Accounts, Refused
from discreet.node.admission import Admitted, admit_one, check_steps
from discreet.node.policy import ClientPolicy
from discreet.node.time_limit import done_on_data
from discreet.node.work import Work
from discreet.per_example.apart import apart
from discreet.per_example.objective import trainable
from discreet.privacy.clipping import clip_updates
from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import (
    OF_DATA,
    MalformedMessage,
    TrainReply,
    TrainRequest,
)
from discreet.training.failing_units import COUNTS_AS_ZERO, NOISE_ALONE, RAISES, rows_of, say_once
from discreet.training.local_training import local_update
from discreet.training.units import units_of

if TYPE_CHECKING:
    from discreet.privacy.secure_grid import SecureSum
    from discreet.queries.query import Query


# The outputs of a model for inputs, the first of which has this number.
Outputs = Callable[[nn.Module, Tensor, int], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class ExactReply(Private):
    """The exact results of a client. They never travel in this form: `noised_vector` takes them
    under secure aggregation, and a `TrainReply`, which has the same fields, otherwise."""

    update: Tensor
    below: bool = False
    answer: Tensor | None = None


def noised_vector(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """A client's vector, int64 (length,), with noise. Only this vector is masked and sent.

    The noise is the client's share. The release is accounted with the shares of `vector.summands`
    clients, and no client's share is enough by itself. `source`: the client's own random source for
    this round.
    """
    if vector.largest_sum:
        from discreet.mechanisms.masked_sums import step_norm

        encoded = vector.encode_gradients(values.update, step_norm(request.run))
        return encoded + vector.noise(source.child("secure", "step"))
    trains = request.work.trains
    query = request.work.query
    encoded = vector.encode(
        values.update if trains else None,
        request.clip_norm,
        below=values.below if trains and vector.bit_steps else None,
        answer=values.answer if query else None,
    )
    return encoded + vector.noise(source.child("secure", "update" if trains else query))


@dataclass(frozen=True, eq=False)
class Client:
    """A node, or a simulated client, while it handles one message.

    Attributes:
      model: the architecture; trainable parameters are overwritten, frozen ones stay.
      examples: the client's own, that it trains on.
      accounts: the accounts that its example-level and local guarantees are charged to; None if
        neither is enabled.
      policy: its owner's policy.
      source: the source of all random numbers for this message.
      data_owner: its name in the ledger.
      held_out: its held-out examples, on which it rates models and never trains; None if the run
        asks for none.
      shape: the shape of its data; None if the run asks no questions about them.
    """

    model: nn.Module
    examples: Examples
    accounts: Accounts | None
    policy: ClientPolicy
    source: RandomSource
    data_owner: str = ""
    held_out: Examples | None = None
    shape: TaskShape | None = None

    def answer(self, work: Work, params: Tensor) -> TrainReply:
        """One round's work, for a server that reads it.

        Args:
          work: the requested work.
          params: (num_params,), float32.

        Returns:
          The clipped update, its bit, this client's privacy spending, and its answer to the
            request's query.

        Raises:
          Refused: a policy or a budget forbids the work, or the run is under secure aggregation.
          MalformedMessage: the parameters, or the frozen values, are those of another model.
          ConfigError: the number of examples that the owner declares does not fit the run.
        """
        if work.terms.promise.sums is not None:
            raise Refused(
                "the run is under secure aggregation, but this message asks for an unmasked update"
            )
        admitted = self._admitted(work, params)
        values = self._values(work, params, admitted)
        spent = admitted.epsilon_example, admitted.epsilon_local, admitted.epsilon_local_pure
        return TrainReply(
            work.request.round, values.update, values.below, *spent, answer=values.answer
        )

    def vector(
        self, work: Work, params: Tensor, sums: SecureSum, begin: Callable[[], None] | None = None
    ) -> Tensor:
        """One round's work for a masked sum, int64 (length,), with this client's share of the
        noise. `begin` charges the sum once the client is admitted; None: it is charged elsewhere.
        For the rest, arguments and errors as `answer`.
        """
        admitted = self._admitted(work, params)
        if begin:
            begin()
        values = self._values(work, params, admitted)
        return noised_vector(sums, values, work.request, self.source)

    def _admitted(self, work: Work, params: Tensor) -> Admitted:
        if work.request.work.query not in OF_DATA:
            self._check_model(work.request, params)
        count = self._count(work)
        return admit_one(work, self.data_owner, count, accounts=self.accounts, policy=self.policy)

    def _values(self, work: Work, params: Tensor, admitted: Admitted) -> ExactReply:
        asked = work.request.work
        # Before training, which changes the model's parameters.
        if asked.query:
            answer = self._answer(work, params)
        else:
            answer = None
        if not asked.trains or admitted.training is None:
            return ExactReply(torch.zeros(0), answer=answer)
        update, below = self._update(work.request, params, admitted)
        return ExactReply(update, below, answer)

    def _update(
        self, request: TrainRequest, params: Tensor, admitted: Admitted
    ) -> tuple[Tensor, bool]:
        """The update that an admitted round releases, and its bit. Once it is charged it comes,
        whatever the data and the parameters do: work that fails, or takes too long, counts as no
        change."""
        work = partial(self._worked, request, params, admitted)
        if request.virtual is not None:  # the owner of a simulation wants to see its errors
            return work(failing=RAISES)
        found = done_on_data(partial(work, failing=COUNTS_AS_ZERO))
        return work(failing=NOISE_ALONE) if found is None else found

    def _worked(
        self, request: TrainRequest, params: Tensor, admitted: Admitted, *, failing: str
    ) -> tuple[Tensor, bool]:
        assert admitted.training is not None
        settings = replace(admitted.training, failing=failing)
        made = admitted.step or local_update
        model = self.model
        examples = self.examples
        if failing != NOISE_ALONE:
            # Then n is not public: what is too much is no change. Another step is one, for any n.
            if settings.example is None and admitted.step is None:
                check_steps(self.policy, len(examples), settings)
            if is_partly_fixed(model):
                from discreet.models.fixed_part import behind_fixed  # few models have such a part

                model, examples = behind_fixed(model, examples)
        update = made(model, params, examples, settings=settings, source=self.source)
        if admitted.local is not None:
            update = release_update(update, admitted.local, source=self.source.child("local"))
        bounded = admitted.bounded or clip_updates
        updates, below = bounded(update.unsqueeze(0), request.clip_norm)
        return updates[0], bool(below[0])

    def _count(self, work: Work) -> int:
        """The number of examples, or of owners if these are the unit of the run."""
        try:
            return len(units_of(self.examples, work.terms.most_rows))
        except ValueError as error:
            said = (
                "privacy.example.unit=owner: this client's data do not give the owner of each row"
            )
            raise Refused(f"{said} (owner in data.toml)") from error

    def _check_model(self, request: TrainRequest, params: Tensor) -> None:
        size = sum(parameter.numel() for parameter in trainable(self.model))
        name = request.run.model.name
        if params.shape != (size,):
            given = params.numel()
            raise MalformedMessage(
                f"the model {name} has {size} trainable parameters, but the train "
                f"request has {given}"
            )
        if request.frozen is not None and request.frozen != frozen_digest(self.model):
            raise MalformedMessage(
                f"the frozen values of the model {name} are not the server's: "
                "both must load the same"
            )

    def _answer(self, work: Work, params: Tensor) -> Tensor:
        if work.request.work.query in OF_DATA:
            query = work.query(self.shape)
            given = self.examples
            answer = self._told(work, query, partial(query.answer, given.inputs, given.targets))
            return answer.to(torch.float32)
        if self.held_out is None:
            raise Refused(
                "this client holds no examples out, because the run does not have "
                "evaluation.kind=private"
            )
        query = work.query(self.shape)
        noise = work.terms.own_noise
        outputs: Outputs = outputs_of_a_copy
        if noise is not None:
            from discreet.models.rows_apart import outputs_apart

            outputs = partial(outputs_apart, source=self.source)
        rated = partial(self._rated, query, params, self.held_out, outputs=outputs)
        answer = self._told(work, query, rated)
        if noise is not None:
            answer = noise.within(query.l1_norm).noised(answer, len(self.held_out), self.source)
        return answer.to(torch.float32)

    def _told(self, work: Work, query: Query, answer: Callable[[], Tensor]) -> Tensor:
        """An answer; zeros if it can't be computed, as if the client held no examples. Its noise
        comes all the same."""
        if work.request.virtual is not None:
            return answer()
        found = done_on_data(answer)
        return torch.zeros(query.length, dtype=torch.float64) if found is None else found

    def _rated(
        self, query: Query, params: Tensor, held_out: Examples, *, outputs: Outputs
    ) -> Tensor:
        """The answer of a model's ratings. If the model fails on the examples together, it is the
        mean of their answers alone, with zeros for those on which it fails: an answer about single
        examples is such a mean, so one of them moves it by no more than its share."""
        model = self.model
        examples = held_out
        if is_partly_fixed(model):
            from discreet.models.fixed_part import behind_fixed

            model, examples = behind_fixed(model, examples)
        load_parameters(model, params)
        try:
            return query.answer(outputs(model, examples.inputs, 0), examples.targets)
        except Exception as error:  # noqa: BLE001
            say_once("examples can't be rated together", error)
        total = torch.zeros(query.length, dtype=torch.float64)
        for place, (inputs, targets) in enumerate(rows_of(examples.inputs, examples.targets)):
            try:
                total += query.answer(outputs(model, inputs, place), targets)
            except Exception as error:  # noqa: BLE001
                say_once("an example can't be rated and counts as zero", error)
        return total / len(examples)


def outputs_of_a_copy(model: nn.Module, inputs: Tensor, _: int = 0) -> Tensor:
    """`outputs_of`, which leaves nothing in the model."""
    with apart(model) as own:
        return outputs_of(own, inputs)
