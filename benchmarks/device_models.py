"""Models of usual sizes for a GPU, and small ones of the same kind for trials on a CPU. Nothing is
downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.people_models import Case, lora, of_logits
from benchmarks.per_example_speed import convolutions

Make = Callable[[int], Case]  # makes a model and a number of examples
TOKENS, CLASSES = 128, 10


def device_cases(*, small: bool) -> dict[str, Make]:
    """The makers of the cases by their names. A maker raises ImportError if its library is not
    installed."""
    return {
        "CNN": lambda count: _images(convolutions(), count, 1, 28),
        "ResNet-18, GroupNorm": lambda count: _images(_resnet(), count, 3, 32),
        "ViT": lambda count: _vit(count, small=small),
        "BERT": lambda count: _bert(count, small=small),
        "GPT-2, LoRA": lambda count: _gpt2_lora(count, small=small),
    }


def _images(model: nn.Module, count: int, channels: int, side: int) -> Case:
    images = torch.randn(count, channels, side, side)
    return Case(model, images, torch.randint(CLASSES, (count,)))


def _resnet() -> nn.Module:
    resnet18: Callable[..., nn.Module] = import_module("torchvision.models").resnet18
    return resnet18(num_classes=CLASSES, norm_layer=partial(nn.GroupNorm, 32))


def _vit(count: int, *, small: bool) -> Case:
    """ViT-S/16 on images of 224 pixels (Touvron et al. 2021); a small one of 4 layers on images of
    32."""
    transformer: Any = import_module("torchvision.models").VisionTransformer
    side, patch, layers, heads, width = (32, 4, 4, 4, 128) if small else (224, 16, 12, 6, 384)
    model = transformer(side, patch, layers, heads, width, 4 * width, num_classes=CLASSES)
    # It starts at zero, so that the other layers would have no gradient.
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return _images(model, count, 3, side)


def _bert(count: int, *, small: bool) -> Case:
    """BERT-base (Devlin et al. 2019) for a class of each text; a small one has 2 layers of 128."""
    transformers: Any = import_module("transformers")
    layers, heads, width = (2, 2, 128) if small else (12, 12, 768)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width}
    config = transformers.BertConfig(intermediate_size=4 * width, num_labels=CLASSES, **sizes)
    return _texts(transformers.BertForSequenceClassification(config), count, config.vocab_size)


def _gpt2_lora(count: int, *, small: bool) -> Case:
    """GPT-2 (Radford et al. 2019) with LoRA of rank 8 in its attention; a small one has 2 layers of
    128."""
    transformers: Any = import_module("transformers")
    layers, heads, width = (2, 2, 128) if small else (12, 12, 768)
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width}
    config = transformers.GPT2Config(num_labels=CLASSES, pad_token_id=0, **sizes)
    return _texts(
        lora(transformers.GPT2ForSequenceClassification(config)), count, config.vocab_size
    )


def _texts(model: nn.Module, count: int, vocabulary: int) -> Case:
    tokens = torch.randint(1, vocabulary, (count, TOKENS))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return Case(model.train(), inputs, torch.randint(CLASSES, (count,)), of_logits)
