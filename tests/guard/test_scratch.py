"""A folder that an app has filled: what lies in it, and its end."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from discreet.guard import scratch_home
from discreet.guard.scratch import (
    LEAST_BYTES,
    MOST_DEPTH,
    OTHERS_MB,
    WatchedFolder,
    holds_more,
    remove,
)
from discreet.guard.scratch_home import ScratchHome, remove_left
from discreet.settings.rules import ConfigError


def deep(folder: Path, levels: int, name: str = "d") -> None:
    """A chain of folders, made as an app makes it: a path of them may be too long to be named."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize(("levels", "name"), [(3000, "d"), (20, "n" * 250)])
def test_a_chain_that_is_too_deep_or_too_long_counts_as_too_much_and_is_removed(
    levels: int, name: str, tmp_path: Path
) -> None:
    made = tmp_path / "scratch"
    made.mkdir()
    deep(made, levels, name)
    assert holds_more(made, 1e6)
    remove(made)
    assert not made.exists()


def test_links_lead_nowhere(tmp_path: Path) -> None:
    made = tmp_path / "scratch"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(bytes(1 << 22))
    made.mkdir()
    (made / "link").symlink_to(outside)
    (made / "inner").mkdir(mode=0o300)
    (made / "inner" / "link").symlink_to(outside)
    assert not holds_more(made, 1) or os.geteuid() != 0
    remove(made)
    assert (outside / "kept").exists()


def test_an_empty_file_counts_and_bytes_count_as_they_are(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / str(number)).touch()
    megabytes = 10 * LEAST_BYTES / (1 << 20)
    assert holds_more(tmp_path, megabytes * 0.99)
    assert not holds_more(tmp_path, megabytes)
    (tmp_path / "bytes").write_bytes(bytes(1 << 20))
    assert holds_more(tmp_path, megabytes + 0.9)


def test_what_apps_need_is_not_too_deep(tmp_path: Path) -> None:
    deep(tmp_path, MOST_DEPTH // 2)
    assert not holds_more(tmp_path, 16)


def test_files_without_a_name_count_but_not_what_other_programs_write(tmp_path: Path) -> None:
    free = 1e6
    with patch("discreet.guard.scratch.free_mb", lambda folder: free):
        watched = WatchedFolder(tmp_path, 64)
        free -= OTHERS_MB
        assert watched.exceeded() == ""
        free -= 65
        assert "fell by more than 1088 MB" in watched.exceeded()


def test_what_a_killed_guard_left_and_a_process_still_fills_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_home, "PLACE", tmp_path)
    left = ScratchHome.new()
    remove_left()
    assert left.folder.is_dir()  # its lock says that a guard is running
    os.close(left.lock)
    with (
        patch.object(scratch_home, "remove", side_effect=OSError(39, "Directory not empty")),
        pytest.raises(ConfigError, match=r"left of a guard that was killed.*not empty"),
    ):
        remove_left()
    remove_left()
    assert not left.folder.exists()
