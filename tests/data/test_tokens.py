"""Texts become tokens, or windows of characters: from each kind of file the same, and errors hold
no text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import csv, parquet

from discreet.data.datasets import load_task
from discreet.data.examples import Task
from discreet.data.folder import load_folder
from discreet.data.targets import FolderError
from discreet.data.text import ALPHABET, STRIDE, WINDOW, character_numbers, tokenizer_in
from tests.tiny_transformers import write_bert, write_gpt2, write_texts


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def contents(task: Task) -> list[torch.Tensor]:
    return [task.train.inputs, task.train.targets, task.owners]


def test_csv_parquet_and_json_lines_give_the_same_tokens_targets_and_owners(
    bert: Path, tmp_path: Path
) -> None:
    folder = write_texts(tmp_path, bert)
    as_csv, text = load_folder(str(folder)), (folder / "data.toml").read_text()
    table = csv.read_csv(folder / "train.csv")
    parquet.write_table(table, folder / "train.parquet")
    (folder / "train.jsonl").write_text(table.to_pandas().to_json(orient="records", lines=True))
    for kind in ("parquet", "jsonl"):
        named = text.replace('"csv"', f'"{kind}"').replace("train.csv", f"train.{kind}")
        (folder / "data.toml").write_text(named.replace('test = "test.csv"', ""))
        found = load_folder(str(folder))
        for one, other in zip(contents(found), contents(as_csv), strict=True):
            assert torch.equal(one, other)
    assert (as_csv.shape.input_shape, as_csv.shape.num_tokens, as_csv.shape.num_classes) == (
        (8,),
        17,
        3,
    )


def test_a_text_is_framed_cut_and_padded_as_its_tokenizer_says(bert: Path, tmp_path: Path) -> None:
    folder = write_texts(tmp_path, bert)
    long = " ".join(["day"] * 20)
    (folder / "train.csv").write_text(
        f'person,sentiment,text\nann,positive,"the film\nwas '
        f'good"\nben,negative,\nbob,negative,{long}\n'
    )
    words = load_folder(str(folder)).train.inputs
    assert words.tolist() == [
        [2, 13, 16, 15, 10, 3, 0, 0],  # a line may end within a text
        [2, 3, 0, 0, 0, 0, 0, 0],
        [2, 14, 14, 14, 14, 14, 14, 3],
    ]


def test_the_end_of_a_text_is_a_target_and_what_follows_it_is_none(tmp_path: Path) -> None:
    # GPT-2's tokenizer has no padding, so that the same token ends a text and fills the row.
    folder = write_texts(
        tmp_path / "data", write_gpt2(tmp_path / "gpt2"), lines="next_token = true\n"
    )
    (folder / "train.csv").write_text("person,text\nann,the day was bad\n")
    train = load_folder(str(folder)).train
    assert train.inputs.tolist() == [[13, 14, 15, 4, 3, 3, 3]]
    assert train.targets.tolist() == [[14, 15, 4, 3, -100, -100, -100]]


WRONG = [
    ("max_tokens = 8", "", "text and max_tokens must be given together"),
    ("max_tokens = 8", "max_tokens = 8\ntokens = 9", "text can.t be combined with tokens"),
    ('model = "hf:', 'model = "', 'text needs model = "hf:FOLDER", whose tokenizer reads it'),
    ('text = "text"', 'text = "words"', "has no column or array words"),
]


def test_a_description_that_does_not_fit_texts_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = write_texts(tmp_path, bert)
    text = (folder / "data.toml").read_text()
    for right, wrong, said in WRONG:
        assert right in text
        (folder / "data.toml").write_text(text.replace(right, wrong))
        with pytest.raises(FolderError, match=said):
            load_folder(str(folder))


def test_a_row_that_is_no_text_is_named_by_its_place_alone(bert: Path, tmp_path: Path) -> None:
    folder = write_texts(tmp_path, bert)
    text = (
        (folder / "data.toml")
        .read_text()
        .replace('"csv"', '"jsonl"')
        .replace('test = "test.csv"', "")
    )
    (folder / "data.toml").write_text(text)
    (folder / "train.csv").write_text(
        '{"person": "a", "sentiment": "negative", "text": "HIV"}\n{"person": "b", "sentiment": '
        '"negative"}\n'
    )
    with pytest.raises(FolderError, match=r"row 1: the text is missing$"):
        load_folder(str(folder))


def decode(tokens: torch.Tensor) -> str:
    return "".join("_?"[token] if token < 2 else ALPHABET[token - 2] for token in tokens.tolist())


def write_play(file: Path, speeches: list[tuple[str, str]], mark: str = ":") -> str:
    file.write_text("\n\n".join(f"{name}{mark}\n{speech}" for name, speech in speeches))
    return str(file)


def test_a_window_holds_the_characters_before_its_target(tmp_path: Path) -> None:
    line = "".join(chr(33 + i % 90) for i in range(200))
    path = write_play(tmp_path / "play", [("ANNA", line), *[("BEN", "word")] * 5])
    train = load_task("shakespeare", path=path).train
    for row in (0, 1, 12, 24):
        where = row * STRIDE
        assert decode(train.inputs[row]) == line[max(0, where - WINDOW) : where].rjust(WINDOW, "_")
        assert decode(train.targets[row : row + 1]) == line[where]


def test_the_last_fifth_of_a_roles_speeches_is_the_test_set(tmp_path: Path) -> None:
    speeches = [("ANNA", letter * 20) for letter in "abcdefghij"] + [("BEN", "x" * 20)] * 4
    task = load_task("shakespeare", path=write_play(tmp_path / "play", speeches))
    assert set(decode(task.test.inputs.flatten())) <= set("_ij\n")
    assert not set("ij") & set(decode(task.train.inputs.flatten()))
    # no window crosses from one role to another
    ben = task.train.subset(torch.nonzero(task.owners == 1)[:, 0])
    assert set(decode(ben.inputs.flatten())) | set(decode(ben.targets)) == {"x", "_", "\n"}
    assert decode(character_numbers("caf\u00e9 \U0001f600\tz")) == "caf? ??z"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[5]", b"\xff\xfe{"])
def test_a_damaged_file_of_a_tokenizer_is_told_in_one_line(
    name: str, content: bytes, bert: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(bert, weights)
    (weights / name).write_bytes(content)
    tokenizer_in.cache_clear()
    with pytest.raises(FolderError) as error:
        load_folder(str(write_texts(tmp_path, weights)))
    assert str(weights) in str(error.value)
    assert "\n" not in str(error.value)


ALIKE = [("12", "13"), ("true", "false"), ("2020-01-01", "2021-02-03"), ("12:00:00", "13:00:00")]


@pytest.mark.parametrize("texts", ALIKE, ids=lambda texts: texts[0])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_texts_that_all_look_like_numbers_or_dates_are_texts(
    form: str, texts: tuple[str, str], bert: Path, tmp_path: Path
) -> None:
    folder = write_texts(tmp_path, bert)
    described = (folder / "data.toml").read_text().replace('"csv"', f'"{form}"')
    described = described.replace("train.csv", f"train.{form}").replace('test = "test.csv"', "")
    (folder / "data.toml").write_text(described)
    found = []
    for more in ([], ["good"]):
        table = pyarrow.table(
            {
                "person": ["ann", "ben", "bob"][: 2 + len(more)],
                "sentiment": ["positive", "negative", "negative"][: 2 + len(more)],
                "text": [*texts, *more],
            }
        )
        csv.write_csv(table, folder / "train.csv")
        lines = table.to_pandas().to_json(orient="records", lines=True)
        (folder / "train.jsonl").write_text(lines)
        found.append(load_folder(str(folder)).train.inputs[:2].tolist())
    assert found[0] == found[1]
