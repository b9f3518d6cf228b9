"""Each script of examples/dpsgd runs, as a program of its own, and ends at the epsilon that it
asked for."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from discreet import DPSGD, LoopPrivacy
from tests.conftest import REPOSITORY

DPSGD_EXAMPLES = REPOSITORY / "examples" / "dpsgd"
RECIPES = {  # what the last line says, and the package that the script needs beside Discreet's own
    "train": (r"epsilon 3\.000 at delta 1e-4, accuracy on 297 other images (0\.[6-9]\d*)", None),
    "two_processes": (
        r"epsilon 3\.000 at delta 1e-4, accuracy on 297 other images (0\.[6-9]\d*)",
        None,
    ),
    "lightning_module": (
        r"epsilon 3\.000 at delta 1e-4, 60 steps, other images right 0\.[6-9]\d*",
        "lightning",
    ),
    "transformers_trainer": (
        r"epsilon 8\.000 at delta 1e-4, 60 steps, other texts right 0\.\d*",
        "transformers",
    ),
}


def test_every_script_is_a_recipe() -> None:
    assert {path.stem for path in DPSGD_EXAMPLES.glob("*.py")} == RECIPES.keys()


def test_each_setting_on_the_page_for_opacus_is_one_of_ours() -> None:
    ours = re.findall(
        r"^\|[^|]*\|([^|]*)\|",
        (REPOSITORY / "docs" / "guide" / "opacus.md").read_text(),
        re.MULTILINE,
    )
    named = {name for text in ours for name in re.findall(r"(\w+)=", text)}
    known = inspect.signature(DPSGD).parameters.keys() | {
        field.name for field in fields(LoopPrivacy)
    }
    assert named - known == {"reduction"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_ends_at_its_epsilon(name: str) -> None:
    said, package = RECIPES[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}, which Discreet does not install")
    words = [sys.executable, str(DPSGD_EXAMPLES / f"{name}.py")]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch(said, ran.stdout.splitlines()[-1])


@pytest.fixture
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of a recipe; skips if its package is missing."""
    pytest.importorskip(RECIPES[request.param][1] or "torch")
    monkeypatch.syspath_prepend(str(DPSGD_EXAMPLES))
    yield importlib.import_module(request.param)
    sys.modules.pop(request.param)


def trainer(
    recipe: Any, folder: Path, *, most: int | None = None, **changed: Any
) -> tuple[DPSGD, Any]:
    """A Trainer of 12 steps with a checkpoint after each fourth one."""
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    model = recipe.BertForSequenceClassification(
        recipe.BertConfig(vocab_size=50, num_labels=2, **sizes)
    )
    loader = DataLoader(recipe.texts(60, seed=31), batch_size=20, collate_fn=recipe.without_labels)
    privacy = LoopPrivacy(noise_multiplier=1.0, max_physical_batch=most)
    private = DPSGD(model, [], loader, steps=12, delta=1e-3, loss=recipe.loss, privacy=privacy)
    usual = {
        "max_steps": 12,
        "max_grad_norm": 0.0,
        "save_steps": 4,
        "report_to": "none",
        "use_cpu": True,
    }
    settings = recipe.TrainingArguments(str(folder), **usual | {"disable_tqdm": True} | changed)
    return private, recipe.PrivateTrainer(
        private, model=model, args=settings, train_dataset=loader.dataset
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["transformers_trainer"], indirect=True)
def test_a_trainer_that_resumes_says_the_epsilon_of_all_steps_or_refuses(
    recipe: Any, tmp_path: Path
) -> None:
    whole, first = trainer(recipe, tmp_path)
    first.train()
    again, second = trainer(recipe, tmp_path)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert (second.state.global_step, again.steps_taken, again.epsilon()) == (
        12,
        12,
        whole.epsilon(),
    )
    (tmp_path / "checkpoint-8" / "private.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"private\.pt"):
        trainer(recipe, tmp_path)[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["transformers_trainer"], indirect=True)
def test_a_trainer_takes_all_steps_of_batches_in_pieces(recipe: Any, tmp_path: Path) -> None:
    private, pieces = trainer(recipe, tmp_path, most=7, save_strategy="no")
    pieces.train()
    assert (pieces.state.global_step, private.steps_taken) == (12, 12)
    with pytest.raises(
        ValueError, match=r"gradient_accumulation_steps: give LoopPrivacy\(max_physical_batch"
    ):
        trainer(recipe, tmp_path, gradient_accumulation_steps=2)


QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def lightning_run(
    recipe: Any, folder: Path, *, resume: str | None = None, **changed: Any
) -> tuple[Any, Any]:
    """The recipe's module after some steps, two of them an epoch, with a checkpoint after each
    step."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = recipe.Digits(TensorDataset(torch.zeros(400, 64), torch.arange(400) % 10))
    each = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    run = recipe.lightning.Trainer(
        **QUIET, default_root_dir=folder, callbacks=[each], **{"max_epochs": 3} | changed
    )
    run.fit(module, ckpt_path=resume and str(folder / resume), weights_only=False)
    return module.private, run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning about its own defaults
@pytest.mark.parametrize("recipe", ["lightning_module"], indirect=True)
def test_lightning_counts_the_steps_and_goes_on_from_a_checkpoint_amid_an_epoch(
    recipe: Any, tmp_path: Path
) -> None:
    private, run = lightning_run(recipe, tmp_path, max_steps=3)
    assert (private.steps_taken, run.global_step) == (3, 3)
    again, run = lightning_run(recipe, tmp_path, resume="step=3.ckpt")
    assert (again.steps_taken, run.global_step) == (6, 6)
    recipe.Digits.on_load_checkpoint = lambda *_: None
    with pytest.raises(RuntimeError, match=r"steps .*DPSGD knows nothing"):
        lightning_run(recipe, tmp_path, resume="step=3.ckpt")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["lightning_module"], indirect=True)
def test_lightning_with_gradient_accumulation_is_told_of_pieces(
    recipe: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"accumulate_grad_batches: give LoopPrivacy\(max_physical_batch"
    ):
        lightning_run(recipe, tmp_path, accumulate_grad_batches=2)
