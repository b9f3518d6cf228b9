"""What is broken in a run folder is one line with the file's name, whoever reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.cli.main import main
from tests.made_runs import make_run

READERS = (("report",), ("status",), ("ledger", "show"))
DAMAGES = {
    "no YAML": ("config.yaml", "rounds: [1"),
    "no mapping": ("config.yaml", "- 1\n- 2\n"),
    "no such setting": ("config.yaml", "runds: 3\n"),
    "no text": ("config.yaml", b"\xff\xfe\x00"),
    "a loop": ("config.yaml", "rounds: ${rounds}\n"),
    "a word": ("metrics.csv", "round,loss,accuracy\n1,0.5,high\n"),
    "no round": ("metrics.csv", "number,loss\n1,0.5\n"),
    "a line too short": ("metrics.csv", "round,loss,accuracy\n1\n2,0.5,0.5\n"),
    "no lines": ("metrics.csv", b"\x00\x01\xff\n\xfe"),
}


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_of_a_run_is_one_line(
    reader: tuple[str, ...], damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content = DAMAGES[damage]
    make_run(tmp_path / "run", "privacy.user.noise_multiplier=1")
    (tmp_path / "run" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    code, error = main([*reader, str(tmp_path / "run")]), capsys.readouterr().err
    if reader[0] == "ledger" and file == "metrics.csv":  # of no use to it
        assert (code, error) == (0, "")
        return
    assert code == 2
    assert error.startswith(f"discreet: {tmp_path / 'run' / file} is damaged: ")
    assert error.count("\n") == 1
