"""`discreet site`: split, check, try and log, as a site's people type them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from discreet.cli.main import main
from discreet.guard import conformance, operating, site_check, trials
from discreet.guard.channels import Told
from discreet.guard.kernel_stores import all_channels
from discreet.guard.sandbox import BlockResult, SandboxError
from discreet.guard.site_blocks import read_split
from discreet.guard.site_guard import SiteGuard
from discreet.guard.site_report import statement_of
from discreet.ledger.rollback_guard import STATE_VARIABLE
from discreet.node.account import Refused
from discreet.settings.rules import ConfigError
from tests.guard.guarded_sites import PATIENTS_APP, open_folder, owned
from tests.guard.made import HOSTILE, PlayedSandbox, context, message, site, table
from tests.guard.test_attacks import can_not
from tests.guard.test_block_release import APP, PATIENTS, guard_at, opposed
from tests.guard.unprivileged import ROOT, as_nobody

pytestmark = pytest.mark.processes


@pytest.fixture
def folder() -> Iterator[Path]:
    if reason := can_not("bubblewrap"):
        pytest.skip(reason)
    with open_folder() as made:
        yield made


def said(folder: Path, *words: str, code: int = 0) -> str:
    """What the command says to a user without rights."""
    owned(folder)
    environment = {
        **os.environ,
        STATE_VARIABLE: str(folder / "state"),
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    command = as_nobody([sys.executable, "-m", "discreet", "site", *words])
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_split_is_told_and_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["site", "split", str(table(tmp_path, PATIENTS)), "--id", "patient", "--blocks", "2"]
    assert main([*words, "--out", str(tmp_path / "site")]) == 0
    assert "6 patients in 2 blocks" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "site")]) == 2
    assert "a site is split once" in capsys.readouterr().err


def test_more_blocks_than_patients_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["site", "split", str(table(tmp_path, PATIENTS)), "--id", "patient"]
    assert main([*words, "--blocks", "6", "--out", str(tmp_path / "six")]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main([*words, "--blocks", "16", "--out", str(tmp_path / "sixteen")]) == 0
    assert "warning: there are more blocks than patients (6)" in capsys.readouterr().out
    assert main([*words, "--blocks", "0", "--out", str(tmp_path / "none")]) == 2
    assert "--blocks must be at least 2 (got 0)" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named_as_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--id", "patient", "--blocks", "2", "--out", "/proc/made"]
    assert main(["site", "split", str(table(tmp_path, PATIENTS)), *words]) == 2
    assert "--out /proc/made can't be made: No such file" in capsys.readouterr().err
    site(tmp_path / "guard", PATIENTS)
    policy = str(tmp_path / "guard" / "guard.toml")
    assert main(["site", "backup", policy, "--out", "/proc/made"]) == 2
    assert "--out /proc/made can't be made: No such file" in capsys.readouterr().err
    assert main(["site", "log", policy]) == 0
    assert capsys.readouterr().out == "no answers yet\n"


def test_a_gaussian_is_said_to_be_sampled_if_it_is(tmp_path: Path) -> None:
    policy = site(tmp_path, PATIENTS)
    assert "; a Gaussian a round, on this site's" in statement_of(replace(policy, q=1.0)).accounting
    sampled = statement_of(replace(policy, q=0.5)).accounting
    assert "; a Gaussian a round, Poisson-sampled with q = 0.5, on" in sampled


def test_a_site_as_one_unit_has_one_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(table(tmp_path, PATIENTS))
    assert main(["site", "split", data, "--unit", "site", "--out", str(tmp_path / "site")]) == 0
    assert "all rows in 1 block. Keep" in capsys.readouterr().out
    assert (
        main(
            [
                "site",
                "split",
                data,
                "--unit",
                "site",
                "--id",
                "patient",
                "--out",
                str(tmp_path / "b"),
            ]
        )
        == 2
    )


def test_check_finds_walls_that_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
    approved = {"enclosure": "bubblewrap", "any": False, "apps": ["ab" * 32]}
    site(folder / "guard", PATIENTS, **approved)
    found = said(folder, "check", str(folder / "guard" / "guard.toml"))
    assert "policy, split and account are in order" in found
    assert "none of the tried ways out of bubblewrap is open" in found
    assert "tried channels between blocks are open, one after the other" in found
    assert "a block's memory is added up by process, without buffers of sockets" in found
    assert "blocks never run side by side here, so no channel between such was tried" in found
    assert "charged for 2C: somebody at this site has read and approved each app" in found
    for closed in ("page cache", "cookie", "pidfd", "automatic group", "sysinfo", "free room"):
        assert closed not in found


def test_walls_that_can_not_be_put_up_are_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> object:
        raise SandboxError("mount: Operation not permitted")

    policy = site(tmp_path, PATIENTS)
    monkeypatch.setattr(site_check, "check_site", lambda path: policy)
    monkeypatch.setattr(operating, "started", fails)
    assert main(["site", "check", str(tmp_path / "guard.toml")]) == 2
    told = capsys.readouterr().err
    assert "can't be put up on this machine (mount: Operation not permitted)" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_check_finds_no_channel_between_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := can_not("kernel"):
        pytest.skip(reason)
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
    site(folder / "guard", PATIENTS)
    found = said(folder, "check", str(folder / "guard" / "guard.toml"))
    assert "none of the tried ways out of kernel is open" in found
    for side_by_side, how in ((False, "one after the other"), (True, "side by side")):
        tried = sum(each.covered for each in all_channels(side_by_side=side_by_side))
        assert f"0 of {tried} tried channels between blocks are open, {how}" in found
    assert found.count("not covered, and read of what was set (by chance 25%): the time of") == 2
    assert "charged for 2C: each block has a kernel of its own" in found


@pytest.mark.parametrize("how", ["told_channels", "told_side_by_side"])
def test_any_is_refused_where_a_channel_between_blocks_reads_back(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = site(tmp_path, PATIENTS)
    sandbox = SimpleNamespace(policy=conformance.checking(policy))
    monkeypatch.setattr(site_check, "check_site", lambda path: policy)
    monkeypatch.setattr(operating, "started", lambda policy: nullcontext(sandbox))
    monkeypatch.setattr(operating, "broken_walls", lambda sandbox: [])
    for name in ("told_channels", "told_side_by_side"):
        told = {"a pipe": Told(1.0, open=name == how, covered=True)}
        monkeypatch.setattr(conformance, name, lambda sandbox, told=told: told)
    assert main(["site", "check", str(tmp_path / "guard.toml")]) == 1
    said = capsys.readouterr().out
    assert said.count("1 of 1 tried channels") == said.count("0 of 1 tried channels") == 1
    assert 'any = true is refused: set charge = "all-blocks"' in said


def test_a_python_that_a_kernel_does_not_see_is_said_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = site(tmp_path, PATIENTS)
    monkeypatch.setattr(site_check, "readable_places", lambda: ["/usr", "/tmp/venv"])
    said = "/tmp/venv lies in /tmp, of which each block's kernel has its own: install it elsewhere"
    assert [each for each in site_check.faults_of(policy) if "lies in" in each] == [said]


def test_a_kernel_that_is_not_installed_is_said_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_check, "kernel_is_there", lambda: False)
    faults = [*site_check.faults_of(site(tmp_path, PATIENTS))]
    assert 'enclosure = "kernel" needs linux.uml: apt-get install user-mode-linux' in faults


def test_a_python_that_unpacks_without_a_filter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_check, "FIRST_PYTHON", (99, 1))
    found = [*site_check.faults_of(site(tmp_path, PATIENTS))]
    assert any("needs Python 99.1" in fault for fault in found)


def test_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert any(
        "must not run as root" in fault for fault in site_check.faults_of(site(tmp_path, PATIENTS))
    )


def test_a_delta_that_would_let_a_patient_be_published_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = site(tmp_path, PATIENTS, max_delta=1 / len(PATIENTS))
    with pytest.raises(ConfigError, match="max-delta must be below 1 / 6, the number of patients"):
        site_check.check_delta(policy, read_split(tmp_path / "site").patients)
    site_check.check_delta(replace(policy, max_delta=0.16), len(PATIENTS))
    monkeypatch.setattr(site_check, "faults_of", lambda policy: ())
    path = tmp_path / "guard.toml"
    with pytest.raises(ConfigError, match=f"^{path}: max-delta must be below 1 / 6"):
        site_check.check_site(path)


def test_try_runs_all_of_an_app_on_public_rows(folder: Path) -> None:
    mock = folder / "mock"
    mock.mkdir()
    (mock / "train.csv").write_text("patient,one,two,disease\n1,0.5,0.2,1\n2,-0.5,0.2,0\n")
    app = copied(
        PATIENTS_APP,
        folder,
        ('test = ""', 'test = "/tmp/data/train.csv"'),
        ("features = 13", "features = 2"),
    )
    found = said(folder, "try", str(app), "--mock", str(mock))
    assert "guard: 6 values, an update of norm" in found
    assert "round 30: accuracy 1.0000" in found
    assert "the digest of this bundle" in found


def test_try_runs_the_shipped_app_as_it_is(folder: Path) -> None:
    mock = folder / "mock"
    mock.mkdir()
    names = [f"measured_{number}" for number in range(13)]
    values = ",".join(["0.5"] * len(names))
    rows = f"patient,{','.join(names)},disease\n1,{values},1\n2,{values},0\n"
    (mock / "train.csv").write_text(rows)
    copied(PATIENTS_APP, folder)
    found = said(folder, "try", "app", "--mock", "mock")
    assert "guard: 28 values, an update of norm" in found
    assert "accuracy" not in found  # there is no table to rate the model on
    assert "x1b" not in found  # Flower colours the names of its log's levels
    assert "the digest of this bundle" in found


def test_no_print_of_an_app_looks_like_the_line_with_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "the digest of this bundle, for apps in guard.toml: "
    forged = f"round 1\n\x1b[92mINFO \x1b[0m: one\n\x1b[2J\x1b[8m{line}{'00' * 32}\r{line}{'11' * 32}\x85{line}\u202e"
    monkeypatch.setattr(trials, "try_app", lambda *_: (forged, True))
    monkeypatch.setattr(trials, "bundle_of", lambda app: b"bundle")
    assert main(["site", "try", str(tmp_path), "--mock", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert all(each.isprintable() for each in lines)
    assert lines[1] == "app: INFO : one"
    (told,) = [each for each in lines if not each.startswith("app: ")]
    assert told == line + hashlib.sha256(b"bundle").hexdigest()


def test_try_shows_an_error_with_its_line(folder: Path) -> None:
    (folder / "mock").mkdir()
    (folder / "mock" / "rows.csv").write_text("patient,value\na,1\n")
    app = copied(HOSTILE, folder, ('attack = ""', 'attack = "raise"'))
    found = said(folder, "try", str(app), "--mock", str(folder / "mock"), code=1)
    assert "ValueError: a row: [1.0]" in found
    assert "the app has failed" in found
    assert "the digest of this bundle" not in found


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower
@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pyproject.toml": b"[project]\nname = 'a'\n"},
        {"pyproject.toml": b"[project\n"},
        {"pyproject.toml": b"\xff\xfe"},
        {"pyproject.toml": b"[project]\nname = '../a b'\nversion = '1'\n[tool.flwr.app]\n"},
    ],
)
def test_what_is_no_app_is_told_in_one_line(
    files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    for name, content in files.items():
        (app / name).write_bytes(content)
    (tmp_path / "app.fab").write_bytes(b"no archive")
    for path in (app, tmp_path / "app.fab"):
        assert main(["site", "try", str(path), "--mock", str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{path} is no Flower app: " in line
    assert main(["site", "try", str(app), "--mock", str(tmp_path / "nope")]) == 2
    assert "nope is not a folder" in capsys.readouterr().err


def copied(app: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of an app with another configuration."""
    made = folder / "app"
    for path in sorted(app.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            target = made / path.relative_to(app)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    project = made / "pyproject.toml"
    for old, new in changes:
        assert old in project.read_text()
        project.write_text(project.read_text().replace(old, new))
    return made


def test_the_log_says_what_ran_what_it_cost_and_what_was_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path)
    guard.answer(message(), context(), APP)
    with pytest.raises(Refused):
        guard.answer(message(kind="query"), context(), APP)
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "stranger/app 1.0.0" in first
    assert "2 blocks, 0 of them without a result; epsilon" in first
    assert "refused: this site's guard does not answer messages of type query" in second


