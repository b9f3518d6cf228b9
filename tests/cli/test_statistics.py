"""`discreet statistics`: a table with standard errors, a file, and a charge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.cli.main import main
from discreet.ledger.durable_ledger import DurableLedger

SMALL = [
    *("data.name=digits", "data.num_clients=30", "seed=40931"),
    *("privacy.user.noise_multiplier=1", "statistics.noise_multiplier=0.01"),
]


def asked(folder: Path, *more: str) -> tuple[int, dict[str, dict[str, dict[str, float]]]]:
    code = main(["statistics", *SMALL, f"output_dir={folder}", *more])
    path = folder / "statistics.json"
    return code, json.loads(path.read_text())["statistics"] if code == 0 else {}


def test_it_prints_and_writes_each_number_with_its_error_and_charges_the_ledger_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(tmp_path / "run")
    assert code == 0
    printed = capsys.readouterr().out
    # Of all pixels of digits, and of the classes, as scikit-learn has them.
    assert found["mean"]["column 1"]["value"] == pytest.approx(0.305, abs=0.01)
    assert found["deviation"]["column 1"]["value"] == pytest.approx(0.376, abs=0.01)
    assert found["share"]["class 3"]["value"] == pytest.approx(0.102, abs=0.01)
    one = found["mean"]["column 1"]
    assert f"{one['value']:.5g}" in printed
    assert f"{one['standard_error']:.2g}" in printed
    assert "the noise protects nobody" in printed
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert spent.entries == ((GaussianDpEvent(0.01), 1),)
    said = json.loads((tmp_path / "run" / "statistics.json").read_text())["privacy"]["epsilon"]
    assert said == pytest.approx(spent.epsilon(1e-3))


WRONG = {
    "needs privacy.user.enabled=true": ["privacy.user.enabled=false"],
    "privacy.example.enabled=false": ["privacy.example.enabled=true", "privacy.example.noise_multiplier=1"],
    "needs sampling.kind=poisson or everyone": ["sampling.kind=fixed", "privacy.accountant=rdp"],
    "a larger statistics.noise_multiplier is needed": ["privacy.user.max_epsilon=0.1"],
}


def test_what_it_can_not_do_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (said, words) in enumerate(WRONG.items()):
        assert asked(tmp_path / str(number), "statistics.noise_multiplier=1", *words)[0] == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
