"""DP-SGD for a training loop of one's own: a model, an optimizer and a data set of PyTorch, and an account."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam

from discreet.central.loop_settings import LoopSettings, draws_of
from discreet.central.poisson_batches import Collate, MapDataset, PoissonBatches, size_of
from discreet.central.private_gradients import PrivateGradients, one_value_an_example
from discreet.central.step_account import Price, StepAccount, calibrated, opened, spent_in
from discreet.federated.durable_ledger import DurableLedger
from discreet.privacy.events import PLD
from discreet.privacy.per_example import Loss, cross_entropy
from discreet.privacy.randomness import RandomSource, secure_source, seeded_source
from discreet.privacy.rules.trial import is_same
from discreet.settings.privacy import ADD_OR_REMOVE, ZERO_OUT
from discreet.tasks.dropout import torch_draws_from
from discreet.training.local_training import (
    ExamplePrivacy,
    counted_examples,
    example_event,
    noised_means,
    sampling_probability,
    steps_of,
)

_log = logging.getLogger("discreet")
Batch = tuple[Tensor, Tensor]


class BatchError(RuntimeError):
    """A batch that was not drawn here, was skipped or was stepped before: what is charged would not be what ran."""


@dataclass(frozen=True, eq=False)
class _Drawn:
    """The batch of a step, and a copy of it as it was drawn: some writes to a tensor leave no trace in it."""

    step: int
    batch: Batch
    copies: Batch

    @classmethod
    def of(cls, step: int, batch: Batch) -> _Drawn:
        return cls(step, batch, (batch[0].clone(), batch[1].clone()))

    def is_still(self, batch: Batch) -> bool:
        """Whether these are the very tensors, as they were drawn."""
        kept = zip(self.batch, batch, self.copies, strict=True)
        return all(one is other and is_same(other, copy) for one, other, copy in kept)


class DPSGD:
    """Private training in a loop of one's own (Abadi et al. 2016, Algorithm 1, with Poisson batches).

        private = DPSGD(model, optimizer, dataset, batch_size=256, epochs=10, delta=1e-5, target_epsilon=3.0)
        for inputs, targets in private:
            private.step(inputs, targets)
        print(private.epsilon())

    Guarantee: (epsilon(), delta)-differential privacy of the examples of `dataset`, for whoever sees the parameters at
    any time and everything computed from them. Each example joins a batch with the chance batch_size / n,
    independently; its gradient is clipped to `l2_norm_clip`; noise of noise_multiplier * l2_norm_clip is added to the
    sum, also if the batch is empty, and the sum is divided by `batch_size`, a constant. n is the data set's size, and
    the guarantee is zero-out (an example contributes nothing; n stays, and is public). Or n is the constant
    `public_num_examples`, and the guarantee is add-or-remove. What the optimizer does with the noised mean (momentum,
    Adam, weight decay, decoupled or not, schedules) is a function of the noised means and of public parameters:
    post-processing, which costs nothing.

    Not covered: batches, their sizes, losses and metrics on the training data, and whatever else of the data is shown;
    the choice of settings, if the data guided it. One process and one thread: a model that is trained by several
    processes (DistributedDataParallel) is out of scope.

    Args:
      model: what `clipped_gradient_sum` serves: no layer may mix examples (no BatchNorm). Frozen parameters get neither
        gradient nor noise. The batches come on its device.
      optimizer: of torch.optim, over the trainable parameters of the model, all of them and no others.
      dataset: a map-style data set, or a list, of pairs (input, target); that it has one at least is public.
      loss: one value an example, (n,), that depends on that example alone; a loss of torch.nn with reduction="none",
        whose values are averaged over an example's own positions and labels (`per_example_loss`).
      batch_size: the expected size of a batch, from 1 to the number of examples.
      epochs: of epochs * ceil(n / batch_size) steps in all: `len(private)`.
      l2_norm_clip: what each example's gradient is clipped to, within [1e-9, 1e9].
      target_epsilon: chooses the least noise with which all steps, and what `ledger` says was spent before, cost at
        most that; it is then also `max_epsilon`, unless that is given. Give this or `noise_multiplier`.
      noise_multiplier: the noise's standard deviation over the clip, at least 0; 0 protects nobody.
      delta: of epsilon; above 0 and below 1 / n, better far below.
      max_epsilon: a step that would pass it raises BudgetSpent.
      ledger: None (the account is in memory), or a ledger file, made before by `discreet ledger create FILE`, in which
        runs add up and which outlives them.
      holder: whose data this is, if a ledger file knows of several data sets.
      accountant: "pld" or "rdp".
      public_num_examples: see above; at least batch_size, and chosen without looking at the data.
      max_physical_batch: a larger batch is worked on in pieces of so many examples. It stays one batch.
      collate_fn: makes tensors of a list of pairs, as for torch's DataLoader; each row from its own pair but for
        padding. Tried on a few examples.
      noise: "float", or "secure_sum": each value the sum of 4 draws (Holohan and Braghin 2021).
      seed: makes batches, dropout and noise reproducible; they then protect nobody. None: secure randomness.

    Raises:
      ValueError: a setting out of range, or a model, an optimizer, a loss or a data set that can't be served.
      LedgerError: the ledger file is missing or can't be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: MapDataset,
        *,
        batch_size: int,
        epochs: int,
        delta: float,
        loss: Loss = cross_entropy,
        l2_norm_clip: float = 1.0,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        max_epsilon: float | None = None,
        ledger: str | Path | DurableLedger | None = None,
        holder: str = "",
        accountant: str = PLD,
        public_num_examples: int | None = None,
        max_physical_batch: int | None = None,
        collate_fn: Collate | None = None,
        noise: str = "float",
        seed: int | None = None,
    ) -> None:
        example = ExamplePrivacy(l2_norm_clip, noise_multiplier or 0.0, draws_of(noise), public_num_examples)
        settings, size = LoopSettings(epochs, batch_size, example), size_of(dataset)
        if counted_examples(size, settings) < batch_size:
            raise ValueError(f"batch_size must be at most {size}, the number of examples, not {batch_size}")
        price = Price(delta, accountant, target_epsilon if max_epsilon is None else max_epsilon)
        price.check_below(counted_examples(size, settings))
        file = opened(ledger)
        if (target_epsilon is None) == (noise_multiplier is None):
            raise ValueError("give target_epsilon or noise_multiplier, one of them")
        if target_epsilon is not None:
            settings = calibrated(target_epsilon, settings, size, price=price, spent=spent_in(file, holder))
        self.settings, self._size = settings, size
        self._model, self._optimizer, source = _served(model), _fitting(optimizer, model), _source(seed)
        planned = steps_of(size, settings)
        self._account = StepAccount(example_event(size, settings), planned, price, file, holder)
        self._gradients = PrivateGradients(
            model, one_value_an_example(loss), max_physical_batch, settings.example.mechanism, self._account, source
        )
        device = next(model.parameters()).device
        self._batches = PoissonBatches(dataset, self.sampling_probability, collate_fn, device, source)
        self._drawn: _Drawn | None = None

    def __len__(self) -> int:
        """The steps of all epochs."""
        return self._account.planned

    def __repr__(self) -> str:
        said = f"q={self.sampling_probability:.4g}, noise_multiplier={self.noise_multiplier:.4g}"
        return f"DPSGD({self.steps_taken} of {len(self)} steps taken, {said}, {self.adjacency})"

    @property
    def noise_multiplier(self) -> float:
        """The noise's standard deviation over the clip."""
        return self.settings.example.noise_multiplier

    @property
    def sampling_probability(self) -> float:
        """The chance of each example to be in a batch."""
        return sampling_probability(self._size, self.settings)

    @property
    def adjacency(self) -> str:
        """Which data sets are neighbours, in words."""
        declared = self.settings.example.public_num_examples
        return ZERO_OUT if declared is None else ADD_OR_REMOVE

    @property
    def steps_taken(self) -> int:
        """How many steps were charged."""
        return self._account.taken

    def epsilon(self, delta: float | None = None) -> float:
        """What was spent up to now, at `delta` or the loop's own: by this loop, and by all that its ledger knows."""
        return self._account.epsilon(delta)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are still to be taken, each for one call of `step`.

        If a loop was left with a batch that was not stepped, the next loop begins with that batch: to draw another one
        would be a choice that nothing accounts for.

        Raises:
          BatchError: a batch was not stepped, or all steps of the plan are taken.
        """
        if self.steps_taken >= len(self):
            raise BatchError(f"all {len(self)} steps are taken: more epochs need a new DPSGD, which costs more epsilon")
        while (step := self.steps_taken) < len(self):
            if self._drawn is None or self._drawn.step != step:
                self._drawn = _Drawn.of(step, self._batches.at(step))
            yield self._drawn.batch
            if self.steps_taken == step:
                raise BatchError(
                    "the last batch was not stepped: every batch that is drawn takes its step, an empty one too, "
                    "because to leave some out would be a choice that depends on the data"
                )

    def epoch(self) -> Iterator[Batch]:
        """The batches up to the end of an epoch, for a loop over epochs with something to do after each."""
        length = len(self) // self.settings.epochs
        return islice(self, length - self.steps_taken % length)

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step: the batch's clipped gradients, summed, charged, noised and over batch_size, then the optimizer.

        The noised mean is in `.grad` of each trainable parameter, whatever was there before; a parameter that the pass
        did not use has noise alone.

        Raises:
          BatchError: the batch is not the one that was drawn last, or was stepped already.
          ValueError: the loss mixes examples, the forward changes the model, or the optimizer no longer holds the
            model's trainable parameters, all of them and no others; nothing was charged.
          BudgetSpent: the step would pass `max_epsilon`; nothing was charged or changed.
          LedgerError: the ledger file can't be charged; nothing was changed.
        """
        self._check_drawn(inputs, targets)
        _fitting(self._optimizer, self._model)  # groups may have been added, and parameters frozen or not, since
        params: list[Tensor] = [value for value in self._model.parameters() if value.requires_grad]
        step = self.steps_taken
        with torch_draws_from(self._gradients.source.child("step", step), self._model):
            means = noised_means(self._gradients, params, (inputs, targets), settings=self.settings, step=step)
        pieces = torch.split_with_sizes(means[0], [value.numel() for value in params])
        self._model.zero_grad()  # of frozen parameters too
        for value, piece in zip(params, pieces, strict=True):
            value.grad = piece.view(value.shape)
        self._optimizer.step()

    def _check_drawn(self, inputs: Tensor, targets: Tensor) -> None:
        if self._drawn is None or self._drawn.step != self.steps_taken:
            raise BatchError(
                "no batch is waiting: each one is stepped once, in the loop `for inputs, targets in private`"
            )
        if not self._drawn.is_still((inputs, targets)):
            raise BatchError(
                "this is not the batch that was drawn: step takes the very tensors of the loop, unchanged. They are on "
                "the model's device already; what changes an example belongs in the data set or in collate_fn"
            )


def _served(model: nn.Module) -> nn.Module:
    if isinstance(model, DistributedDataParallel):
        raise ValueError("model: DistributedDataParallel is not served: DPSGD trains in one process")
    if not any(value.requires_grad for value in model.parameters()):
        raise ValueError("model: no parameter is trainable (requires_grad)")
    return model


def _fitting(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """The optimizer; a ValueError if its parameters are not the model's trainable ones."""
    if isinstance(optimizer, LBFGS | SparseAdam):
        raise ValueError(f"optimizer: {type(optimizer).__name__} is not served: it needs a closure or sparse gradients")
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    if held - {id(value) for value in model.parameters()}:
        raise ValueError("optimizer: it holds parameters that are not the model's, which nothing would make private")
    if {id(value) for value in model.parameters() if value.requires_grad} - held:
        raise ValueError(
            "optimizer: it does not hold all trainable parameters of the model: freeze the others by "
            "requires_grad_(False), so that they take no part in the clipped norm"
        )
    return optimizer


def _source(seed: int | None) -> RandomSource:
    if seed is None:
        return secure_source()
    _log.warning("DPSGD with a seed: batches and noise can be computed again from it, and protect nobody")
    return seeded_source(seed)
