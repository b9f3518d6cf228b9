"""What a guard writes for its operators, and the lock that keeps a second guard away."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from discreet.cli.main import main
from discreet.deployment.flower_fixes import supernode_guard
from discreet.guard import running, site_guard, site_records
from discreet.guard.patient_blocks import split_site
from discreet.guard.sandbox import MOST_LOG
from discreet.guard.scratch import MEGABYTE
from discreet.guard.site_blocks import BLOCKS, SPLIT, read_blocks
from discreet.guard.site_guard import ROOM_MB, SiteGuard, closed
from discreet.guard.site_records import JOURNAL, MOST_TEXT, OLDER, note, site_lock
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.node.account import Refused
from discreet.settings.rules import ConfigError
from tests.guard.made import RUN, PlayedSandbox, context, guard_toml, message, site, table
from tests.guard.test_block_release import APP, PATIENTS, guard_at, opposed

APPROVED = {"any": False, "apps": ["ab" * 32]}


def test_a_second_guard_is_refused_before_it_opens_the_folder_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = site(tmp_path, PATIENTS, enclosure="landlock", **APPROVED)
    monkeypatch.setattr(supernode_guard, "LOCKS", ExitStack())
    with site_lock(policy), closed(policy):
        with pytest.raises(ConfigError, match="check of this site is running"):
            supernode_guard.install(tmp_path / "guard.toml")
        assert main(["site", "check", str(tmp_path / "guard.toml")]) == 2
        assert (tmp_path / "site").stat().st_mode & 0o777 == 0


def test_a_lock_is_held_until_the_process_of_the_guard_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = site(tmp_path, PATIENTS)
    locks = ExitStack()
    monkeypatch.setattr(supernode_guard, "LOCKS", locks)
    monkeypatch.setattr(supernode_guard, "check_site", lambda path: policy)
    monkeypatch.setattr(supernode_guard, "Sandbox", lambda policy: SimpleNamespace())
    monkeypatch.setattr(supernode_guard, "broken_walls", lambda sandbox: [])
    monkeypatch.setattr(supernode_guard.start_client_internal, "_push_messages", None)
    monkeypatch.setattr(supernode_guard.importlib, "import_module", lambda name: SimpleNamespace())
    assert not healthy(tmp_path)
    supernode_guard.install(tmp_path / "guard.toml")
    assert healthy(tmp_path)
    with pytest.raises(ConfigError, match="is running"), site_lock(policy):
        pass
    assert healthy(tmp_path)
    locks.close()
    assert not healthy(tmp_path)
    with site_lock(policy):
        assert not healthy(tmp_path)  # a check holds the lock, or a guard that is still starting


def healthy(folder: Path) -> bool:
    """What the healthcheck of docker-compose.guard.yml says."""
    words = [sys.executable, "-S", running.__file__, str(folder / "guard.toml")]
    return subprocess.run(words, check=False).returncode == 0


def test_the_log_is_read_without_opening_the_folder_of_the_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path)
    guard.answer(message(), context(), APP)
    (tmp_path / "site").chmod(0)
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    assert (tmp_path / "site").stat().st_mode & 0o777 == 0
    (tmp_path / "site").chmod(0o700)
    assert "2 blocks, 0 of them without a result" in capsys.readouterr().out
    assert sorted(path.name for path in guard.records.iterdir()) == [JOURNAL, "privacy.json"]


VERBS = (["site", "log"], ["site"], ["site", "backup"])


def told(folder: Path, verb: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a verb prints as its only line of an error; nothing if it ends well."""
    more = ["--out", str(folder / "copy")] if verb[-1] == "backup" else []
    code = main([*verb, str(folder / "guard.toml"), *more])
    said = capsys.readouterr()
    assert code == (2 if said.err else 0)
    return said.err


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_killed_guard_left_closed_is_opened_unless_another_one_runs(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path, enclosure="landlock", **APPROVED)
    with site_lock(guard.policy), closed(guard.policy):
        assert "is closed while blocks run: try again later" in told(tmp_path, verb, capsys)
        assert (tmp_path / "site").stat().st_mode & 0o777 == 0
    for name in ("site", "site-records"):
        (tmp_path / name).chmod(0)
    assert told(tmp_path, verb, capsys) == ""


