"""Pretrained transformers from a local folder in Hugging Face's layout, for classification of texts
or as language models.

The weights are safetensors; no code from the folder runs, and nothing is downloaded. Dropout is
off, so that a frozen part gives the same features each time. New parts (a head, low-rank matrices)
start from public random numbers, the same wherever the model is built.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from discreet.data.examples import TaskShape
from discreet.data.targets import CLASSES, SEQUENCES
from discreet.data.text import LOCAL, pretrained_folder, tokenizer_in, transformers_library
from discreet.settings.foreign_files import one_line
from discreet.settings.rules import ConfigError
from discreet.settings.training import LoraConfig, ModelConfig

ADAPTER = "adapter"  # folder in a run folder, which peft can load
_PUBLIC_SEED = 60937
_SMALLEST = 1e-12


class Reader(nn.Module):
    """A transformer with a head. It maps token ids (n, length) to logits: (n, classes), or (n,
    tokens, length) for a language model."""

    def __init__(self, body: nn.Module, pad: int, *, at_each_step: bool) -> None:
        super().__init__()
        self.body = body
        self.pad = pad
        self.at_each_step = at_each_step

    def forward(self, tokens: Tensor, **known: Tensor) -> Tensor:
        """The logits. `known`: further arguments of the transformer."""
        logits: Tensor = self.body(
            input_ids=tokens, attention_mask=mask_of(tokens, self.pad), **known
        ).logits
        if self.at_each_step:
            return logits.transpose(1, 2)
        return logits

    @property
    def features(self) -> nn.Module:
        """The base model, without the head."""
        body: Any = self.body
        return Encoder(getattr(body, body.base_model_prefix), self.pad)

    @property
    def head(self) -> nn.Module:
        """The head, which reads rows of `features`."""
        body: Any = copy.copy(self.body)
        base = getattr(body, body.base_model_prefix)
        body._modules = {**body._modules, body.base_model_prefix: Known()}
        reader = Reader(body, self.pad, at_each_step=self.at_each_step)
        return Head(reader, base.config.hidden_size, pooled=_has_pooler(base))


class Encoder(nn.Module):
    """Maps token ids (n, length) to rows (n, k): what the head of a transformer reads of its base
    model (the vector of its pooler, or one of each token), followed by the ids as floats."""

    def __init__(self, base: nn.Module, pad: int) -> None:
        super().__init__()
        self.base = base
        self.pad = pad

    def forward(self, tokens: Tensor) -> Tensor:
        output = self.base(input_ids=tokens, attention_mask=mask_of(tokens, self.pad))
        if _has_pooler(self.base):
            vectors = output.pooler_output
        else:
            vectors = output.last_hidden_state
        return torch.cat([vectors.flatten(1), tokens.float()], 1)


class Known(nn.Module):
    """Stands in for a base model: its output is given as `inputs_embeds`, (n, hidden) of a pooler
    or (n, length, hidden)."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **others: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        if inputs_embeds.dim() == 2:
            hidden = inputs_embeds.unsqueeze(1)
            pooled = inputs_embeds
        else:
            hidden = inputs_embeds
            pooled = None
        return BaseModelOutputWithPoolingAndCrossAttentions(hidden, pooled)


class Head(nn.Module):
    """Maps rows of an `Encoder` to the logits of a `Reader`, whose base model is `Known`."""

    def __init__(self, reader: nn.Module, hidden_size: int, *, pooled: bool) -> None:
        super().__init__()
        self.reader = reader
        self.hidden_size = hidden_size
        self.pooled = pooled

    def forward(self, rows: Tensor) -> Tensor:
        if self.pooled:
            vectors = rows[:, : self.hidden_size]
        else:
            length = rows.shape[1] // (self.hidden_size + 1)
            vectors = rows[:, :-length].reshape(len(rows), length, self.hidden_size)
        tokens = rows[:, vectors[0].numel() :].round().long()
        logits: Tensor = self.reader(tokens, inputs_embeds=vectors)
        return logits


def _has_pooler(base: nn.Module) -> bool:
    return getattr(base, "pooler", None) is not None


