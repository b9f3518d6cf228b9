"""The model, the texts of each node, and a plain PyTorch loop."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

CLASSES, TOKENS = ("negative", "neutral", "positive"), 48


def build(weights: str) -> PeftModel:
    """The transformer in a folder; its low-rank matrices and its head learn."""
    body = AutoModelForSequenceClassification.from_pretrained(
        weights, num_labels=len(CLASSES), local_files_only=True
    )
    return get_peft_model(
        body, LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    )


def learned(model: PeftModel) -> dict[str, Tensor]:
    """The parameters that are sent: the matrices and the head."""
    return get_peft_model_state_dict(model)


def load_learned(model: PeftModel, values: dict[str, Tensor]) -> None:
    """Copies received values into the model."""
    set_peft_model_state_dict(model, values)


def load_data(texts: str, weights: str, file: str, part: int = 0, of: int = 1) -> TensorDataset:
    """Every `of`-th row of a table: tokens, attention masks, and classes."""
    with (Path(texts) / file).open(encoding="utf-8") as table:
        rows = list(csv.DictReader(table))[part::of]
    tokenizer = AutoTokenizer.from_pretrained(weights, local_files_only=True)
    read = tokenizer(
        [row["text"] for row in rows],
        truncation=True,
        max_length=TOKENS,
        padding="max_length",
        return_tensors="pt",
    )
    classes = torch.tensor([CLASSES.index(row["sentiment"]) for row in rows])
    return TensorDataset(read["input_ids"], read["attention_mask"], classes)


def loss_of(model: nn.Module, tokens: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(model(input_ids=tokens, attention_mask=mask).logits, classes)


def train(model: nn.Module, data: TensorDataset) -> None:
    """One pass over the data."""
    model.train()
    optimizer = torch.optim.SGD(
        [value for value in model.parameters() if value.requires_grad], lr=0.1
    )
    for batch in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()


@torch.no_grad()
def test(model: nn.Module, data: TensorDataset) -> tuple[float, float]:
    """Loss and accuracy."""
    model.eval()
    tokens, mask, classes = data.tensors
    logits = model(input_ids=tokens, attention_mask=mask).logits
    right = (logits.argmax(1) == classes).float().mean()
    return float(nn.functional.cross_entropy(logits, classes)), float(right)