def test_the_overview_says_what_is_left_what_ran_and_what_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path, any=False, apps=[APP.digest])
    guard.answer(message(), context(), APP)
    forged = f'x" 1.0.0: {APP.digest}: 9 rounds answered\x1b[2J\n'
    digests = [f"{number:064x}" for number in range(1, 23)]
    for digest in [*digests, digests[-1]]:
        with pytest.raises(Refused):
            guard.answer(message(), context(), replace(APP, digest=digest, fab_id=forged))
    assert main(["site", str(tmp_path / "guard.toml")]) == 0
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("budget: epsilon 20 at delta 1e-05")
    assert "in 1 releases" in lines[1]
    assert lines[2] == "what ran:"
    told = f"  {APP.digest}: 1 rounds answered, 0 late, 0 refused; the last 20"
    assert lines[3].startswith(told)
    assert lines[3].endswith('; calls itself "stranger/app 1.0.0"')
    assert lines[4].startswith("what waits for approval")
    assert lines[5].startswith(f"  {digests[-1]}: asked 2 times, the last 20")
    assert "has not approved the bundle" in lines[5]
    assert f'calls itself "x\\" 1.0.0: {APP.digest}' in lines[5]
    assert len(lines) == 26
    assert lines[-1] == "  and 2 more: discreet site log"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_delta": 1 / len(PATIENTS)}, "max-delta must be below 1 / 6"),
        ({"blocks": 3}, "was split by id 'patient' into 2 blocks, not by 'patient' into 3"),
    ],
)
def test_the_overview_says_that_check_refuses_what_contradicts_the_split(
    settings: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard_at(tmp_path)
    assert main(["site", str(tmp_path / "guard.toml")]) == 0
    assert "refuses" not in capsys.readouterr().out
    guard_toml(tmp_path, **settings)
    assert main(["site", str(tmp_path / "guard.toml")]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "refuses" in each]
    assert line.startswith("discreet site check refuses this guard.toml: ")
    assert said in line


def test_what_is_no_verb_of_a_site_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in {
        "log": "site log needs WHERE",
        "lok guard.toml": "there is no site lok",
        "patients.csv split": "the action comes first: discreet site split patients.csv",
    }.items():
        assert main(["site", *words.split()]) == 2
        assert said in capsys.readouterr().err


def test_the_packages_of_a_site_are_listed_as_a_constraints_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["site", "check", str(tmp_path / "guard.toml"), "--packages"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"# Python {platform.python_version()}"
    assert f"flwr=={version('flwr')}" in lines
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(names, key=str.casefold)
    assert all(Requirement(line).specifier for line in lines)


def test_a_torn_line_of_the_journal_takes_no_other_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path)
    guard.answer(message(), context(), APP)
    journal = guard.records / JOURNAL
    journal.write_text(journal.read_text() + journal.read_text()[:40])
    with pytest.raises(Refused):
        guard.answer(message(kind="query"), context(), APP)
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert "2 blocks" in first
    assert second == "a line that a crash has cut short"
    assert "refused" in third


def test_a_text_that_a_server_chose_is_cut_in_the_journal(tmp_path: Path) -> None:
    note(tmp_path, {"kind": "x" * 5000, "round": 3})
    (line,) = (tmp_path / JOURNAL).read_text().splitlines()
    assert json.loads(line) == {"kind": "x" * MOST_TEXT, "round": 3}


def test_a_block_that_is_not_the_one_that_was_split_stops_the_guard(tmp_path: Path) -> None:
    policy = site(tmp_path, PATIENTS)
    folder = Path(policy.blocks.folder)
    archives = read_blocks(folder, id_column="patient", count=2)
    archives[1].write_bytes(archives[0].read_bytes())
    with pytest.raises(ConfigError, match=r"block 00001\.tar differs"):
        SiteGuard(policy, sandbox=PlayedSandbox(opposed))  # type: ignore[arg-type]


def test_a_split_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(tmp_path, PATIENTS)

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("discreet.guard.patient_blocks._write", full)
    with pytest.raises(OSError, match="no space"):
        split_site(data, tmp_path / "site", id_column="patient", count=2)
    assert [path.name for path in tmp_path.iterdir()] == [data.name]


def test_json_lines_with_a_mark_and_a_separator_inside_a_text_are_split(tmp_path: Path) -> None:
    rows = [{"patient": "a", "note": "one\u2028two"}, {"patient": "b", "note": "three"}]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8-sig")
    split = split_site(tmp_path / "rows.jsonl", tmp_path / "site", id_column="patient", count=2)
    assert split.patients == 2
    assert len(json.loads((tmp_path / "site" / SPLIT).read_text())["digests"]) == 2
    assert len([*(tmp_path / "site" / BLOCKS).iterdir()]) == 2


def test_a_long_journal_becomes_the_older_one_and_no_round_is_lost_from_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(site_records, "MOST_JOURNAL", 700)
    guard = guard_at(tmp_path, max_epsilon=90.0)
    for number in range(1, 8):
        guard.answer(message(number=number), context(), APP)
    assert sorted(each.name for each in guard.records.iterdir()) == [JOURNAL, OLDER, "privacy.json"]
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "round 7 " in lines[-1]
    assert 2 < len(lines) < 7  # and none that says that a charged round has not ended
    assert all(f"round {8 - place} " in line for place, line in enumerate(reversed(lines), 1))


def test_rows_from_before_the_field_of_a_digest_are_shown_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path)
    guard.answer(message(), context(), APP)
    journal = guard.records / JOURNAL
    row = json.loads(journal.read_text())
    del row["digest"]
    journal.write_text(json.dumps(row) + "\n")
    assert main(["site", str(tmp_path / "guard.toml")]) == 0
    told = capsys.readouterr().out
    assert "  -: 1 rounds answered, 0 late, 0 refused; the last 20" in told
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    assert f"run {RUN}  - stranger/app" in capsys.readouterr().out


