"""DP-SGD for a custom training loop: a PyTorch model, optimizer and data set, and a privacy
account."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import add, is_not
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from discreet.dpsgd.argument_names import names_meant
from discreet.dpsgd.loop_checks import (
    check_classes,
    check_kinds,
    check_known,
    check_loop_model,
    check_optimizers,
    check_price,
    check_same,
    one_value_an_example,
    optimizers_of,
)
from discreet.dpsgd.loop_optimizers import LoopOptimizers, Stepped
from discreet.dpsgd.loop_plan import LoopPrivacy, Schedule, planned_loop
from discreet.dpsgd.poisson_batches import (
    Batch,
    Collate,
    MapDataset,
    Piece,
    PoissonBatches,
    loaded,
    processes_of,
)
from discreet.dpsgd.step_account import account_of
from discreet.layers.draws import torch_draws_from
from discreet.ledger.owner_account import account_name
from discreet.per_example.objective import (
    Loss,
    Tree,
    cross_entropy,
    given,
    modules_of,
    objective_of,
    parameters_of,
)
from discreet.per_example.per_example import (
    check_finite,
    clipped_gradient_sum,
    clipped_sum_by_owner,
)
from discreet.per_example.trial import is_same
from discreet.privacy.randomness import RandomSource, source_of
from discreet.settings.adjacency import ADD_OR_REMOVE, OF_OWNERS, ZERO_OUT
from discreet.settings.clip_choice import AdaptiveClipping

_log = logging.getLogger("discreet")
DEFAULT = LoopPrivacy()
_STATE = {"settings", "steps_taken", "scale", "clip_norm", "ledger"}  # of a state_dict


class BatchError(RuntimeError):
    """A batch was not drawn here, was skipped, or was already stepped, so that the charge would not
    match the work."""


class DPSGD:
    """DP-SGD in your own training loop (Abadi et al. 2016, Algorithm 1, with Poisson batches).

        private = DPSGD(model, optimizer, dataset, epochs=10, delta=1e-5, target_epsilon=3.0)
        for inputs, targets in private:
            private.step(inputs, targets)
        print(private.epsilon())

    Guarantee: (epsilon(), delta)-differential privacy of each example of `dataset`, against an
    observer who sees the parameters at all times and everything computed from them. Each example
    joins a batch with probability batch_size / n, independently, and its gradient is clipped to
    `clip_norm`. Noise of standard deviation noise_multiplier * clip_norm is added to the sum, even
    if the batch is empty, and the sum is divided by `batch_size`, a constant. n is the data set's
    size, and the adjacency is zero-out (an example contributes nothing; n stays, and is public).
    With the constant `public_num_examples` in place of n it is add-or-remove. The optimizer's use
    of the noised mean (momentum, Adam, weight decay, schedules) is post-processing, which costs no
    privacy.

    Not covered: batches, their sizes and pieces; losses and metrics on the training data, and other
    values that the loop shows; settings that were chosen by looking at the data; several threads;
    messages between processes.

    Args:
      model: any model that `clipped_gradient_sum` supports: no layer may mix examples (no
        BatchNorm). Frozen parameters get neither gradient nor noise. Batches are on its device.
      optimizer: an optimizer of torch.optim over exactly the trainable parameters of the model; or
        several, each over some of them; or an empty list for a trainer that steps by itself: the
        noised mean then stays in `.grad`.
      dataset: a map-style data set, or a list, of pairs (input, target), each example at one
        index. An input may be a tuple of
        tensors for the model's arguments or a dictionary for its arguments by name. Or of
        dictionaries alone, which the loss gets too, with None for the targets. It is public that
        the data set is not empty. Or a DataLoader of such a data set, which is read with its
        workers, prefetching and collate_fn; Poisson batches replace its sampler.
      batch_size: the expected size of a batch, from 1 to the number of examples; if None, the
        DataLoader's.
      epochs: the number of epochs, of ceil(n / batch_size) steps each. `len(private)` is the number
        of all steps.
      steps: the number of steps, in place of epochs.
      delta: delta for epsilon; above 0 and below 1 / n, better far below.
      target_epsilon: chooses the least noise with which all steps, and the earlier spending in the
        ledger, cost at most this epsilon. It is then also the budget, unless `privacy` has another
        one.
      clip_norm: the L2 norm to which each example's gradient is clipped, within [1e-9, 1e9]. Or a
        schedule: a list with a value for each step, or a function of the step, from 0 on, that does
        not depend on the data. Or `AdaptiveClipping`, which tracks a quantile of the gradients'
        norms by noised counts; the noise covers both.
      loss: one value an example, (n,), that depends on that example alone; a loss of torch.nn with
        reduction="none", whose values are averaged over an example's own positions and labels
        (`per_example_loss`).
      collate_fn: makes tensors from a list of pairs, as for torch's DataLoader. Each row must
        depend on its own pair only. Padding to the longest must change no gradient. Both are tried
        on a few examples.
      owners: the owner of each example. The guarantee is then for an owner with all its rows: n and
        batch_size count owners, a step reads at most `LoopPrivacy.rows_per_owner` rows of a drawn
        owner, and the gradient of the mean loss over them is clipped as one. Not with collate_fn.
      privacy: noise, budget, accountant, ledger, declared n, seed and pieces, for loops that choose
        them.

    Raises:
      ValueError: a setting is out of range, or a model, an optimizer, a loss or a data set is not
        supported.
      LedgerError: the ledger file is missing or can't be used.
    """

    @names_meant
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        dataset: MapDataset | DataLoader[Any],
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        delta: float,
        target_epsilon: float | None = None,
        clip_norm: Schedule | AdaptiveClipping = 1.0,
        loss: Loss = cross_entropy,
        collate_fn: Collate | None = None,
        owners: Sequence[object] | Tensor | None = None,
        privacy: LoopPrivacy = DEFAULT,
    ) -> None:
        check_kinds(model, dataset, privacy, owners)
        check_loop_model(model)
        self._model = model
        self._privacy = privacy
        self._target = target_epsilon
        self._optimizers = LoopOptimizers(optimizers_of(optimizer))
        check_optimizers(self._optimizers.all, parameters_of(*modules_of(model)))
        self._loss, self._is_plain = one_value_an_example(loss, model)
        examples, how = loaded(dataset, collate_fn)
        expected = how.pop("batch_size", None)
        if batch_size is not None:
            expected = batch_size
        self._owners = None
        keys = None
        if owners is not None:
            # Not for who has one row each.
            from discreet.dpsgd.loop_owners import named_owners, rows_by_owner

            keys = named_owners(owners)
            self._owners = rows_by_owner(keys, examples, privacy)
        examples.check_items(keys)
        n = len(examples if self._owners is None else self._owners)
        plan = planned_loop(
            privacy, n, batch_size=expected, clip_norm=clip_norm, epochs=epochs, steps=steps
        )
        check_price(plan, privacy, delta, target_epsilon)

        self._processes = processes_of(privacy.distributed)
        account = replace(
            privacy, data_owner=account_name(privacy.data_owner, by_owner=owners is not None)
        )
        plan, self._account = account_of(
            plan, account, self._processes, delta=delta, target=target_epsilon
        )
        self._plan = plan
        self._clip_norm = plan.first_clip_norm
        self._has_epochs = steps is None
        self._source = _source_of(privacy.seed)
        shared = self._processes.start(model, self._source)
        at_most = privacy.max_physical_batch
        self._batches = PoissonBatches(
            examples, plan.probability, model, shared, self._processes, at_most, how, self._owners
        )
        self._reading: Iterator[Piece] = iter(())
        self._waiting: Piece | None = None  # the piece that was yielded and not stepped yet
        self._sums: list[Tensor] | None = None  # the sums of earlier pieces of the batch
        self._summed: Sequence[nn.Parameter] = ()  # the parameters that they are of

    def __len__(self) -> int:
        """The steps of the whole loop."""
        return self._plan.steps

    def __repr__(self) -> str:
        said = f"q={self.sampling_probability:.4g}, noise_multiplier={self.noise_multiplier:.4g}"
        return f"DPSGD({self.steps_taken} of {len(self)} steps taken, {said}, {self.adjacency})"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a DPSGD is not copied or pickled: a copy would share its account; save state_dict()"
        )

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the next step: the noise's standard deviation over the clip
        norm."""
        return self._plan.noise_multiplier(self.steps_taken)

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step. An adaptive one is computed from noised counts, and is
        covered by the guarantee."""
        return self._clip_norm

    @property
    def sampling_probability(self) -> float:
        """The probability that an example is in a batch."""
        return self._plan.probability

    @property
    def adjacency(self) -> str:
        """The adjacency, in words."""
        if self._privacy.public_num_examples is None:
            words = ZERO_OUT
        else:
            words = ADD_OR_REMOVE
        if self._owners is None:
            return words
        return OF_OWNERS[words]

    @property
    def steps_taken(self) -> int:
        """The number of charged steps."""
        return self._account.taken

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon so far, at `delta` or the loop's own: of this loop and of all other spending in
        its ledger. With a ledger and several processes only the first one knows it; others raise
        RuntimeError."""
        if self._processes.rank and self._privacy.ledger is not None:
            raise RuntimeError("epsilon: only the first process has the ledger")
        if delta is None:
            budget = self._account.budget
        else:
            budget = replace(self._account.budget, delta=delta)
        return budget.epsilon(self._account.spent())

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the remaining steps, whole or in pieces, each for one call of `step`. If a
        loop is left before a batch is stepped, the next loop begins with that batch. Raises
        BatchError: the loop continues without a step, or all steps are taken.
        """
        return self._until(len(self))

    def epoch(self) -> Iterator[Batch]:
        """The batches up to the end of an epoch, for a loop that does something after each epoch.
        Raises ValueError for a loop of `steps`."""
        if not self._has_epochs:
            raise ValueError("epoch: the loop was made with steps, which end no epoch")
        return self._until(
            self.steps_taken + self._plan.epoch - self.steps_taken % self._plan.epoch
        )

    def _until(self, end: int) -> Iterator[Batch]:
        if self.steps_taken >= len(self):
            raise BatchError(
                f"all {len(self)} steps are taken: more epochs need a new DPSGD, which costs more "
                "epsilon"
            )
        while self.steps_taken < end:
            self._waiting = self._waiting or self._read()
            yield given(self._waiting.batch[0]), given(self._waiting.batch[1])
            if self._waiting is not None:
                raise BatchError(
                    "the last batch was not stepped: each one takes its step, an empty one too. "
                    "To accumulate gradients give LoopPrivacy(max_physical_batch=...)"
                )

    def _read(self) -> Piece:
        # A reader that raises is not used again.
        reading = self._reading
        self._reading = iter(())
        piece = next(reading, None)
        if piece is None:  # the batch is read from its start, and not drawn again
            self._sums, reading = None, self._batches.pieces(range(self.steps_taken, len(self)))
            piece = next(reading)
        self._reading = reading
        return piece

    def step(self, inputs: Tree, targets: Tree = None) -> Stepped:
        """Takes one step: sums the batch's clipped gradients, charges the account, adds noise,
        divides by batch_size, and runs the optimizer.

        The noised mean replaces `.grad` of each trainable parameter; a parameter that the pass did
        not use gets noise alone. The pieces of a batch are added up, and the last one ends the step
        with one noise and one charge. No loss is returned, as a mean over private examples is
        private. Measure on other data, or pay for it (docs/guide/dpsgd.md).

        Returns:
          Something true if it took a step, and false for a piece that is not the last one; no
          number. The number of pieces depends on the size of the batch, which is not covered: do
          not reveal how often the result was false.

        Raises:
          BatchError: the batch is not the one that was drawn last, or was stepped already.
          ValueError: the loss mixes examples, the forward changes the model, padding changes
            gradients, none of them is finite, or the optimizer no longer holds exactly the model's
            trainable parameters, or comes from steps that no account here knows; nothing was
            charged.
          BudgetSpent: the step would exceed the budget; nothing was charged or changed.
          LedgerError: the ledger file can't be charged; nothing was changed.
        """
        piece = self._drawn((inputs, targets))
        parameters = parameters_of(*modules_of(self._model))
        # Since the last check, parameter groups may have been added and parameters frozen.
        check_optimizers(self._optimizers.all, parameters)
        if self._privacy.ledger is None:
            check_known(self._optimizers.all, self.steps_taken)
        labels = ("step", piece.step, "piece", piece.number, "process", self._processes.rank)
        with torch_draws_from(self._source.child(*labels), self._model, piece.rows):
            sums = self._clipped_sums(*piece.as_drawn, piece.owners)
            if self._batches.padding is not None:
                objective = objective_of(self._model, self._loss)
                self._batches.padding.check(objective, piece.batch, piece.rows.tolist())
        trained = [value for value in parameters if value.requires_grad]
        if self._sums is not None:
            check_same(self._summed, trained)
            # Not in place: a refused step may be tried again.
            sums = list(map(add, self._sums, sums))
        self._summed = trained
        if not piece.is_last:
            self._sums = sums
            self._waiting = None
            return Stepped(False)
        if self._processes.count == 1:
            check_finite(*map(int, sums[2]))
        self._processes.first(self._account.charge)
        if self._processes.rank:
            self._account.charge()
        self._waiting = self._sums = None
        del self._batches.drawn[piece.step]
        self._take(sums, piece.step, parameters)
        return Stepped(True)

    def _take(self, sums: list[Tensor], step: int, parameters: Sequence[nn.Parameter]) -> None:
        total, count, gradients = self._processes.added(sums)
        check_finite(*map(int, gradients))
        release = partial(
            self._plan.released, total, count, self._clip_norm, step=step, source=self._source
        )
        mean, self._clip_norm = self._processes.first(release)
        self._optimizers.step(parameters, mean)
        if self.steps_taken == len(self):
            self._reading = iter(())  # ends its workers

    def _clipped_sums(self, inputs: Tree, targets: Tree, owners: Tensor | None) -> list[Tensor]:
        """The sum of clipped gradients and the sum of (b - 1/2), where b is 1 for a norm within the
        clip norm and 0 otherwise; gradients that are not finite are left out. Then the number of
        gradients, and of finite ones."""
        loss = self._loss
        plain = self._is_plain and isinstance(targets, Tensor)
        if (plain or loss is cross_entropy) and isinstance(targets, Tensor):
            check_classes(targets)
        if plain and targets.dim() == 1 and targets.dtype == torch.int64:
            loss = cross_entropy  # the one whose gradient is known
        how: dict[str, Any] = {"clip_norm": self._clip_norm, "loss": loss}
        if owners is None:
            total, norms = clipped_gradient_sum(self._model, inputs, targets=targets, **how)
        else:
            total, norms = clipped_sum_by_owner(self._model, (inputs, targets), owners, **how)
        finite = norms[norms.isfinite()]
        below = (finite <= self._clip_norm).to(total.dtype)
        return [
            total,
            below.sub_(0.5).sum(),
            torch.tensor([len(norms), len(finite)], device=total.device),
        ]

    def _drawn(self, batch: Batch) -> Piece:
        piece = self._waiting
        if piece is None:
            raise BatchError(
                "no batch is waiting: each one is stepped once, in the loop over the batches"
            )
        trees = piece.batch, batch, piece.as_drawn
        drawn, given, copies = (
            [part for part in tree_leaves(tree) if part is not None] for tree in trees
        )
        if (
            len(drawn) != len(given)
            or any(map(is_not, drawn, given))
            or not all(map(is_same, given, copies))
        ):
            raise BatchError(
                "this is not the batch that was drawn: step takes the loop's own tensors, unchanged"
            )
        return piece

    def state_dict(self) -> dict[str, Any]:
        """The loop's position as plain values: steps taken, noise, clip norm, settings, and the
        position in its ledger.

        Save it together with the states of model and optimizer, after a step. Raises BatchError: a
        batch is waiting for its step."""
        if self._waiting or self._sums:
            raise BatchError(
                "state_dict: a batch was drawn and not stepped yet: save after its step"
            )
        return {
            "settings": self._settings(),
            "steps_taken": self.steps_taken,
            "scale": self._plan.scale,
            "clip_norm": self._clip_norm,
            "ledger": self._account.position(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state, in a new DPSGD with the same settings. Noise that was chosen by a
        target is taken from the state.

        Without a ledger file the steps of the state count as spent. With one the file counts: steps
        taken after the state was saved stay charged, and are charged again when they are repeated
        with new noise. With a seed a repeated step would have the same noise, so a state older than
        the file is refused; without a file this can't be detected.

        Raises:
          ValueError: the state has other settings, which the message names, or is no state.
          BatchError: this loop has drawn a batch.
          LedgerError: the steps are in another ledger file, in a newer copy of it, or in none; or
            the state is older than the file and there is a seed.
        """
        if self.steps_taken or self._waiting or self._sums:
            raise BatchError(
                "load_state_dict: this loop has begun: load into a new DPSGD, before its first "
                "batch"
            )
        if not isinstance(state, dict) or not state.keys() >= _STATE:
            raise ValueError("load_state_dict: give what DPSGD.state_dict() returned")
        was = state["settings"] or {}
        now = self._settings()
        differing = [
            f"{name} was {was.get(name)}, is {now[name]}"
            for name in now
            if was.get(name) != now[name]
        ]
        if differing:
            raise ValueError(
                f"load_state_dict: the state has other settings: {'; '.join(differing)}"
            )
        if self._processes.rank:
            ledger = None
        else:
            ledger = state["ledger"]
        is_seeded = self._privacy.seed is not None
        if not 0 <= state["steps_taken"] <= len(self):
            raise ValueError(
                f"load_state_dict: steps_taken must be within [0, {len(self)}], not "
                f"{state['steps_taken']}"
            )
        self._account.resume(state["steps_taken"], ledger, is_seeded=is_seeded)
        self._plan = replace(self._plan, scale=state["scale"])
        self._clip_norm = state["clip_norm"]
        self._account.events = self._plan.events()

    def _settings(self) -> dict[str, Any]:
        delta = self._account.budget.delta
        privacy = self._privacy
        how = {"delta": delta, "target_epsilon": self._target, "data_owner": privacy.data_owner}
        if self._owners is not None:
            how["rows_per_owner"] = self._owners.most
        return {**self._plan.facts(), **how, "adjacency": self.adjacency}


def _source_of(seed: int | None) -> RandomSource:
    """The loop's randomness. The log has a warning if it is reproducible."""
    if seed is not None:
        _log.warning(
            "DPSGD with a seed: its batches and noise are reproducible, and protect nobody"
        )
    return source_of(seed)
