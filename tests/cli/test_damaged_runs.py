"""What is broken in a run folder is one line with the file's name, whoever reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.cli.main import main
from tests.made_runs import make_run

READERS = (("report",), ("status",), ("ledger", "show"))
UNREAD = {("ledger", "show", "metrics.csv"), ("ledger", "show", "privacy.json"), ("status", "privacy.json")}
DAMAGES = [
    ("config.yaml", b"rounds: [1"),
    ("config.yaml", b"- 1\n- 2\n"),
    ("config.yaml", b"runds: 3\n"),
    ("config.yaml", b"\xff\xfe\x00"),
    ("config.yaml", b"rounds: ${rounds}\n"),
    ("metrics.csv", b"round,loss,accuracy\n1,0.5,high\n"),
    ("metrics.csv", b"number,loss\n1,0.5\n"),
    ("metrics.csv", b"round,loss,accuracy\n1\n2,0.5,0.5\n"),
    ("metrics.csv", b"\x00\x01\xff\n\xfe"),
    ("privacy.json", b"{"),
]


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_a_broken_file_of_a_run_is_one_line(
    reader: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", "privacy.user.noise_multiplier=1")
    for file, content in DAMAGES:
        whole = (tmp_path / "run" / file).read_bytes() if (tmp_path / "run" / file).exists() else b"{}"
        (tmp_path / "run" / file).write_bytes(content)
        code, error = main([*reader, str(tmp_path / "run")]), capsys.readouterr().err
        (tmp_path / "run" / file).write_bytes(whole)
        if (*reader, file) in UNREAD:
            assert (code, error) == (0, "")
        else:
            assert code == 2
            assert error.startswith(f"discreet: {tmp_path / 'run' / file} is damaged: ")
            assert error.count("\n") == 1