def test_what_blocks_print_leaves_room_for_all_that_a_round_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guard_at(tmp_path, opposed)
    room = len(guard.blocks) * MOST_LOG / MEGABYTE
    for free, answered in ((room, False), (room + ROOM_MB - 0.1, False), (room + ROOM_MB, True)):
        monkeypatch.setattr(site_guard, "free_mb", lambda folder, free=free: free)
        if answered:
            guard.answer(message(), context(), APP)
        else:
            with pytest.raises(Refused, match=r"needs 16\.1 MB of free disk space"):
                guard.answer(message(), context(), APP)
    assert guard.ledger.total().num_releases == 1


def split_anew(site: Path) -> None:
    files = table(site.parent, PATIENTS)
    shutil.rmtree(site)
    split_site(files, site, id_column="patient", count=2)


def changed_in_place(site: Path) -> None:
    first, second = sorted((site / BLOCKS).glob("*.tar"))
    first.write_bytes(second.read_bytes())


@pytest.mark.parametrize("change", [split_anew, changed_in_place], ids=lambda each: each.__name__)
def test_blocks_that_changed_since_the_guard_started_are_not_run(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    guard = guard_at(tmp_path, opposed)
    guard.answer(message(), context(), APP)
    change(tmp_path / "site")
    with pytest.raises(Refused, match="blocks have changed"):
        guard.answer(message(number=2), context(), APP)
    assert guard.ledger.total().num_releases == 1


def test_a_guard_charges_the_ledger_that_it_opened_and_no_other(tmp_path: Path) -> None:
    guard = guard_at(tmp_path, opposed)
    other = DurableLedger.create(tmp_path / "other.db")
    for path in (guard.ledger.path, other.path):
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
    other.path.replace(guard.ledger.path)
    with pytest.raises(LedgerError, match="is not the ledger that was read before"):
        guard.answer(message(), context(), APP)
