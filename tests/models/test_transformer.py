"""Pretrained transformers from a folder: what is trained and sent, what peft loads back, and what
is never fetched."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from discreet.data.datasets import load_task
from discreet.data.examples import Task
from discreet.models.models import frozen, frozen_digest, model_for
from discreet.models.transformer import transformer
from discreet.node import nodes
from discreet.node.account import Refused
from discreet.node.nodes import node_client, virtual_client
from discreet.node.work import work_of
from discreet.per_example.objective import trainable
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.protocol.messages import MalformedMessage, TrainRequest, VirtualClient
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.server.model_check import check_fits
from discreet.settings.rules import ConfigError
from discreet.settings.settings import client_settings
from discreet.settings.training import LoraConfig, ModelConfig
from discreet.simulation.in_process import simulate
from tests.command import predict
from tests.node.clients import clipped, received, request
from tests.tiny_transformers import write_bert, write_gpt2, write_texts

FOLDERS = {
    "bert": write_bert,
    "pooled": lambda folder: write_bert(folder, pooled=True),
    "gpt2": write_gpt2,
}
ADAPTED = LoraConfig("lora", rank=4), LoraConfig("ffa", rank=4)
QUICK = (
    "privacy.user.noise_multiplier=0.1",
    "privacy.user.target_epsilon=null",
    "sampling.kind=everyone",
    "seed=31013",
)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return {name: write(folder / name) for name, write in FOLDERS.items()}


@pytest.fixture(scope="module")
def tasks(weights: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    folder = tmp_path_factory.mktemp("texts")
    found = {
        name: load_task("folder", path=str(write_texts(folder / name, weights[name])))
        for name in weights
    }
    language = write_texts(folder / "language", weights["gpt2"], lines="next_token = true\n")
    return found | {"language": load_task("folder", path=str(language))}


def settings_of(path: Path, lora: LoraConfig = ADAPTED[0]) -> ModelConfig:
    return ModelConfig(f"hf:{path}", lora=lora)


@pytest.mark.parametrize("lora", [LoraConfig(), *ADAPTED], ids=lambda lora: lora.kind)
@pytest.mark.parametrize("kind", FOLDERS)
def test_clipped_sums_of_a_transformer_equal_a_loop_of_single_backward_passes(
    kind: str, lora: LoraConfig, weights: dict[str, Path], tasks: dict[str, Task]
) -> None:
    check_fits(settings_of(weights[kind], lora), tasks[kind])
    model = model_for(settings_of(weights[kind], lora), tasks[kind].shape, seed=11)
    some = tasks[kind].train.subset(torch.arange(6))
    for value in trainable(model):
        torch.nn.init.normal_(value, std=0.1)  # beside a B of zeros A has no gradient
    total, _ = clipped_gradient_sum(model, some.inputs, targets=some.targets, clip_norm=0.5)
    losses = [
        cross_entropy(model(some.inputs[[row]]), some.targets[[row]]) for row in range(len(some))
    ]
    each = [
        torch.autograd.grad(loss, trainable(model), allow_unused=True, materialize_grads=True)
        for loss in losses
    ]
    wanted = clipped([torch.cat([part.reshape(-1) for part in gradient]) for gradient in each], 0.5)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", ADAPTED, ids=lambda lora: lora.kind)
def test_what_learns_is_small_and_all_else_is_the_same_wherever_it_is_built(
    lora: LoraConfig, weights: dict[str, Path], tasks: dict[str, Task]
) -> None:
    one, other = (
        model_for(settings_of(weights["bert"], lora), tasks["bert"].shape, seed=seed)
        for seed in (3, 4)
    )
    assert frozen_digest(one) == frozen_digest(other) != ""
    pairs = 4 * (16 * 4)  # query and value of two layers, hidden size 16, rank 4
    assert (
        sum(value.numel() for value in trainable(one))
        == pairs * (2 if lora.kind == "lora" else 1) + 3 * 16 + 3
    )
    assert any("lora_A" in name for name in frozen(one)) == (lora.kind == "ffa")


def test_beside_low_rank_matrices_every_layer_learns_that_the_folder_does_not_have(
    weights: dict[str, Path], tasks: dict[str, Task], tmp_path: Path
) -> None:
    from transformers import DistilBertConfig, DistilBertModel

    folder = tmp_path / "distilbert"
    shutil.copytree(weights["bert"], folder)
    DistilBertModel(
        DistilBertConfig(vocab_size=17, dim=16, hidden_dim=32, n_layers=1, n_heads=2)
    ).save_pretrained(folder)
    model = model_for(settings_of(folder, LoraConfig("lora")), tasks["bert"].shape, seed=3)
    learns = [name for name, value in model.named_parameters() if value.requires_grad]
    assert {name for name in learns if "lora" not in name} == {
        f"body.base_model.model.{layer}.modules_to_save.default.{part}"
        for layer in ("pre_classifier", "classifier")
        for part in ("weight", "bias")
    }
    assert any("lora" in name for name in learns)


def words_of(kind: str, weights: dict[str, Path], folder: Path) -> list[str]:
    data = write_texts(folder / "data", weights[kind])
    named = [
        f"model.name=hf:{weights[kind]}",
        "data.name=folder",
        f"data.path={data}",
        "data.partition=natural",
    ]
    return [*named, "data.num_clients=12", "rounds=2", "training.learning_rate=2", *QUICK]


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # of peft, for transformers 6
@pytest.mark.parametrize(("kind", "lora"), [("bert", "ffa"), ("pooled", "lora"), ("gpt2", "lora")])
def test_peft_loads_the_adapter_of_a_run_and_rates_as_the_run_did(
    kind: str,
    lora: str,
    weights: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import peft
    from transformers import AutoModelForSequenceClassification

    run = tmp_path / "run"
    simulate(
        *load_asked(
            [*words_of(kind, weights, tmp_path), f"model.lora.kind={lora}", f"output_dir={run}"]
        )
    )
    (first, last), task = (
        RunFolder(run).read_metrics(),
        load_task("folder", path=str(tmp_path / "data")),
    )
    assert predict([str(run), "--data", str(tmp_path / "data" / "test.csv")]) == 0
    assert f"accuracy {last['accuracy']:.4f}" in capsys.readouterr().out
    if kind == "pooled":
        base = transformer(settings_of(weights[kind], LoraConfig()), task.shape)
    else:
        base = AutoModelForSequenceClassification.from_pretrained(
            weights[kind], num_labels=3, pad_token_id=3
        )
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()  # type: ignore[arg-type]
    counted = (task.test.inputs != (3 if kind == "gpt2" else 0)).long()
    with torch.no_grad():
        said = (
            adapted(task.test.inputs)
            if kind == "pooled"
            else adapted(input_ids=task.test.inputs, attention_mask=counted).logits
        )
    loss = cross_entropy(said, task.test.targets)
    assert float((said.argmax(1) == task.test.targets).float().mean()) == pytest.approx(
        last["accuracy"], abs=1e-6
    )
    assert float(loss) == pytest.approx(last["loss"], abs=1e-5)
    assert abs(last["loss"] - first["loss"]) > 1e-4  # what was learned is in it


def test_a_language_model_goes_on_with_texts_and_padding_is_no_target(
    weights: dict[str, Path], tasks: dict[str, Task]
) -> None:
    task, settings = tasks["language"], settings_of(weights["gpt2"])
    check_fits(settings, task)
    outputs = model_for(settings, task.shape, seed=1)(task.train.inputs[:3])
    assert outputs.shape == (3, 17, 7)
    following = task.train.targets[task.train.targets != -100]
    assert 0 < len(following) < task.train.targets.numel()
    later = task.train.inputs[:3].clone()
    later[:, 5:] = 9
    again = model_for(settings, task.shape, seed=1)(later)
    torch.testing.assert_close(outputs[:, :, :5], again[:, :, :5])


def test_a_node_takes_the_weights_beside_its_own_data_and_none_with_other_values(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    nodes.model_of.cache_clear()
    words = words_of("bert", weights, tmp_path)
    run = load_config([*words, "model.lora.kind=ffa", "privacy.user.enabled=false"])
    model = model_for(run.model, load_task("folder", path=run.data.path).shape, seed=5)
    there = write_texts(tmp_path / "node", weights["bert"], count=30)
    sent = replace(request(run), frozen=frozen_digest(model))
    params = torch.cat([value.detach().reshape(-1) for value in trainable(model)])
    asked = received(sent, {"data": str(there)})
    client = node_client(asked, {"data": str(there)})
    assert client.answer(asked, params).update.shape == params.shape
    other = tmp_path / "other"
    shutil.copytree(weights["bert"], other)
    _change(other)
    with pytest.raises(
        MalformedMessage, match=r"the frozen values of the model hf: are not the server's"
    ):
        node_client(asked, {"data": str(write_texts(tmp_path / "strange", other))}).answer(
            asked, params
        )
    virtual = TrainRequest(
        1, 0.3, client_settings(run), VirtualClient(3, "", data_path=run.data.path)
    )
    assert frozen_digest(virtual_client(work_of(virtual)).model) == frozen_digest(model)


def _change(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    values = load_file(folder / "model.safetensors")
    name = min(values)
    save_file(
        values | {name: values[name] + 1}, folder / "model.safetensors", metadata={"format": "pt"}
    )


def test_a_node_whose_owner_names_no_transformer_loads_none(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    run = load_config([*words_of("bert", weights, tmp_path), "privacy.user.enabled=false"])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "data.toml").write_text('format = "csv"\nfile = "a.csv"\ntarget = "y"\n')
    with pytest.raises(Refused, match=r"model\.name=hf: is not the model that this node's"):
        received(request(run), {"data": str(tmp_path / "own")})


def test_missing_weights_and_those_of_other_data_are_an_error_that_names_the_setting(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    words = words_of("bert", weights, tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"model\.name: hf:/nowhere: /nowhere/config\.json is missing; models are never",
    ):
        simulate(*load_asked([*words, "model.name=hf:/nowhere"]))
    with pytest.raises(
        ConfigError, match=r"model\.name: hf:.*pooled must be the model of data\.toml"
    ):
        simulate(*load_asked([*words, f"model.name=hf:{weights['pooled']}"]))
    write_texts(tmp_path / "data", tmp_path / "gone")
    with pytest.raises(
        ConfigError, match=r"model in data\.toml: hf:.*gone: .*config\.json is missing"
    ):
        simulate(*load_asked(words))
    write_texts(tmp_path / "data", weights["bert"])
    with pytest.raises(
        ConfigError, match=r"model\.lora\.targets: no_such_layer fits no layer of this bert"
    ):
        simulate(*load_asked([*words, "model.lora.kind=lora", "model.lora.targets=no_such_layer"]))


def test_code_in_a_folder_is_never_run(
    weights: dict[str, Path], tasks: dict[str, Task], tmp_path: Path
) -> None:
    folder = tmp_path / "code"
    shutil.copytree(weights["bert"], folder)
    (folder / "own.py").write_text("raise AssertionError('it ran')")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="contains custom code"):
        model_for(settings_of(folder), tasks["bert"].shape, seed=1)
