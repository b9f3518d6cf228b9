"""The page "A model that a doctor can read": its commands run in order, on a clinic that bends."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.tables.test_csv_page import shell
from tests.test_docs import commands

pytestmark = pytest.mark.processes

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "guide" / "table_model.md"


def write_clinic(folder: Path, people: int) -> None:
    """A clinic with a U-shape in sodium, and an age that counts with diabetes alone."""
    folder.mkdir()
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (folder / "data.toml").write_text(text)
    for name, seed in (("train", 40127), ("test", 40129)):
        draws = np.random.default_rng(seed)
        sodium, age = draws.normal(140, 7, people), draws.uniform(20, 95, people)
        crp, ill = draws.lognormal(2, 1, people), draws.random(people) < 0.4
        score = ((sodium - 140) / 7) ** 2 + np.where(ill, age - 57, 57 - age) / 15 - 1.5
        back = draws.random(people) < 1 / (1 + np.exp(-score))
        rows = ["patient,sodium,crp,age,diabetes,returns"]
        for row in range(people):
            words = ["yes" if each else "no" for each in (ill[row], back[row])]
            rows.append(
                f"{name}{row},{sodium[row]:.0f},{crp[row]:.1f},{age[row]:.0f},{','.join(words)}"
            )
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("page")
    write_clinic(folder / "clinic", 400)
    return folder, {
        " ".join(words[1:3]): shell(
            [*words, "seed=40127"] if words[1] == "simulate" else words, folder
        )
        for words in commands(PAGE)
    }


def test_the_plan_has_the_reasons_and_both_runs_learn(walked: tuple[Path, dict[str, str]]) -> None:
    folder, said = walked
    plan = said["plan experiment=table"]
    assert "privacy.user.clip.norm=" in plan
    assert "server.learning_rate=" in plan
    assert "noise alone is expected to move a logit by" in plan
    assert "experiment=table_once is often about as accurate" in plan
    for name in ("clinic", "once"):
        points = np.array(
            json.loads((folder / "outputs" / name / "test_set.json").read_text())["roc"]
        )
        area = float(((points[1:, 1] + points[:-1, 1]) / 2 * np.diff(points[:, 0])).sum())
        assert area > 0.75


def test_the_u_shape_is_seen_above_its_noise_and_the_pair_is_a_map(
    walked: tuple[Path, dict[str, str]],
) -> None:
    folder, _ = walked
    shapes = json.loads((folder / "outputs" / "clinic" / "shapes.json").read_text())["shapes"]
    by_name = {" ".join(each["columns"]): each for each in shapes}
    effect, noise = (np.array(by_name["sodium"][name]) for name in ("effect", "noise"))
    middle = len(effect) // 2
    assert min(effect[8], effect[-8]) - effect[middle] > max(noise[middle], noise[8])
    pair = by_name["age diabetes"]
    assert pair["kind"] == "map"
    corner = {
        tuple(labels): value for labels, value in zip(pair["places"], pair["effect"], strict=True)
    }
    assert corner[100.0, "yes"] > 0 > corner[18.0, "yes"]
    assert "Shape of sodium" in (folder / "outputs" / "clinic" / "report.html").read_text()
    assert (folder / "exported" / "interpret.json").exists()


def test_the_measured_runs_bear_out_what_the_page_says_of_them() -> None:
    with (PAGE.parent.parent / "results" / "tables.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    real = [row for row in rows if row["table"] not in ("ushape", "hospital", "clinic")]
    curves = [row for row in real if row["encoding"] == "three curves a number"]
    assert len({row["table"] for row in curves}) == 10
    assert len(curves) == 40
    for row in curves:
        assert float(row["loss"]) < float(row["loss_of_base_rate"]), row
    (breast,) = (row for row in curves if (row["table"], row["epsilon"]) == ("breast_cancer", "8"))
    page = PAGE.read_text()
    for name in ("loss", "loss_pooled"):
        assert f"{float(breast[name]):.2f}" in page
    once = {
        row["epsilon"]: float(row["auc"])
        for row in rows
        if row["table"] == "heart" and "one round" in row["encoding"]
    }
    assert f"epsilon 8 and 0.5: {once['8']:.2f} and {once['0.5']:.2f}" in " ".join(page.split())
