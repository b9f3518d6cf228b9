"""A real node is who its owner says, with its owner's data; a virtual client is who the request
says."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from discreet.data.folder import node_table
from discreet.data.targets import FolderError
from discreet.deployment.node_data import main
from discreet.flower.simulated_nodes import leave_ticket
from discreet.node.account import Refused
from discreet.node.nodes import client_of, node_client, node_examples, share_of, virtual_client
from discreet.node.work import work_of
from discreet.protocol.messages import Assignment, TrainRequest, VirtualClient
from discreet.run_files.compose import load_config
from discreet.settings.settings import Settings
from tests.node.clients import OFF, config, request

DIGITS = ("data.name=digits", "data.num_clients=4", "model.name=logistic_regression")
NODE = {"partition-id": 1, "num-partitions": 4}


def run_of(*words: str) -> Settings:
    return config(*words, *DIGITS)


def named(run: Settings, client: int, folder: Path, number: int = 1) -> TrainRequest:
    """A request for a virtual client that keeps its ledger in a folder."""
    return replace(request(run, number), virtual=VirtualClient(client, str(folder), seed=run.seed))


def test_a_node_draws_secure_noise_whatever_seed_the_request_names() -> None:
    run = run_of(*OFF, "seed=51407")
    node = node_client(work_of(named(run, 3, Path("somewhere"))), NODE)
    assert node.source.is_secure
    assert torch.equal(node.examples.inputs, share_of(run.data, 1).inputs)
    assert not virtual_client(work_of(named(run, 1, Path()))).source.is_secure


NORMALISED = ("data.normalise=public", "normaliser.means=[0.25]", "normaliser.deviations=[0.5]")


@pytest.mark.parametrize("virtual", [False, True], ids=["node", "virtual"])
def test_a_client_trains_and_rates_on_inputs_that_are_normalised_as_the_server_says(
    virtual: bool,
) -> None:
    run = run_of(*NORMALISED, "evaluation.kind=private", "privacy.delta=0.01")
    client = (
        virtual_client(work_of(named(run, 1, Path())))
        if virtual
        else node_client(work_of(request(run)), NODE)
    )
    raw, held = client.examples.inputs * 0.5 + 0.25, client.held_out
    rows = torch.cat([raw, held.inputs * 0.5 + 0.25])
    expected = share_of(run.data, 1).inputs
    assert torch.allclose(
        rows.flatten(1).sort(dim=0).values, expected.flatten(1).sort(dim=0).values, atol=1e-6
    )


ASKED = ("data.normalise=private", "statistics.low=0", "statistics.high=1", "privacy.delta=0.01")


def asks(run: Settings, query: str) -> TrainRequest:
    return replace(request(run), work=Assignment(trains=False, query=query))


@pytest.mark.parametrize(
    ("words", "query"),
    [
        (("data.normalise=public",), "normalise"),
        ((*ASKED, "normaliser.means=[0]", "normaliser.deviations=[1]"), "normalise"),
        (ASKED, "statistics"),
    ],
    ids=["public", "once more", "another question"],
)
def test_a_node_does_not_answer_what_its_run_does_not_ask_and_pay_for(
    words: tuple[str, ...], query: str
) -> None:
    asked = asks(run_of(*words, "privacy.delta=0.01"), query)
    with pytest.raises(Refused, match=f"does not include the query {query} about clients' data"):
        client_of(work_of(asked), NODE).answer(work_of(asked), torch.zeros(0))


def test_a_policy_counts_what_is_asked_of_the_data() -> None:
    owner = NODE | {"min-noise-multiplier": 1.0}
    noise = "privacy.user.noise_multiplier=2", "privacy.user.target_epsilon=null"
    strong, weak = (
        asks(run_of(*ASKED, *noise, f"statistics.noise_multiplier={z}"), "normalise")
        for z in (1, 0.5)
    )
    assert (
        client_of(work_of(strong), owner).answer(work_of(strong), torch.zeros(0)).answer is not None
    )
    with pytest.raises(Refused, match=r"noise multiplier of 1; .*user-level one is 0\.5"):
        client_of(work_of(weak), owner).answer(work_of(weak), torch.zeros(0))


def test_a_ticket_can_be_read_by_its_user_alone_and_is_never_the_same(tmp_path: Path) -> None:
    assert leave_ticket(tmp_path) != leave_ticket(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "node", [{}, {"partition-id": 1}, {"partition-id": "1", "num-partitions": 4}]
)
def test_a_node_that_says_nothing_of_its_data_refuses(node: dict[str, object]) -> None:
    with pytest.raises(Refused, match="node has no data"):
        node_client(work_of(request(run_of(*OFF))), node)
    with pytest.raises(Refused, match=r"one of 5 clients, .*data\.num_clients=4"):
        node_client(work_of(request(run_of(*OFF))), {"partition-id": 1, "num-partitions": 5})


PIXELS = np.arange(3 * 64).reshape(3, 64) % 17
CLASSES = np.array([0, 7, 9])
EXPECTED = torch.from_numpy((PIXELS / 16).astype(np.float32)).reshape(3, 1, 8, 8)
NAMES = [f"p{number}" for number in range(64)]
TASK = 'task = "digits"\n'
SCALE = f"low = 0\nhigh = 16\n{TASK}"


def describe(folder: Path, text: str) -> Path:
    (folder / "data.toml").write_text(text)
    return folder


def csv_folder(
    folder: Path, *, head: str = "", rows: np.ndarray = PIXELS, extra: str = SCALE
) -> Path:
    lines = [head or ",".join([*NAMES, "digit"])]
    lines += [",".join(map(str, [*row, target])) for row, target in zip(rows, CLASSES, strict=True)]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    return describe(folder, f'format = "csv"\nfile = "a.csv"\ntarget = "digit"\n{extra}')


def parquet_folder(folder: Path) -> Path:
    columns = {name: PIXELS[:, number] for number, name in enumerate(NAMES)}
    parquet.write_table(pa.table({"digit": CLASSES, **columns}), folder / "a.parquet")
    return describe(folder, f'format = "parquet"\nfile = "a.parquet"\ntarget = "digit"\n{SCALE}')


def npz_folder(folder: Path) -> Path:
    np.savez(folder / "a.npz", x=PIXELS.reshape(3, 8, 8), y=CLASSES)
    return describe(folder, f'format = "npz"\nfile = "a.npz"\ninputs = "x"\ntarget = "y"\n{SCALE}')


def idx_folder(folder: Path) -> Path:
    def idx(values: np.ndarray) -> bytes:
        head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
        return head + values.astype(np.uint8).tobytes()

    (folder / "images.gz").write_bytes(gzip.compress(idx(PIXELS.reshape(3, 8, 8))))
    (folder / "labels").write_bytes(idx(CLASSES))
    return describe(folder, f'format = "idx"\nfile = "images.gz"\ntarget = "labels"\n{SCALE}')


@pytest.mark.parametrize("make", [csv_folder, parquet_folder, npz_folder, idx_folder])
def test_every_format_gives_the_same_examples(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    examples = node_table(make(tmp_path), "digits")[0]
    torch.testing.assert_close(examples.inputs, EXPECTED)
    assert examples.targets.tolist() == CLASSES.tolist()


WRONG = [
    (lambda folder: folder, "data.toml is missing"),
    (lambda folder: csv_folder(folder, extra="hihg = 1"), "unknown key hihg; did you mean high?"),
    (
        lambda folder: describe(folder, f'format = "csv"\nfile = "../b.csv"\ntarget = "x"\n{TASK}'),
        "must be directly in",
    ),
    (
        lambda folder: csv_folder(folder, extra=f'inputs = ["p0"]\n{TASK}'),
        r"each row has 1 inputs, but the shape \(1, 8, 8\) needs 64",
    ),
    (
        lambda folder: csv_folder(folder, rows=np.where(PIXELS == 3, np.nan, PIXELS)),
        "line 2: p3 is empty",
    ),
    (lambda folder: csv_folder(folder, extra='task = "mnist"'), "declares these data for mnist"),
    (lambda folder: csv_folder(folder, extra=""), 'for folder: with task = "digits" they are for'),
    (
        lambda folder: csv_folder(folder, extra=f'classes = ["a"]\n{TASK}'),
        "line 2: .* is not one of classes: add the class in data.toml",
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(FolderError, match=message):
        node_table(make(tmp_path), "digits")


def test_the_server_does_not_learn_what_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = csv_folder(tmp_path, extra='task = "mnist"')
    with pytest.raises(Refused) as refused:
        node_examples(load_config().data, {"data": str(folder)})
    assert str(refused.value) == "this node's own data do not fit the task digits; its log says why"
    assert "for mnist" in caplog.text


@pytest.mark.parametrize("label", [1, 3])
def test_a_server_that_names_a_task_of_fewer_classes_learns_no_label(
    label: int, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 30)), y=np.array([*range(2)] * 4 + [label]))
    words = 'inputs = "x"\ntarget = "y"\nnum_classes = 5\nlow = 0\nhigh = 1\n'
    describe(tmp_path, f'format = "npz"\nfile = "a.npz"\n{words}')
    assert len(node_examples(load_config(["data.name=folder"]).data, {"data": str(tmp_path)})) == 9
    with pytest.raises(Refused, match="do not fit the task breast_cancer"):
        node_examples(load_config(["data.name=breast_cancer"]).data, {"data": str(tmp_path)})


def test_the_check_can_be_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(csv_folder(tmp_path)), "digits"]) == 0
    assert "3 examples" in capsys.readouterr().out
    assert main([str(tmp_path), "mnist"]) == 2
    assert "declares these data for digits" in capsys.readouterr().err


@pytest.mark.parametrize("index", [(0, 1, 2), (0, 2, 3)])
def test_the_names_of_columns_alone_decide_what_is_an_input(
    index: tuple[int, ...], tmp_path: Path
) -> None:
    """Without a row in the middle its numbers are no longer 0..n-1."""
    rows = np.column_stack([index, PIXELS])
    head = ",".join(["Unnamed: 0", *NAMES, "digit"])
    examples = node_table(csv_folder(tmp_path, head=head, rows=rows), "digits")[0]
    torch.testing.assert_close(examples.inputs, EXPECTED)
