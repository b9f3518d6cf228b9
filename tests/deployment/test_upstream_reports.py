"""Each script of a report for Flower (docs/upstream) shows the fault that the report is about, in
the Flower here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

REPORTS = REPOSITORY / "docs" / "upstream"
SHOWN = {  # by a script of Python; the others are for a shell, with a SuperLink
    "adaptive_clipping": r"from 0\.1 to 0\.0002\d*\nfrom 10\.0 to 4034\.\d+",
    "database": "database is locked",
    "unread_messages": r"0 \d MiB\n(?:.*\n)+9 2\d MiB",
    "content_garbage": r"20 calls of 20 MB: \+ \d\d+ MiB\nafter gc\.collect\(\): \+ -?\d MiB",
    "supernode_replies": "still waiting after 20 s: True",
    "supernode_pauses": r"time\.sleep\(3\)",
    "clientapp_start": r"run_clientapp, torch \d",
    "failed_runs": "goes on to exit code 0",
}
SHELL = {"refused_nodes", "superexec"}


def test_every_report_has_a_script_and_is_listed() -> None:
    assert {path.stem for path in REPORTS.glob("*.md")} == {*SHOWN, *SHELL, "README"}
    listed = re.findall(r"\]\((\w+)\.md\)", (REPORTS / "README.md").read_text())
    assert sorted(listed) == sorted({*SHOWN, *SHELL})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shown"), SHOWN.items())
def test_the_script_of_a_report_shows_its_fault(name: str, shown: str, tmp_path: Path) -> None:
    (script,) = re.findall(
        r"```python\n(.*?)```", (REPORTS / f"{name}.md").read_text(), flags=re.DOTALL
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert re.search(shown, ran.stdout + ran.stderr)
