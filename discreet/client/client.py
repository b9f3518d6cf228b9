"""DPClient: a Flower NumPyClient that trains privately on the examples of one client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor, nn

from discreet.client.account import Accounts, Refused
from discreet.client.admission import Admitted, RoundWork, admit_one
from discreet.client.answering import answer_of_data, answer_to, own_noise
from discreet.client.local_privacy import release_step, release_update
from discreet.client.noised_vector import Values, noised_vector
from discreet.client.policy import ClientPolicy
from discreet.federated.messages import MalformedMessage, Scalar, TrainReply, TrainRequest, reply_numbers, request_of
from discreet.federated.query import OF_DATA, query_of
from discreet.privacy.clipping import clip_by_norm
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.settings.client_settings import ClientSettings
from discreet.tasks.examples import Examples, TaskShape
from discreet.tasks.models import frozen_digest, load_parameters, trainable
from discreet.training.local_training import local_update
from discreet.training.shared_step import shared_step

UNIFORM_WEIGHT = 1  # NumPyClient.fit must return a number of examples; the real one does not leave the client


@dataclass(frozen=True, eq=False)
class DPClient(NumPyClient):
    """Local training under a client's own guarantees, policy and account.

    Attributes:
      model: the architecture; trainable parameters are overwritten, frozen ones stay.
      examples: the client's own, that it trains on.
      accounts: where its example-level and local guarantees are charged; None if neither is on.
      policy: what its owner allows.
      source: of all random numbers of this message.
      holder: its name in the ledger.
      held_out: further examples of its own, on which it rates models and never trains; None if the run asks for none.
      shape: of its data; None if the run asks nothing of them.
    """

    model: nn.Module
    examples: Examples
    accounts: Accounts | None
    policy: ClientPolicy
    source: RandomSource
    holder: str = ""
    held_out: Examples | None = None
    shape: TaskShape | None = None

    def answer(self, request: TrainRequest, params: Tensor) -> TrainReply:
        """One round's work, for a server that reads it.

        Args:
          request: what is asked.
          params: (num_params,), float32.

        Returns:
          The clipped update, its bit, what this client has spent, and its answer to the query of the request.

        Raises:
          Refused: a policy or a budget forbids the work, or the run is under secure aggregation.
          MalformedMessage: the parameters, or the frozen values, are those of another model.
          ConfigError: the number of examples that the owner declares does not go with the run.
        """
        if request.run.masked:
            raise Refused("the run is under secure aggregation, and this message asks for an update in the clear")
        values, admitted = self._values(request, params)
        spent = admitted.epsilon_example, admitted.epsilon_local, admitted.epsilon_local_pure
        return TrainReply(request.round, values.update, values.below, *spent, answer=values.answer)

    def vector(self, request: TrainRequest, params: Tensor, sums: SecureSum) -> Tensor:
        """One round's work for a masked sum, int64 (length,), with this client's share of the noise.

        Arguments and errors as `answer`.
        """
        values, _ = self._values(request, params)
        return noised_vector(sums, values, request, self.source)

    def _values(self, request: TrainRequest, params: Tensor) -> tuple[Values, Admitted]:
        if request.work.query not in OF_DATA:
            self._check_model(request, params)
        admitted = admit_one(request, self, num_examples=len(self.examples))
        # Before training, which leaves other parameters in the model.
        answer = self._answer(request, params) if request.work.query else None
        if not request.work.trains:
            return Values(torch.zeros(0), answer=answer), admitted
        update = self._update(params, admitted.work, request.run)
        clipped, norms = clip_by_norm(update.unsqueeze(0), request.clip_norm)
        return Values(clipped[0], bool(norms[0] <= request.clip_norm), answer), admitted

    def _check_model(self, request: TrainRequest, params: Tensor) -> None:
        """Raises MalformedMessage if the parameters or the frozen values are those of another model."""
        size = sum(parameter.numel() for parameter in trainable(self.model))
        if params.shape != (size,):
            name, given = request.run.model, params.numel()
            raise MalformedMessage(f"the model {name} has {size} trainable parameters, the train request holds {given}")
        if request.frozen is not None and request.frozen != frozen_digest(self.model):
            raise MalformedMessage(
                f"the frozen values of the model {request.run.model} are not the server's: both must load the same"
            )

    def _answer(self, request: TrainRequest, params: Tensor) -> Tensor:
        if request.work.query in OF_DATA:
            return answer_of_data(request, self.examples, self.shape)
        if self.held_out is None or self.shape is None:
            raise Refused("this client holds nothing out: the run does not have evaluation.kind=private")
        query = query_of(request.work.query, request.run, self.shape)
        answer, noise = answer_to(query, self.model, params, self.held_out), own_noise(request.run, query)
        sent = answer if noise is None else noise.noised(answer, len(self.held_out), self.source)
        return sent.to(torch.float32)

    def _update(self, params: Tensor, work: RoundWork, run: ClientSettings) -> Tensor:
        local, training = work.local, work.training
        if run.example.secure:
            clip = run.example.clip_norm, self.source
            return shared_step(self.model, params, self.examples, settings=training, clip=clip)
        if local is not None and local.kind == "laplace_step":
            load_parameters(self.model, params)
            source = self.source.child("local")
            return release_step(self.model, self.examples, training=training, privacy=local, source=source)
        update = local_update(self.model, params, self.examples, settings=training, source=self.source)
        return release_update(update, local, source=self.source.child("local")) if local else update

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Scalar]
    ) -> tuple[list[np.ndarray], int, dict[str, Scalar]]:
        """`answer` as Flower's NumPyClient has it.

        Args:
          parameters: one array (num_params,).
          config: a train request as `messages.request_items` writes it.

        Returns:
          The update as one array (num_params,), float32; the constant 1; and the numbers of a `TrainReply`.

        Raises:
          as `answer`, and MalformedMessage if the request can't be read.
        """
        params = torch.from_numpy(np.array(parameters[0], dtype=np.float32))
        reply = self.answer(request_of(config), params)
        return [reply.update.numpy()], UNIFORM_WEIGHT, {**reply_numbers(reply), "below": reply.below}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Scalar]) -> tuple[float, int, dict[str, Scalar]]:
        """Refused: a client's loss and accuracy are not private. The server evaluates on its public test set.

        Raises:
          Refused: always.
        """
        raise Refused("a client's loss and accuracy are not private, and do not leave it")
