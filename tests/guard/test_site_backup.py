"""`discreet site backup`: what it holds, and what a guard makes of it when it is put back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from discreet.cli.main import main
from discreet.guard.guard_policy import read_guard
from discreet.guard.site_guard import SiteGuard
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.ledger.rollback_guard import STATE_VARIABLE
from tests.guard.made import PlayedSandbox, context, message
from tests.guard.test_block_release import APP, PATIENTS, guard_at, opposed


def backed_up(folder: Path) -> SiteGuard:
    """A guard that has answered once before its backup, and once after it."""
    guard = guard_at(folder / "site", patients=PATIENTS)
    guard.answer(message(), context(), APP)
    words = ["site", "backup", str(folder / "site" / "guard.toml"), "--out", str(folder / "copy")]
    assert main(words) == 0
    guard.answer(message(number=2), context(), APP)
    return guard


def started_at(folder: Path) -> SiteGuard:
    policy = read_guard(folder / "guard.toml")
    return SiteGuard(policy, sandbox=PlayedSandbox(opposed))  # type: ignore[arg-type]


def test_a_backup_holds_all_that_a_guard_needs_for_its_owner_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = backed_up(tmp_path)
    copy = tmp_path / "copy"
    assert "1 rows, head " in capsys.readouterr().out
    for name in ("key", "split.json", "blocks/00000.tar", "blocks/00001.tar"):
        assert (copy / "site" / name).read_bytes() == (guard.site / name).read_bytes()
    assert sorted(each.name for each in copy.iterdir()) == [
        "guard.toml", "ledger.db", "site", "site-records"
    ]  # fmt: skip
    assert copy.stat().st_mode & 0o777 == 0o700
    assert len((copy / "site-records" / "journal.jsonl").read_text().splitlines()) == 1


def test_an_older_copy_does_not_forget_what_was_spent_on_this_machine(tmp_path: Path) -> None:
    backed_up(tmp_path)
    shutil.rmtree(tmp_path / "site")
    shutil.copytree(tmp_path / "copy", tmp_path / "site")
    with pytest.raises(LedgerError, match="older"):
        started_at(tmp_path / "site")
    assert main(["ledger", "adopt", str(tmp_path / "site" / "ledger.db")]) == 2


def test_on_another_machine_a_copy_is_used_after_somebody_has_adopted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backed_up(tmp_path)
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "another machine"))
    with pytest.raises(LedgerError, match="discreet ledger adopt"):
        started_at(tmp_path / "copy")
    assert main(["ledger", "adopt", str(tmp_path / "copy" / "ledger.db")]) == 0
    guard = started_at(tmp_path / "copy")
    guard.answer(message(), context(), APP)
    assert DurableLedger(tmp_path / "copy" / "ledger.db").spent("patient").num_releases == 2


def test_a_backup_is_whole_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard = guard_at(tmp_path)
    words = ["site", "backup", str(tmp_path / "guard.toml"), "--out", str(tmp_path / "copy")]
    block = guard.blocks[1]
    was = block.read_bytes()
    block.write_bytes(was[:-1])
    assert main(words) == 2
    assert "differs from the one" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()
    block.write_bytes(was)
    (tmp_path / "ledger.db").write_bytes(b"no ledger")
    assert main(words) == 2
    assert not (tmp_path / "copy").exists()
    (tmp_path / "copy").mkdir()
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
