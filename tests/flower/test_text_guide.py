"""The guide to fine-tuning and its examples, run with a tiny transformer in place of the one that
is fetched."""

from __future__ import annotations

import difflib
import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from flwr.app import Context, Message, RecordDict

from discreet.run_files.run_folder import RunFolder
from examples.text import fetch
from tests.command import predict, simulate
from tests.flower.flower_apps import Nodes
from tests.test_docs import commands
from tests.tiny_transformers import write_bert, write_texts

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
GUIDE, TEXT = ROOT / "docs" / "guide" / "text.md", ROOT / "examples" / "text"
LINES = ("Good day.", "Who is there?", "It is I.", "Come in, then.", "Good night.")
SMALL = {
    "data.num_clients=299": "data.num_clients=2",
    "data.num_clients=3435": "data.num_clients=12",
    "[45]": "[01]",
}
# for transformers 6
of_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)[0]  # type: ignore[no-any-return]


def test_the_guide_shows_the_description_and_the_difference_as_they_are() -> None:
    assert tomllib.loads(block("toml")) == tomllib.loads(fetch.DESCRIPTION)
    before, after = (
        (TEXT / "app" / "text_app" / f"server_app{name}.py").read_text()
        for name in ("", "_private")
    )
    changed = [
        line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"
    ]
    assert sorted(line.replace(" ", "") for line in changed) == sorted(
        line.replace(" ", "") for line in block("diff").splitlines()
    )
    assert len(changed) == 10


def test_the_commands_of_the_guide_train_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = importlib.import_module("examples.text.play")
    monkeypatch.chdir(ROOT)
    write_texts(tmp_path / "tweets", write_bert(tmp_path / "minilm", pooled=True))
    play.write_model(tmp_path / "gpt2")
    play.write_plays(
        "".join(f"{role}:\n{line}\n\n" for line in LINES for role in ("ANNA", "BEN")),
        tmp_path / "plays",
    )
    verbs = {"simulate": simulate, "predict": predict}
    lines = [words for words in commands(GUIDE) if words[0] == "discreet"]
    assert [words[1] for words in lines] == ["simulate", "predict", "simulate", "simulate"]
    for _, verb, *words in lines:
        here = [word.replace("texts/", f"{tmp_path}/") for word in words]
        for shown, small in SMALL.items():
            here = [word.replace(shown, small) for word in here]
        quick = ["rounds=1", "seed=31013"] + ["training.batch_size=100"] * (
            "experiment=tweets_one_silo" in words
        )
        assert verbs[verb](here + quick * (verb == "simulate")) == 0
    assert (
        (tmp_path / "said.csv").read_text().startswith("row,target,prediction,probability_negative")
    )
    assert (tmp_path / "adapted" / "adapter" / "adapter_model.safetensors").exists()
    assert RunFolder(tmp_path / "head").load_checkpoint().params.shape == (3 * 16 + 3,)  # type: ignore[union-attr]


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TEXT / "app")
    return importlib.import_module("text_app.client_app")


@of_peft
def test_the_private_flower_app_learns_and_peft_loads_what_it_leaves(
    app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    server = importlib.import_module("text_app.server_app_private")
    weights = write_bert(tmp_path / "weights")
    texts = write_texts(tmp_path / "texts", weights)
    monkeypatch.chdir(tmp_path)
    run = {
        "num-server-rounds": 2,
        "fraction-train": 0.5,
        "weights": str(weights),
        "texts": str(texts),
    }

    def answer(number: int, message: Message) -> RecordDict:
        place = {"partition-id": number, "num-partitions": 4}
        return app.app(message, Context(1, number, place, RecordDict(), run)).content  # type: ignore[no-any-return]

    nodes = Nodes(
        {number + 1: lambda message, number=number: answer(number, message) for number in range(4)}
    )
    server.app(nodes, Context(1, 0, {}, RecordDict(), run))
    base = AutoModelForSequenceClassification.from_pretrained(weights, num_labels=3)
    assert PeftModel.from_pretrained(base, "adapter").num_parameters() > 0
    (ledger,) = tmp_path.rglob("ledger.db")
    assert ledger.stat().st_size > 0


@of_peft
def test_the_loop_ends_at_its_epsilon(
    app: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = importlib.import_module("examples.text.loop")
    weights = write_bert(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    loop.main(str(weights), str(write_texts(tmp_path / "texts", weights)))
    assert re.fullmatch(
        r"epsilon [78]\.\d+ at delta 1e-5, other texts right 0\.\d+\n", capsys.readouterr().out
    )
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
