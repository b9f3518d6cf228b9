"""A language model before any training, and plays to train it on: python examples/text/play.py
PLAYS.txt FOLDER

FOLDER then holds gpt2 (GPT-2's architecture with two layers, random weights, and a token for each
character) and plays: pieces of 80 characters of each role's speeches, whose owner is the role. A
fifth of each role's speeches is public."""

import csv
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from discreet.data.text import ALPHABET, read_speeches

PIECE, SEED = 80, 40231
DESCRIPTION = """format = "csv"
file = "train.csv"
test = "test.csv"
text = "text"
max_tokens = 81
model = "hf:../gpt2"
next_token = true
owner = "role"
ids = "exact"  # All and ALL are two roles
"""


def write_model(folder: Path) -> None:
    known = {token: number for number, token in enumerate(("[END]", "[UNK]", *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[END]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(SEED)
    sizes = {"vocab_size": len(known), "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)


def write_plays(text: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[list[str]]] = {"train": [], "test": []}
    for role, speeches in sorted(read_speeches(text).items()):
        kept = len(speeches) - len(speeches) // 5
        for part, said in (
            ("train", "\n".join(speeches[:kept])),
            ("test", "\n".join(speeches[kept:])),
        ):
            parts[part] += [
                [role, said[start : start + PIECE]] for start in range(0, len(said), PIECE)
            ]
    for part, rows in parts.items():
        with (folder / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
            # The public pieces name no role: nobody in them is protected there.
            first = 0 if part == "train" else 1
            csv.writer(file).writerows(row[first:] for row in [["role", "text"], *rows])
    (folder / "data.toml").write_text(DESCRIPTION)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    write_model(Path(sys.argv[2]) / "gpt2")
    write_plays(Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2]) / "plays")
