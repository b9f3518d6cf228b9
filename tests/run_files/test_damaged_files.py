"""Files of a run, or of a node, that somebody has damaged: one line that names the file, and no
claim beyond it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discreet.cli.main import main
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.ledger.rollback_guard import STATE_VARIABLE
from discreet.masking.identity import Directory, IdentityError
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import (
    ASKED,
    CONFIG,
    STATUS,
    RunFolder,
    RunSecrets,
    read_status,
    write_tensors,
)
from discreet.simulation.in_process import simulate
from tests.made_runs import copied

SMALL = ("rounds=1", "data.num_clients=20", "privacy.user.too_noisy=warn")
NESTED = "[" * 50_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("made") / "run"
    simulate(*load_asked([*SMALL, f"output_dir={path}"]))
    return RunFolder(path)


@pytest.fixture
def run(made: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "known"))
    return copied(made, tmp_path / "run")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command refuses."""
    assert main(words) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    return refused


@pytest.mark.parametrize(
    "text", ["0", NESTED, "rounds: " + "x" * 100_000, "x" * 100_000 + ": 1", "{{{", "\xff"]
)
def test_a_damaged_configuration_is_said_in_a_line_that_can_be_read(
    run: RunFolder, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / CONFIG).write_bytes(text.encode("latin-1"))
    for words in (
        ("status", str(run.path)),
        ("simulate", "resume=true", f"output_dir={run.path}", "rounds=2"),
    ):
        refused = said(capsys, *words)
        assert f"{run.path / CONFIG} is damaged: " in refused
        assert len(refused) < 2500


def test_a_configuration_that_can_not_be_read_is_no_run_in_which_nothing_was_spent(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / CONFIG).unlink()
    (run.path / CONFIG).mkdir()
    refused = said(capsys, "simulate", "resume=true", f"output_dir={run.path}", "rounds=2")
    assert refused == f"discreet: {run.path / CONFIG} can't be read: Is a directory\n"


def test_secrets_that_are_another_file_of_the_run_are_refused(
    run: RunFolder, tmp_path: Path
) -> None:
    secrets = RunSecrets(run.path)
    for other in (run.checkpoint_path, run.path / "model.safetensors"):
        shutil.copy(other, secrets.path)
        with pytest.raises(LedgerError, match=r"secrets\.safetensors does not contain"):
            secrets.load()
    kept = {name: torch.zeros(1) for name in ("round", "total", "keys", "replies")}
    write_tensors(secrets.path, kept, {})  # as versions without a mark wrote it
    assert secrets.load().keys() == kept.keys()
    secrets.save({"one": torch.ones(1)})
    assert secrets.load()["one"] == 1


def test_nested_texts_of_other_files_are_damaged_and_no_traceback(
    run: RunFolder, tmp_path: Path
) -> None:
    peers = tmp_path / "peers.json"
    peers.write_text(NESTED)
    with pytest.raises(IdentityError, match=r"peers\.json must be a JSON object"):
        Directory.read(peers)
    (run.path / STATUS).write_text(NESTED)
    assert read_status(run) is None
    state = json.dumps({"round": 1})
    write_tensors(run.checkpoint_path, {}, {"ledgers": NESTED, "state": state})
    with pytest.raises(LedgerError, match="is damaged"):
        run.load_checkpoint()


