"""The same classifier by DPSGD, in a custom loop: python examples/text/loop.py WEIGHTS TEXTS

Each single text is protected. The result is in the folder `adapter`, which peft loads.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from discreet import DPSGD

sys.path.insert(0, str(Path(__file__).resolve().parent / "app"))
from text_app import task


def main(weights: str, texts: str, epochs: int = 3) -> None:
    tokens, mask, classes = task.load_data(texts, weights, "train.csv").tensors
    rows = [
        ({"input_ids": t, "attention_mask": m}, c)
        for t, m, c in zip(tokens, mask, classes, strict=True)
    ]
    model = task.build(weights)
    optimizer = torch.optim.SGD(
        [value for value in model.parameters() if value.requires_grad], lr=1.0
    )
    private = DPSGD(
        model,
        optimizer,
        torch.utils.data.DataLoader(rows, batch_size=max(1, len(rows) // 20)),
        loss=lambda outputs, classes: nn.functional.cross_entropy(
            outputs.logits, classes, reduction="none"
        ),
        epochs=epochs,
        target_epsilon=8.0,
        delta=1e-5,
    )
    for inputs, labels in private:
        private.step(inputs, labels)
    _, accuracy = task.test(model, task.load_data(texts, weights, "test.csv"))
    model.save_pretrained("adapter")
    print(f"epsilon {private.epsilon():.3f} at delta 1e-5, other texts right {accuracy:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
