"""DP-SGD for a training loop of one's own: a model, an optimizer and a data set of PyTorch, and an account."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import islice
from operator import is_not
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils._pytree import tree_leaves, tree_map

from discreet.accounting.calibration import check_whole, noise_multiplier_for_releases
from discreet.dpsgd.poisson_batches import Batch, Collate, MapDataset, PoissonBatches, size_of
from discreet.dpsgd.step_account import LoopPrivacy, StepAccount, spent_in
from discreet.ledger.budget import ServerBudget
from discreet.ledger.durable_ledger import DurableLedger
from discreet.models.dropout import torch_draws_from
from discreet.models.models import parts_of, trainable, trainable_part
from discreet.per_example.objective import PADDING, Loss, Tree, count_of, cross_entropy, rows_of
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.per_example.trial import is_same
from discreet.privacy.clipping import check_clip
from discreet.privacy.randomness import RandomSource, source_of
from discreet.settings.privacy import ADD_OR_REMOVE, EXAMPLE, ZERO_OUT
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    counted_examples,
    example_event,
    noised_means,
    sampling_probability,
    step_noise,
    steps_of,
)
from discreet.training.losses import per_example_loss

_log = logging.getLogger("discreet")
DEFAULT = LoopPrivacy()


class BatchError(RuntimeError):
    """A batch that was not drawn here, was skipped or was stepped before: what is charged would not be what ran."""


class DPSGD:
    """Private training in a loop of one's own (Abadi et al. 2016, Algorithm 1, with Poisson batches).

        private = DPSGD(model, optimizer, dataset, batch_size=256, epochs=10, delta=1e-5, target_epsilon=3.0)
        for inputs, targets in private:
            private.step(inputs, targets)
        print(private.epsilon())

    Guarantee: (epsilon(), delta)-differential privacy of the examples of `dataset`, for whoever sees the parameters at
    any time and everything computed from them. Each example joins a batch with the chance batch_size / n,
    independently; its gradient is clipped to `clip_norm`; noise of noise_multiplier * clip_norm is added to the sum,
    also if the batch is empty, and the sum is divided by `batch_size`, a constant. n is the data set's size, and the
    guarantee is zero-out (an example contributes nothing; n stays, and is public). Or n is the constant
    `public_num_examples`, and the guarantee is add-or-remove. Whatever the optimizer does with the noised mean
    (momentum, Adam, weight decay, schedules) is post-processing, which costs nothing.

    Not covered: batches, their sizes, losses and metrics on the training data, and whatever else of the data is shown;
    the choice of settings, if the data guided it; several processes or threads.

    Args:
      model: any that `clipped_gradient_sum` serves: no layer may mix examples (no BatchNorm). Frozen parameters get
        neither gradient nor noise. The batches come on its device.
      optimizer: of torch.optim, over the trainable parameters of the model, all of them and no others.
      dataset: a map-style data set, or a list, of pairs (input, target), in which an input may be a tuple of tensors
        for the model's arguments or a dictionary for its arguments by name; or of dictionaries alone, which the loss is
        given too, with None for the targets. That it has one at least is public.
      batch_size: the expected size of a batch, from 1 to the number of examples.
      epochs: of epochs * ceil(n / batch_size) steps in all: `len(private)`.
      delta: of epsilon; above 0 and below 1 / n, better far below.
      target_epsilon: chooses the least noise with which all steps, and all that the ledger says was spent before, cost
        at most that; it is then also the budget, unless `privacy` has another one.
      clip_norm: the L2 norm that each example's gradient is clipped to, within [1e-9, 1e9].
      loss: one value an example, (n,), that depends on that example alone; a loss of torch.nn with reduction="none",
        whose values are averaged over an example's own positions and labels (`per_example_loss`).
      collate_fn: makes tensors of a list of pairs, as for torch's DataLoader; each row from its own pair but for
        padding. Tried on a few examples.
      privacy: noise, budget, accountant, ledger, declared n and seed, for loops that choose them.

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
        target_epsilon: float | None = None,
        clip_norm: float = 1.0,
        loss: Loss = cross_entropy,
        collate_fn: Collate | None = None,
        privacy: LoopPrivacy = DEFAULT,
    ) -> None:
        check_whole("epochs", epochs)
        check_whole("batch_size", batch_size)
        check_clip(clip_norm, "clip_norm")
        if (target_epsilon is None) == (privacy.noise_multiplier is None):
            raise ValueError("give target_epsilon or privacy=LoopPrivacy(noise_multiplier=...), one of them")
        if isinstance(model, DistributedDataParallel):
            raise ValueError("model: DistributedDataParallel is not served: DPSGD trains in one process")
        if not trainable(model):
            raise ValueError("model: no parameter is trainable (requires_grad)")
        _check_optimizer(optimizer, model)

        declared, self._size = privacy.public_num_examples, size_of(dataset)

        def private(noise: float) -> ExamplePrivacy:
            return ExamplePrivacy(clip_norm, noise, public_num_examples=declared)

        # The loop's own optimizer has the learning rate and the momentum.
        settings = LocalSettings(epochs, batch_size, 0.0, 0.0, private(privacy.noise_multiplier or 0.0))
        counted, steps = counted_examples(self._size, settings), steps_of(self._size, settings)
        if batch_size > counted:
            name = "the number of examples" if declared is None else "public_num_examples"
            raise ValueError(f"batch_size must be at most {counted}, {name}, not {batch_size}")
        if not 0 < delta < 1 / counted:
            raise ValueError(f"delta must be above 0 and below 1 / {counted}, for {counted} examples, not {delta}")

        ledger = None if privacy.ledger is None else DurableLedger(Path(privacy.ledger))
        if target_epsilon is not None:
            spent = spent_in(ledger, privacy.data_owner).entries
            noise = noise_multiplier_for_releases(
                target_epsilon,
                releases=lambda noise: (
                    *spent,
                    (example_event(self._size, replace(settings, example=private(noise))), steps),
                ),
                delta=delta,
                accountant=privacy.accountant,
            )
            settings = replace(settings, example=private(noise))
        most = target_epsilon if privacy.max_epsilon is None else privacy.max_epsilon
        budget = ServerBudget(most, delta, privacy.accountant, name="max_epsilon", guarantee=EXAMPLE)

        assert settings.example is not None
        self._model, self._optimizer, self._settings, self._private = model, optimizer, settings, settings.example
        event = example_event(self._size, settings)
        self._account = StepAccount(event, steps, budget, ledger, privacy.data_owner)
        self._source = source_of(privacy.seed)
        if privacy.seed is not None:
            _log.warning("DPSGD with a seed: batches and noise can be computed again from it, and protect nobody")
        self._loss, self._is_plain = _one_value_an_example(loss)
        device = next(model.parameters()).device
        self._batches = PoissonBatches(dataset, self.sampling_probability, collate_fn, device, self._source)
        # The last step, its batch, and a copy as it was drawn: some writes to a tensor leave no trace in it.
        self._drawn: tuple[int, Batch, Batch] | None = None

    def __len__(self) -> int:
        """The steps of all epochs."""
        return self._account.planned

    def __repr__(self) -> str:
        said = f"q={self.sampling_probability:.4g}, noise_multiplier={self.noise_multiplier:.4g}"
        return f"DPSGD({self.steps_taken} of {len(self)} steps taken, {said}, {self.adjacency})"

    @property
    def noise_multiplier(self) -> float:
        """The noise's standard deviation over the clip norm."""
        return self._private.noise_multiplier

    @property
    def sampling_probability(self) -> float:
        """The chance of each example to be in a batch."""
        return sampling_probability(self._size, self._settings)

    @property
    def adjacency(self) -> str:
        """The data sets that are neighbours, in words."""
        return ZERO_OUT if self._private.public_num_examples is None else ADD_OR_REMOVE

    @property
    def steps_taken(self) -> int:
        """The number of steps that were charged."""
        return self._account.taken

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon up to now, at `delta` or the loop's own: of this loop, and of all that its ledger knows."""
        budget = self._account.budget if delta is None else replace(self._account.budget, delta=delta)
        return budget.epsilon(self._account.spent())

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are still to be taken, each for one call of `step`: one that was not stepped,
        by which a loop was left, is the first of the next loop. Raises BatchError: it goes on without a step, or all
        steps are taken.
        """
        if self.steps_taken >= len(self):
            raise BatchError(f"all {len(self)} steps are taken: more epochs need a new DPSGD, which costs more epsilon")
        while (step := self.steps_taken) < len(self):
            if self._drawn is None or self._drawn[0] != step:
                inputs, targets = self._batches.at(step)
                self._drawn = step, (inputs, targets), (_copied(inputs), _copied(targets))
            yield self._drawn[1]
            if self.steps_taken == step:
                raise BatchError(
                    "the last batch was not stepped: every batch that is drawn takes its step, an empty one too, "
                    "because to leave some out would be a choice that depends on the data"
                )

    def epoch(self) -> Iterator[Batch]:
        """The batches up to the end of an epoch, for a loop over epochs with something to do after each."""
        length = len(self) // self._settings.epochs
        return islice(self, length - self.steps_taken % length)

    def step(self, inputs: Tree, targets: Tree = None, *, max_physical_batch: int | None = None) -> None:
        """One step: the batch's clipped gradients, summed, charged, noised and over batch_size, then the optimizer.

        The noised mean replaces `.grad` of each trainable parameter; one that the pass did not use has noise alone. A
        batch larger than `max_physical_batch` is worked on in pieces of so many examples, and stays one batch.

        Raises:
          BatchError: the batch is not the one that was drawn last, or was stepped already.
          ValueError: the loss mixes examples, the forward changes the model, or the optimizer no longer holds exactly
            the model's trainable parameters; nothing was charged.
          BudgetSpent: the step would pass the budget; nothing was charged or changed.
          LedgerError: the ledger file can't be charged; nothing was changed.
        """
        self._check_drawn((inputs, targets))
        _check_optimizer(self._optimizer, self._model)  # groups may have been added, and parameters frozen, since
        if max_physical_batch is not None:
            check_whole("max_physical_batch", max_physical_batch)
        count, step = count_of(inputs), self.steps_taken
        most = max_physical_batch or max(1, count)
        parts = [slice(start, start + most) for start in range(0, max(1, count), most)]  # an empty batch is one part
        pieces = [(rows_of(inputs, part), None if targets is None else rows_of(targets, part)) for part in parts]
        with torch_draws_from(self._source.child("step", step), self._model):
            add_noise = partial(self._add_noise, source=step_noise(self._source, step))
            mean = noised_means(partial(self._clipped_sum, pieces), add_noise, self._settings)
        self._model.zero_grad()  # of frozen parameters too
        for value, part in zip(trainable(self._model), parts_of(self._model, mean), strict=True):
            value.grad = part.to(value.dtype)
        self._optimizer.step()

    def _clipped_sum(self, pieces: Sequence[Batch], clip_norm: float) -> Tensor:
        def sum_of(inputs: Tree, targets: Tree) -> Tensor:
            loss, plain = self._loss, self._is_plain and isinstance(targets, Tensor)
            if plain and targets.dim() == 1 and targets.dtype == torch.int64 and not (targets < 0).any():
                loss = cross_entropy  # the one whose gradient is known
            return clipped_gradient_sum(self._model, inputs, targets=targets, clip_norm=clip_norm, loss=loss)[0]

        total = reduce(Tensor.add_, (sum_of(*piece) for piece in pieces))
        return trainable_part(self._model, total)

    def _add_noise(self, total: Tensor, clip_norm: float, source: RandomSource) -> Tensor:
        self._account.charge()
        return self._private.mechanism.add_noise(total, clip_norm, source)

    def _check_drawn(self, batch: Batch) -> None:
        if self._drawn is None or self._drawn[0] != self.steps_taken:
            raise BatchError(
                "no batch is waiting: each one is stepped once, in the loop `for inputs, targets in private`"
            )
        trees = self._drawn[1], batch, self._drawn[2]
        drawn, given, copies = ([part for part in tree_leaves(tree) if part is not None] for tree in trees)
        if len(drawn) != len(given) or any(map(is_not, drawn, given)) or not all(map(is_same, given, copies)):
            raise BatchError(
                "this is not the batch that was drawn: step takes the very tensors of the loop, unchanged. They are on "
                "the model's device already; what changes an example belongs in the data set or in collate_fn"
            )


def _copied(batch: Tree) -> Tree:
    return tree_map(lambda part: part.clone() if isinstance(part, Tensor) else part, batch)


def _one_value_an_example(loss: Loss) -> tuple[Loss, bool]:
    """A loss of one value an example, and True if for class numbers it is the plain cross-entropy."""
    reduction = getattr(loss, "reduction", "none")
    if reduction != "none":
        raise ValueError(
            f"loss: {type(loss).__name__} with reduction={reduction!r} gives one value for a whole batch: "
            'give it reduction="none", so that each example\'s gradient can be clipped'
        )
    if not (isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn.")):
        return loss, False
    is_plain = type(loss) is nn.CrossEntropyLoss and loss.weight is None and loss.label_smoothing == 0
    return per_example_loss(loss), bool(is_plain and loss.ignore_index == PADDING)


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises ValueError if its parameters are not the model's trainable ones."""
    if isinstance(optimizer, LBFGS | SparseAdam):
        raise ValueError(f"optimizer: {type(optimizer).__name__} is not served: it needs a closure or sparse gradients")
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    if held - {id(value) for value in model.parameters()}:
        raise ValueError("optimizer: it holds parameters that are not the model's, which nothing would make private")
    if {id(value) for value in trainable(model)} - held:
        raise ValueError(
            "optimizer: it does not hold all trainable parameters of the model: freeze the others by "
            "requires_grad_(False), so that they take no part in the clipped norm"
        )
