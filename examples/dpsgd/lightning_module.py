"""A LightningModule whose steps are private: python examples/dpsgd/lightning_module.py

The data set comes with scikit-learn: 1797 images of 8 x 8 pixels, of which 1500 are for training.
"""

from collections.abc import Iterator

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from discreet import DPSGD

EPOCHS = 10


class Epochs:
    """The batches of one epoch, each time it is iterated: one for each step, or the first piece of
    a batch in pieces. It has a length, so that Lightning does not read one ahead."""

    def __init__(self, private: DPSGD) -> None:
        self.private = private

    def __len__(self) -> int:
        return len(self.private) // EPOCHS

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.pieces = self.private.epoch()
        return self.pieces


class Digits(lightning.LightningModule):
    """A module with manual optimization: DPSGD draws the batches, and puts the noised mean into
    `.grad`."""

    def __init__(self, examples: TensorDataset) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.examples, self.state = examples, None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)

    def configure_callbacks(self) -> list:
        if self.automatic_optimization:
            raise ValueError(
                "automatic_optimization must be False: the gradient comes from DPSGD.step"
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise ValueError(
                "accumulate_grad_batches: give LoopPrivacy(max_physical_batch=...) to DPSGD instead"
            )
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "16-mixed scales losses, and divides the noised mean by the scale: take bf16-mixed"
            )
        return []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        loader = DataLoader(self.examples, batch_size=256)
        self.private = DPSGD(self.layers, [], loader, epochs=EPOCHS, target_epsilon=3.0, delta=1e-4)
        if self.state is not None:
            self.private.load_state_dict(self.state)
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def train_dataloader(self) -> Epochs:
        self.epochs = Epochs(self.private)
        return self.epochs

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        if self.trainer.global_step != self.private.steps_taken:
            raise RuntimeError(
                "steps were taken of which this DPSGD knows nothing: load its state_dict"
            )
        while not self.private.step(*batch):  # True for the last piece
            batch = next(self.epochs.pieces)
        self.optimizers().step()  # Lightning's own, which counts global_step

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> None:
        images, labels = batch  # not from the training data
        self.log("right", (self(images).argmax(1) == labels).float().mean())

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["private"] = self.private.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.state = checkpoint["private"]  # before configure_optimizers


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    module = Digits(TensorDataset(images[:1500], labels[:1500]))
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        val_dataloaders=DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=297),
    )
    private, right = module.private, trainer.callback_metrics["right"]
    print(
        f"epsilon {private.epsilon():.3f} at delta 1e-4, {private.steps_taken} steps, other "
        f"images right {right:.3f}"
    )


if __name__ == "__main__":
    main()
