"""A transformers Trainer whose steps are private: python examples/dpsgd/transformers_trainer.py

The model is a small BERT with random parameters, so that nothing is downloaded; the texts are
made-up tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from discreet import DPSGD


class Steps:
    """One batch for each step, as a Trainer counts them; the first piece of a batch in pieces."""

    def __init__(self, private: DPSGD) -> None:
        self.private = private

    def __len__(self) -> int:
        return len(self.private)

    def __iter__(self) -> Iterator[tuple]:
        self.pieces = iter(self.private)
        return self.pieces


class Account(TrainerCallback):
    """Saves the account of a DPSGD beside each checkpoint of the model."""

    def __init__(self, private: DPSGD) -> None:
        self.private = private

    def on_save(
        self, args: TrainingArguments, state: object, control: object, **more: object
    ) -> None:
        torch.save(
            self.private.state_dict(),
            Path(args.output_dir, f"checkpoint-{state.global_step}", "private.pt"),
        )


class PrivateTrainer(Trainer):
    """A Trainer whose batches and gradients are those of a DPSGD without an optimizer. The
    Trainer's own optimizer steps."""

    def __init__(self, private: DPSGD, **settings: object) -> None:
        super().__init__(**settings)
        if self.args.gradient_accumulation_steps != 1:
            raise ValueError(
                "gradient_accumulation_steps: give LoopPrivacy(max_physical_batch=...) to DPSGD "
                "instead"
            )
        if self.args.fp16:
            raise ValueError(
                "fp16 scales losses, and divides the noised mean by the scale: take bf16"
            )
        self.args.ignore_data_skip = True  # the DPSGD knows the remaining batches itself
        self.private, self.steps = private, Steps(private)
        self.add_callback(Account(private))

    def train(self, resume_from_checkpoint: str | bool | None = None, **more: object) -> object:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            self.private.load_state_dict(torch.load(Path(folder, "private.pt"), weights_only=True))
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **more)

    def get_train_dataloader(self) -> Steps:
        return self.steps

    def training_step(
        self, model: nn.Module, batch: tuple, num_items_in_batch: object = None
    ) -> torch.Tensor:
        if self.state.global_step != self.private.steps_taken:
            raise RuntimeError(
                "steps were taken of which this DPSGD knows nothing: load its state_dict"
            )
        model.train()
        # `step` returns True for the last piece; then the noised mean is in .grad.
        while not self.private.step(*batch):
            batch = next(self.steps.pieces)
        return torch.zeros((), device=self.args.device)  # the loss of private examples is private


def loss(outputs: dict, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")


def without_labels(rows: list[dict]) -> tuple[dict, torch.Tensor]:
    """Inputs and labels, separated: with labels the model would compute a mean loss, which is not
    needed."""
    batch = torch.utils.data.default_collate(rows)  # or a DataCollatorWithPadding
    return batch, batch.pop("labels")


def texts(count: int, seed: int) -> list[dict]:
    """Made-up tokens with their attention masks and labels. Texts with one label have more small
    tokens than those with the other."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    tokens = torch.randint(1, 35, (count, 12), generator=draws) + 15 * labels.unsqueeze(1)
    lengths = torch.randint(6, 13, (count, 1), generator=draws)
    mask = (torch.arange(12) < lengths).long()
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, row, strict=True)) for row in zip(tokens, mask, labels, strict=True)]


def main() -> None:
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    loader = DataLoader(texts(2000, seed=31), batch_size=200, collate_fn=without_labels)
    private = DPSGD(model, [], loader, steps=60, target_epsilon=8.0, delta=1e-4, loss=loss)
    with TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=len(private),
            max_grad_norm=0.0,  # each example's gradient is clipped already
            learning_rate=5e-3,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        PrivateTrainer(private, model=model, args=settings, train_dataset=loader.dataset).train()
    model.eval()
    others = torch.utils.data.default_collate(texts(500, seed=57))
    with torch.no_grad():
        right = (model(**others).logits.argmax(1) == others["labels"]).float().mean()
    print(
        f"epsilon {private.epsilon():.3f} at delta 1e-4, {private.steps_taken} steps, other texts "
        f"right {right:.3f}"
    )


if __name__ == "__main__":
    main()
