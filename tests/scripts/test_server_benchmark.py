"""The server's benchmark runs the real path. What it measures decides nothing here."""

from __future__ import annotations

import pytest

from benchmarks import server_speed as server


@pytest.mark.slow
def test_every_part_of_a_reply_is_compared_with_numpy() -> None:
    rows = server.rows(size=500, cohorts=(2,), repetitions=2)
    rounds, parts = rows[:2], rows[2:]
    assert [row["replies"] for row in rounds] == [2, 2]
    assert {row["what"].split(",")[0] for row in parts} == {"encode", "decode", "clip and sum", "all four"}
    assert all(row["ratio"] > 0 for row in parts)


def test_its_replies_are_different_and_within_the_clip_norm() -> None:
    first, second = server.replies(2, 9, round_number=4)
    assert first.round == second.round == 4
    assert first.update.tolist() != second.update.tolist()
    assert first.update.norm() <= server.CLIP_NORM