def cut_page(run: RunFolder) -> None:
    """Cuts the end of the ledger's last page, which SQLite fills up with zeros: no rows."""
    content = run.ledger_path.read_bytes()
    run.ledger_path.write_bytes(content[: len(content) // 4096 * 4096 - 100])


def older_copy(run: RunFolder) -> None:
    """Charges another copy, and puts the older one back."""
    content = run.ledger_path.read_bytes()
    ledger = DurableLedger(run.ledger_path)
    ((event, _),) = ledger.spent("user").entries
    ledger.charge([Charge(2, "user", "", event)])
    run.ledger_path.write_bytes(content)
    for ending in ("-wal", "-shm"):
        run.ledger_path.with_name(f"ledger.db{ending}").unlink(missing_ok=True)


def other_delta(run: RunFolder) -> None:
    text = (run.path / CONFIG).read_text()
    (run.path / CONFIG).write_text(text.replace("delta: 0.001", "delta: 0.01"))


def that_of_another_run(run: RunFolder) -> None:
    """With the same settings, which spent less."""
    other = run.path.with_name("other")
    simulate(*load_asked([*SMALL, f"output_dir={other}"]))
    shutil.copy(other / "ledger.db", run.ledger_path)


@pytest.mark.parametrize("damage", [cut_page, older_copy, other_delta, that_of_another_run])
def test_no_reader_says_less_than_what_was_spent(
    damage: Callable[[RunFolder], None], run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    readers = [("status",), ("report",)] + [("ledger", "show")] * (damage is not other_delta)
    for reader in readers:
        refused = said(capsys, *reader, str(run.path))
        assert refused.startswith(f"discreet: {run.ledger_path} ")
    assert main(["ledger", "verify", str(run.path)]) == int(damage is not other_delta)


def test_on_another_machine_the_checkpoint_tells_that_a_ledger_is_of_another_run(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    that_of_another_run(run)
    monkeypatch.setenv("DISCREET_STATE", str(run.path / "state"))
    for reader in (("status",), ("report",), ("ledger", "show")):
        assert f"{run.ledger_path} is older than the checkpoint" in said(
            capsys, *reader, str(run.path)
        )
    assert main(["ledger", "verify", str(run.path)]) == 1


def test_a_configuration_without_the_noise_of_the_run_is_damaged(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / CONFIG).write_text("")  # a run with all defaults, by its text
    for reader in ("status", "report"):
        refused = said(capsys, reader, str(run.path))
        assert f"{run.path / CONFIG} is damaged: the run's noise multiplier is missing" in refused


def test_a_guard_that_is_a_link_to_itself_stops_no_reader(
    run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "ledgers.db").symlink_to("ledgers.db")
    monkeypatch.setenv("DISCREET_STATE", str(tmp_path / "state"))
    assert main(["ledger", "show", str(run.path)]) == 0
    assert "user-level: 1 x" in capsys.readouterr().out


def test_the_epsilon_of_a_report_is_that_of_the_ledger(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run.metrics_path.read_text()
    (row,) = run.read_metrics()
    run.replace_metrics([{**row, "epsilon_user": 0.01}])
    assert run.metrics_path.read_text() != said
    assert main(["report", str(run.path)]) == 0
    assert f"epsilon user {row['epsilon_user']:.4g}," in capsys.readouterr().out


# Without a seed a cohort of 20 is empty once in 1,000 runs, and nobody then reports anything.
REPORTED = ("seed=71", "privacy.example.enabled=true", "privacy.example.noise_multiplier=4")


@pytest.fixture(scope="module")
def made_reporting(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose clients report an epsilon of their own."""
    path = tmp_path_factory.mktemp("made") / "run"
    words = (*SMALL, *REPORTED, "model.name=logistic_regression", "training.epochs=1")
    simulate(*load_asked([*words, f"output_dir={path}"]))
    return RunFolder(path)


@pytest.fixture
def reporting(
    made_reporting: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunFolder:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "known"))
    return copied(made_reporting, tmp_path / "run")


@pytest.mark.parametrize("left", ["clients.db", "checkpoint", "changed digit"])
def test_no_damage_to_the_metrics_lowers_what_clients_reported(
    left: str, reporting: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = reporting.read_metrics()
    if left == "clients.db":
        reporting.checkpoint_path.unlink()
    else:
        reporting.clients_ledger_path.unlink()  # as in a federation
    if left != "changed digit":
        reporting.metrics_path.unlink()
    else:
        reporting.replace_metrics([{**row, "epsilon_example": 0.01}])
        assert main(["report", str(reporting.path)]) == 0
        assert f"epsilon example {row['epsilon_example']:.4g}," in capsys.readouterr().out
    assert main(["status", str(reporting.path)]) == 0
    assert f"example {row['epsilon_example']:.4g} spent" in capsys.readouterr().out


def test_a_configuration_that_has_lost_a_guarantee_is_not_one_in_which_it_is_off(
    reporting: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = reporting.path / CONFIG
    before, after = path.read_text().split("  example:\n    enabled: true\n")
    path.write_text(f"{before}  example:\n    enabled: false\n{after}")
    for reader in ("status", "report"):
        refused = said(capsys, reader, str(reporting.path))
        assert f"{reporting.ledger_path} belongs to a run with other privacy settings" in refused


def test_a_ledger_of_clients_that_is_gone_is_named(
    reporting: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    reporting.clients_ledger_path.unlink()
    for action in ("show", "verify"):
        refused = said(capsys, "ledger", action, str(reporting.path))
        assert f"{reporting.clients_ledger_path} is missing" in refused


@pytest.mark.parametrize("name", ["epsilon_example", "round", "clip_norm"])
def test_a_changed_number_of_a_checkpoint_is_damage(
    name: str, reporting: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = reporting.checkpoint_path
    before, after = path.read_bytes().split(f'{name}\\": '.encode())
    other = bytes([after[0] ^ 1])
    path.write_bytes(before + f'{name}\\": '.encode() + other + after[1:])
    resumed = ("simulate", "resume=true", f"output_dir={reporting.path}", "rounds=2")
    for words in (("status", str(reporting.path)), ("report", str(reporting.path)), resumed):
        assert f"{path} is damaged: its numbers" in said(capsys, *words)


def test_a_number_of_too_many_digits_is_a_damaged_configuration(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / ASKED).write_text("9" * 100_000)
    assert f"{run.path / ASKED} is damaged: " in said(capsys, "report", str(run.path))


def test_a_checkpoint_that_is_a_folder_is_named(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoint_path.unlink()
    run.checkpoint_path.mkdir()
    words = ("simulate", "resume=true", f"output_dir={run.path}", "rounds=2")
    assert f"{run.checkpoint_path} is damaged: " in said(capsys, *words)


@pytest.mark.parametrize("left", [None, "", "round,loss\r\n"])
def test_metrics_that_have_lost_rounds_are_no_run_without_a_round(
    left: str | None, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.metrics_path.unlink()
    if left is not None:
        run.metrics_path.write_text(left)
    lost = f"{run.metrics_path} {'is missing' if left is None else 'ends after round 0'}"
    for words in (("report", str(run.path)), ("export", str(run.path), str(run.path / "model"))):
        assert said(capsys, *words).startswith(f"discreet: {lost}, and 1 rounds are done")
    assert main(["status", str(run.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("round      1 of 1, ") for line in lines)
    assert any(line.startswith(f"fault      {lost}") for line in lines)
    assert not any("0 asked" in line for line in lines)
    run.checkpoint_path.unlink()
    assert lost in said(capsys, "report", str(run.path))


def test_a_run_that_has_lost_its_ledger_is_not_advised_to_make_a_new_one(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.ledger_path.unlink()
    resumed = ("simulate", "resume=true", f"output_dir={run.path}", "rounds=2")
    for words in (("status", str(run.path)), resumed):
        refused = said(capsys, *words)
        assert f"{run.ledger_path} is missing: put this run's ledger back" in refused
        assert "create" not in refused
    exported = said(capsys, "export", str(run.path), str(run.path.with_name("model")))
    assert "create" not in exported
    run.metrics_path.unlink()
    assert f"{run.ledger_path} is missing" in said(capsys, "status", str(run.path))


def test_a_folder_that_is_no_run_is_named_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = said(capsys, "status", str(tmp_path))
    assert refused == f"discreet: {tmp_path} does not contain a run: {CONFIG} is missing\n"


def test_a_damaged_status_is_not_that_of_a_run_that_has_not_started(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / STATUS).write_text("null")
    assert main(["status", str(run.path)]) == 0
    said = capsys.readouterr().out
    assert "state      not known: status.json is missing or damaged\nround      1 of 1\n" in said


@pytest.mark.parametrize("updated", ["", "yesterday", "2026-11-27T07:00:00"])
def test_a_status_with_strange_values_is_none(run: RunFolder, updated: str) -> None:
    status = json.loads((run.path / STATUS).read_text())
    (run.path / STATUS).write_text(json.dumps({**status, "updated": updated}))
    assert read_status(run) is None
    (run.path / STATUS).write_text(json.dumps({**status, "failures": 3}))
    assert read_status(run) is None


INTERRUPTED = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
from discreet.cli.main import main
raise SystemExit(main([sys.argv[2], "no/such/run"]))
"""


@pytest.mark.parametrize(
    "imported",
    ["discreet.cli.ctrl_c", "click", "typer", "discreet.cli.verbs", "discreet.cli.status", "torch"],
)
def test_a_ctrl_c_during_any_import_ends_in_one_line(imported: str) -> None:
    verb = "predict" if imported == "torch" else "status"  # which does not import PyTorch
    command = [sys.executable, "-c", INTERRUPTED, imported, verb]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (130, "discreet: ended by Ctrl-C\n")


def test_a_word_that_the_locale_can_not_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    refused = said(capsys, "simulate", "output_dir=out/gr\udcc3\udcb6\udcc3\udc9fe")
    assert "output_dir=out/gr????e: set LC_ALL=C.UTF-8" in refused