def test_the_log_counts_a_round_that_was_charged_before_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Killed(PlayedSandbox):
        def run(self, *_: object) -> Iterator[BlockResult]:
            raise KeyboardInterrupt

    policy = site(tmp_path, PATIENTS)
    with pytest.raises(KeyboardInterrupt):
        SiteGuard(policy, sandbox=Killed(opposed)).answer(message(), context(), APP)  # type: ignore[arg-type]
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    assert capsys.readouterr().out.startswith("charged without an end, as after a crash")


def test_status_says_the_guarantee_and_what_is_left_and_privacy_json_has_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path)
    guard.answer(message(), context(), APP)
    assert main(["site", "status", str(tmp_path / "guard.toml")]) == 0
    told = capsys.readouterr().out
    assert "unit: all records of one patient id at this site" in told
    assert "once for each of 2 blocks" in told
    assert "which one unit moves by 2C, has noise of at least 4 times 2C" in told
    assert "charged for 2C: each block has a kernel of its own" in told
    assert "in 1 releases" in told
    assert main(["site", "status", str(tmp_path / "guard.toml"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads((guard.records / "privacy.json").read_text())
    (guarantee,) = facts["guarantees"]
    assert (guarantee["blocks"], guarantee["clip_norms_moved"]) == (2, 2)
    assert guarantee["charged_for"].startswith("2C: each block has a kernel of its own")
    assert guarantee["epsilon"]["pld"] == pytest.approx(guard.epsilon)
    assert guarantee["events"] == [
        {"event": {"kind": "gaussian", "noise_multiplier": 4.0}, "count": 1}
    ]


def test_no_word_of_a_server_steers_the_terminal_of_who_reads_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = guard_at(tmp_path)
    hostile = replace(APP, fab_id="a/b\x1b[2J\nrun 8: epsilon 0")
    guard.answer(message(), context(), hostile)
    assert main(["site", "log", str(tmp_path / "guard.toml")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
