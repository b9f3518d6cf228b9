"""Tiny transformers with random weights and a tokenizer of a few words, in folders as Hugging Face
lays them out. The libraries are loaded where one is written: every worker of the tests reads this
file, and few of them write one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CLASSES = ("negative", "neutral", "positive")
WORDS = (
    "bad",
    "poor",
    "sad",
    "even",
    "plain",
    "usual",
    "good",
    "fine",
    "glad",
    "the",
    "day",
    "was",
    "film",
)
SEED = 20773


def write_tokenizer(folder: Path, *, frame: bool) -> int:
    """A tokenizer of `WORDS`, which puts a text in a frame of [CLS] and [SEP] or ends it with
    [SEP]; and its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {
        word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS))
    }
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", known["[CLS]"]), ("[SEP]", known["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if frame else "$A [SEP]", special_tokens=special
    )
    names = {"cls_token": "[CLS]", "pad_token": "[PAD]"} if frame else {}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]", **names
    ).save_pretrained(folder)
    return len(known)


def write_bert(folder: Path, *, pooled: bool = False) -> Path:
    """A BERT of two layers; with `pooled` as sentence-transformers lays it out, with mean
    pooling."""
    from transformers import BertConfig, BertModel

    size = write_tokenizer(folder, frame=True)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["initializer_range"] = 0.3  # so that random features tell words apart
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        config = BertConfig(
            vocab_size=size, intermediate_size=32, max_position_embeddings=48, **sizes
        )
        BertModel(config).save_pretrained(folder)
    if pooled:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"pooling_mode_mean_tokens": True})
        )
        parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        written = [
            {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts
        ]
        (folder / "modules.json").write_text(json.dumps(written))
    return folder


def write_gpt2(folder: Path) -> Path:
    """A GPT-2 of one layer, whose tokenizer has no token for padding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = write_tokenizer(folder, frame=False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        config = GPT2Config(
            vocab_size=size, n_positions=48, n_embd=16, n_layer=1, n_head=2, bos_token_id=3
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_texts(folder: Path, weights: Path, *, count: int = 120, lines: str = "") -> Path:
    """A data folder of texts by 12 people, in three classes that one word of each tells; `lines`
    end its data.toml."""
    draws = torch.Generator().manual_seed(SEED)
    rows = ["person,sentiment,text"]
    for number in range(count):
        words = [WORDS[9 + int(n)] for n in torch.randint(4, (1 + number % 5,), generator=draws)]
        words.append(WORDS[3 * (number % 3) + int(torch.randint(3, (1,), generator=draws))])
        rows.append(f'p{number // 3 % 12},{CLASSES[number % 3]},"{" ".join(words)}"')
    folder.mkdir(exist_ok=True)
    (folder / "train.csv").write_text("\n".join(rows))
    # of other people
    (folder / "test.csv").write_text("\n".join([rows[0], *(f"t{row}" for row in rows[-40:])]))
    head = (
        'format = "csv"\nfile = "train.csv"\ntest = "test.csv"\nowner = "person"\ntext = '
        '"text"\nmax_tokens = 8\n'
    )
    lines = lines or f'target = "sentiment"\nclasses = {json.dumps(CLASSES)}\n'
    (folder / "data.toml").write_text(f'{head}model = "hf:{weights}"\n{lines}')
    return folder
