"""Labels, numbers and classes for each position are learned and predicted, also from tables of
one's own."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.data.datasets import load_task
from discreet.data.targets import SEQUENCES, FolderError, Target
from discreet.node.nodes import node_client
from discreet.node.work import work_of
from discreet.per_example.objective import PADDING
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.command import predict
from tests.node.clients import request
from tests.sequences import GRU, LAYERS, LENGTH, TAGGED, TAGS, TOKENS, folder, rows

SMALL = (
    "rounds=2",
    "data.num_clients=20",
    "training.epochs=1",
    "model.name=linear",
    "seed=40127",
    "operations.predictions=true",
)


def run(folder: Path, *words: str) -> list[dict[str, float | None]]:
    simulate(*load_asked([*SMALL, *words, f"output_dir={folder}"]))
    return RunFolder(folder).read_metrics()


def test_a_step_with_laplace_noise_learns_numbers_too(tmp_path: Path) -> None:
    words = (
        "data.name=diabetes",
        *PLAIN[:2],
        "privacy.local.kind=laplace_step",
        "privacy.local.epsilon=8",
    )
    assert {*run(tmp_path / "run", *words)[-1]} >= {"loss", "r2", "mae"}


def table(folder: Path, description: str, *, seed: int, rows: int = 120) -> Path:
    """A folder with `size` and `age`, from which price, rent and two labels follow."""
    draw = np.random.default_rng(seed)
    for name, count in (("train.csv", rows), ("test.csv", 40)):
        size, age = draw.uniform(20, 120, count), draw.uniform(0, 50, count)
        price = 3 * size - 2 * age + draw.normal(0, 5, count)
        columns = {
            "size": size,
            "age": age,
            "price": price,
            "rent": price / 10,
            "large": size > 70,
            "old": age > 25,
        }
        np.savetxt(
            folder / name,
            np.column_stack([*columns.values()]),
            "%.9g",
            ",",
            header=",".join(columns),
            comments="",
        )
    inputs = 'format = "csv"\nfile = "train.csv"\ntest = "test.csv"\ninputs = ["size", "age"]\n'
    (folder / "data.toml").write_text(f"{inputs}low = [20, 0]\nhigh = [120, 50]\n{description}")
    return folder


PRICE = 'target = "price"\ntarget_low = -100\ntarget_high = 400\n'
PLAIN = (
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
    "sampling.kind=everyone",
    "training.epochs=10",
    "server.momentum=0",
)


def test_a_column_of_numbers_with_a_public_range_is_regression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = table(tmp_path, PRICE, seed=11), tmp_path / "run"
    rows = run(out, "data.name=folder", f"data.path={folder}", *PLAIN, "rounds=5")
    assert (rows[-1]["r2"] or 0) > 0.9
    assert (
        predict([str(out), "--data", str(folder / "test.csv"), "--out", str(tmp_path / "said.csv")])
        == 0
    )
    assert f"r2 {rows[-1]['r2']:.4f}  mae {rows[-1]['mae']:.4f}" in capsys.readouterr().out
    with (tmp_path / "said.csv").open() as file, (folder / "test.csv").open() as truth:
        for said, true in zip(csv.DictReader(file), csv.DictReader(truth), strict=True):
            assert float(said["target_price"]) == pytest.approx(float(true["price"]), rel=1e-4)
            assert abs(float(said["prediction_price"]) - float(true["price"])) < 100


def test_several_columns_are_labels_or_numbers(tmp_path: Path) -> None:
    several = {
        "labels": 'targets = ["large", "old"]\n',
        "numbers": 'targets = ["price", "rent"]\ntarget_low = [-100, -10]\n',
    }
    several["numbers"] += "target_high = [400, 40]\n"
    for kind, description in several.items():
        (tmp_path / kind).mkdir()
        folder, out = table(tmp_path / kind, description, seed=12), tmp_path / kind / "run"
        rows = run(out, "data.name=folder", f"data.path={folder}", *PLAIN)
        assert load_task("folder", path=str(folder)).shape.target.kind == kind
        found = json.loads((out / "indicators.json").read_text())["test"]
        names = {"labels": ("accuracy", "auc"), "numbers": ("r2",)}[kind]
        assert [found[name] for name in names] == pytest.approx([rows[-1][name] for name in names])


WRONG = (
    ('target = "price"\n', "or for numbers target_low and target_high"),
    ('target = "price"\ntarget_low = 3\ntarget_high = 2\n', "target_high must be above target_low"),
    ('target = "price"\ntargets = ["rent"]\n', "target or targets must be given, and not both"),
    ('targets = ["large", "old"]\nnum_classes = 2\n', "can't be combined with targets"),
    (
        'targets = ["price", "rent"]\ntarget_low = [0, 0, 0]\ntarget_high = 1\n',
        "must be one number or 2 of them",
    ),
    ('targets = ["large", "gone"]\n', "has no column or array gone"),
    ('target = "age"\nnum_classes = 2\n', "inputs must not name the target"),
)


def test_what_is_wrong_with_targets_is_said_in_one_line(tmp_path: Path) -> None:
    for description, said in WRONG:
        with pytest.raises(FolderError, match=said) as error:
            load_task("folder", path=str(table(tmp_path, description, seed=13)))
        assert "\n" not in str(error.value)


def test_a_partition_by_classes_of_data_without_classes_is_refused_before_the_start(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"data\.partition: dirichlet needs classes"):
        run(tmp_path / "run", "data.name=diabetes", "data.partition=dirichlet")
    assert not (tmp_path / "run").exists()


ROOT = Path(__file__).resolve().parents[2]
TAGGING = (
    "data.name=folder",
    "data.num_clients=8",
    "data.partition=natural",
    "rounds=2",
    "seed=40127",
)
MORE = ("training.epochs=1", "training.batch_size=8", "sampling.kind=everyone", "server.momentum=0")
USER_OFF = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null")
BY_EXAMPLE = (*USER_OFF, "privacy.example.enabled=true", "privacy.example.noise_multiplier=1")


def words(path: Path, *more: str, model: str = LAYERS) -> list[str]:
    return [
        *TAGGING,
        *MORE,
        f"data.path={path / 'data'}",
        f"model.name={model}",
        f"output_dir={path / 'run'}",
        *more,
    ]


def run_tags(path: Path, *more: str, model: str = LAYERS) -> list[dict[str, float | None]]:
    simulate(*load_asked(words(path, *more, model=model)))
    return RunFolder(path / "run").read_metrics()


def predict_tags(folder: Path, data: Path) -> int:
    """Predicts the test set of `data` by the run in `folder`, into its out.csv."""
    words = [
        str(folder / "run"),
        "--data",
        str(data / "test.npz"),
        "--out",
        str(folder / "out.csv"),
    ]
    return predict(words)


def test_tags_are_learned_and_predicted_at_each_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = folder(tmp_path / "data", count=200)
    plain = (
        *USER_OFF,
        "rounds=12",
        "training.optimizer=adam",
        "training.learning_rate=0.03",
        "training.epochs=3",
    )
    last = run_tags(tmp_path, *plain, "operations.predictions=true")[-1]
    assert (last["accuracy"] or 0) > 0.8
    found = json.loads((tmp_path / "run" / "indicators.json").read_text())["test"]
    assert [found["accuracy"], found["loss"]] == pytest.approx([last["accuracy"], last["loss"]])
    assert predict_tags(tmp_path, data) == 0
    assert f"accuracy {last['accuracy']:.4f}" in capsys.readouterr().out
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "run" / "predictions.csv").read_text()
    _, tags = rows(40, seed=70111 + len("test"))
    said = [*csv.DictReader((tmp_path / "out.csv").read_text().splitlines())]
    shown, given = (
        np.array([[int(row[f"{name}_{place}"] or -1) for place in range(LENGTH)] for row in said])
        for name in ("prediction", "target")
    )
    assert (given == np.where(tags < 0, -1, tags)).all()
    assert (shown == tags)[tags >= 0].mean() == pytest.approx(last["accuracy"])


@pytest.mark.processes  # a whole federation; those of other kinds of tasks stay
def test_the_example_of_the_guide_is_as_the_page_shows_it_and_learns(tmp_path: Path) -> None:
    page, tags = (ROOT / "docs" / "guide" / "models.md").read_text(), ROOT / "examples" / "tags"
    (shown,) = (
        block
        for block in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
        if "padding" in block
    )
    assert tomllib.loads(shown) == tomllib.loads((tags / "data.toml").read_text())
    (line,) = re.findall(
        r"discreet simulate (data.name=folder data.path=examples/tags .*?)output_dir",
        page,
        flags=re.DOTALL,
    )
    asked = [
        word.replace("examples/tags", str(tags), 1) if word.startswith("data.path") else word
        for word in shlex.split(line.replace("\\\n", " "))
    ]
    simulate(*load_asked([*asked, "rounds=8", "seed=7741", f"output_dir={tmp_path / 'run'}"]))
    assert (
        RunFolder(tmp_path / "run").read_metrics()[-1]["accuracy"] or 0
    ) > 0.5  # of the most frequent tag: 0.32


def test_columns_of_words_are_sequences_too(tmp_path: Path) -> None:
    data, classes, targets = (
        tmp_path / "data",
        ["det", "noun", "verb", "end"],
        [f"t{place}" for place in range(LENGTH)],
    )
    data.mkdir()
    for name, count in (("train", 60), ("test", 20)):
        tokens, tags = rows(count, seed=count)
        words = np.column_stack(
            [tokens.astype(str), np.array([*classes, "-"])[np.where(tags < 0, -1, tags)]]
        )
        head = ",".join([*(f"w{place}" for place in range(LENGTH)), *targets])
        np.savetxt(data / f"{name}.csv", words, "%s", ",", header=head, comments="")
    described = f"targets = {targets}\nclasses = {classes}\npadding = '-'\ntokens = {TOKENS}\n"
    (data / "data.toml").write_text(
        f'format = "csv"\nfile = "train.csv"\ntest = "test.csv"\n{described}'
    )
    task = load_task("folder", path=str(data))
    assert (task.shape.target, task.shape.num_classes) == (Target(SEQUENCES, length=LENGTH), TAGS)
    assert torch.equal(task.test.targets, torch.from_numpy(np.where(tags < 0, PADDING, tags)))
    assert run_tags(tmp_path, "data.partition=iid", "rounds=1", "operations.predictions=true")
    (first, *_) = csv.DictReader((tmp_path / "run" / "predictions.csv").read_text().splitlines())
    assert {first[f"prediction_{place}"] for place in range(LENGTH)} <= {*classes}


def test_with_next_token_inputs_are_their_own_targets(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", f"tokens = {TOKENS}\npadding = 0\nnext_token = true\n")
    task, tokens = (
        load_task("folder", path=str(data)),
        torch.from_numpy(rows(120, seed=70111 + len("train"))[0]),
    )
    assert (task.shape.num_classes, task.shape.num_tokens, task.shape.input_shape) == (
        TOKENS,
        TOKENS,
        (LENGTH - 1,),
    )
    assert torch.equal(task.train.inputs, tokens[:, :-1])
    assert torch.equal(task.train.targets, torch.where(tokens[:, 1:] == 0, PADDING, tokens[:, 1:]))
    # The built-in text model gives an output at each position here.
    assert run_tags(tmp_path, "rounds=1", *BY_EXAMPLE, model="lstm")[-1]["accuracy"] is not None
    assert predict_tags(tmp_path, data) == 0
    (head, *_) = (tmp_path / "out.csv").read_text().splitlines()
    assert head.split(",")[-1] == f"prediction_{LENGTH - 2}"


@pytest.mark.parametrize("model", [LAYERS, GRU])
def test_a_node_trains_on_sequences_of_its_own_and_of_its_own_length(
    model: str, tmp_path: Path
) -> None:
    data = folder(tmp_path / "data", TAGGED)
    text = (data / "data.toml").read_text()
    (data / "data.toml").write_text(text.replace(LAYERS, model))
    tokens, tags = rows(20, seed=5, longest=3)
    np.savez(data / "train.npz", inputs=tokens[:, :3], tags=tags[:, :3], who=np.zeros(20))
    run = load_config([*TAGGING, *USER_OFF, f"model.name={model}"])
    client = node_client(work_of(request(run)), {"data": str(data)})
    assert client.examples.targets.shape == (20, 3)
    start = torch.cat([value.detach().flatten() for value in client.model.parameters()])
    asked = request(
        load_config([*TAGGING, *MORE, *USER_OFF, f"model.name={model}"]), clip_norm=math.inf
    )
    found = client.answer(work_of(asked), start).update
    assert found.isfinite().all()
    assert found.any()