class Pooled(nn.Module):
    """Maps token ids (n, length) to a vector for each text, (n, hidden): the mean over tokens that
    are not padding, or the vector of the first token; of length 1 if `normalised`. This is the
    pooling of sentence-transformers (Reimers and Gurevych 2019)."""

    def __init__(self, body: nn.Module, pad: int, *, first: bool, normalised: bool) -> None:
        super().__init__()
        self.body = body
        self.pad = pad
        self.first = first
        self.normalised = normalised

    def forward(self, tokens: Tensor) -> Tensor:
        mask = mask_of(tokens, self.pad)
        hidden: Tensor = self.body(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(2).to(hidden.dtype)
        if self.first:
            found = hidden[:, 0]
        else:
            found = (hidden * weights).sum(1) / weights.sum(1)
        return (
            found / found.norm(dim=1, keepdim=True).clamp_min(_SMALLEST)
            if self.normalised
            else found
        )


def mask_of(tokens: Tensor, pad: int) -> Tensor:
    """1 for a token and 0 for padding, int64. The first position is always 1, as a softmax over
    nothing is undefined."""
    first = torch.arange(tokens.shape[1], device=tokens.device) == 0
    return ((tokens != pad) | first).long()


def transformer(settings: ModelConfig, shape: TaskShape) -> nn.Module:
    """The model in the folder of its name, `hf:FOLDER`, for token ids (n, length): with a new head
    for classes, or as a language model for sequences. A folder of sentence-transformers gets a
    linear head on its own pooling; others get the head that transformers defines for the
    architecture.

    With `model.lora` the folder's weights are frozen, and the head and the low-rank matrices learn.
    Raises ValueError: the folder has no such model, the task is of another kind, or the low-rank
    matrices fit none of its layers.
    """
    name = settings.name
    lora = settings.lora
    if not shape.num_tokens or shape.target.kind not in (CLASSES, SEQUENCES):
        raise ValueError(
            f"model.name: {name} reads text, and predicts one class of it or each next token"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_PUBLIC_SEED)
        return _built(pretrained_folder(name), shape, lora)


def _built(folder: Path, shape: TaskShape, lora: LoraConfig) -> nn.Module:
    library = transformers_library(why="a pretrained transformer")
    pad = tokenizer_in(folder).pad_token_id
    if shape.target.kind == SEQUENCES:
        body = _loaded(library.AutoModelForCausalLM, folder, library)
        return Reader(with_lora(body, lora, kind=body.config.model_type), pad, at_each_step=True)
    pooling = _pooling_of(folder)
    if pooling is not None:
        body = _loaded(library.AutoModel, folder, library)
        # BERT's pooler is not used, and would only get noise.
        body.pooler = None
        head = nn.Linear(body.config.hidden_size, shape.num_outputs)
        parts = OrderedDict[str, nn.Module](features=Pooled(body, pad, **pooling), head=head)
        return with_lora(nn.Sequential(parts), lora, kind=body.config.model_type, saved=["head"])
    sizes = {"num_labels": shape.num_outputs, "pad_token_id": pad}
    body = _loaded(library.AutoModelForSequenceClassification, folder, library, **sizes)
    # All layers outside the pretrained model are new: the head and layers before it.
    saved = [
        name
        for name, part in body.named_children()
        if name != body.base_model_prefix and [*part.parameters()]
    ]
    return Reader(
        with_lora(body, lora, kind=body.config.model_type, saved=saved), pad, at_each_step=False
    )


def _loaded(kind: Any, folder: Path, library: Any, **settings: Any) -> Any:
    """The model in evaluation mode, in float32, without dropout."""
    with one_line(folder, ConfigError, "has no config.json that transformers can read"):
        config = library.AutoConfig.from_pretrained(folder, **LOCAL, **settings)
    for key, value in vars(config).items():
        if isinstance(value, float) and "drop" in key:
            setattr(config, key, 0.0)
    with one_line(folder, ConfigError, "holds no safetensors of such a model"):
        return kind.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, **LOCAL
        )


def _pooling_of(folder: Path) -> dict[str, bool] | None:
    """The pooling that a folder of sentence-transformers describes; None for another folder."""
    if not (folder / "modules.json").is_file():
        return None
    with one_line(folder, ConfigError, "is no folder of sentence-transformers"):
        described = json.loads((folder / "modules.json").read_text())
        parts = {part["type"].rpartition(".")[2]: part["path"] for part in described}
        pooling = json.loads((folder / parts["Pooling"] / "config.json").read_text())
        known = ("mean_tokens", "cls_token")
        kinds = [kind for kind in known if pooling.get(f"pooling_mode_{kind}")]
    if len(kinds) != 1 or not parts.keys() <= {"Transformer", "Pooling", "Normalize"}:
        raise ValueError(
            f"{folder}: of sentence-transformers' parts mean or cls pooling is known, and Normalize"
        )
    return {"first": kinds == ["cls_token"], "normalised": "Normalize" in parts}


def with_lora(
    model: nn.Module, lora: LoraConfig, *, kind: str, saved: list[str] | None = None
) -> nn.Module:
    """The model with low-rank matrices B A beside its linear layers (Hu et al. 2021), by peft;
    unchanged if `lora.kind` is none. B starts at zero. With kind ffa A is frozen, so that the mean
    of updates of B is the update of the product (Sun et al. 2024, arXiv 2403.12313).

    Args:
      kind: the architecture, for peft's choice of layers if there are no `lora.targets`.
      saved: layers that learn in full.
    """
    if lora.kind == "none":
        return model
    import peft
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    layers: str | list[str] = lora.targets or list(USUAL.get(kind, ())) or "all-linear"
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        modules_to_save=saved,
        exclude_modules=saved,
    )
    try:
        with warnings.catch_warnings():
            # Warnings of peft about renamings in transformers 6 and about GPT-2's layers.
            warnings.simplefilter("ignore")
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ValueError(
            f"model.lora.targets: {layers} fits no layer of this {kind}: {error}"
        ) from error
    for name, value in adapted.named_parameters():
        if lora.kind == "ffa" and ".lora_A." in name:
            value.requires_grad_(False)
    return adapted


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Writes the low-rank matrices and the head of a model in peft's format, if it has any."""
    adapted: Any = next((part for part in model.modules() if hasattr(part, "peft_config")), None)
    if adapted is not None:
        adapted.save_pretrained(folder / ADAPTER)
