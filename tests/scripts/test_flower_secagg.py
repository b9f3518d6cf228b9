"""The faults of Flower's SecAgg+ are still there, on the Flower that is installed; if one goes, docs must say so."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.flower_secagg import CLIP, TARGET, UPDATE, main, read_the_victim, same_masks, values_of_masks


def test_two_secrets_with_one_xor_have_one_mask() -> None:
    first, second, mask, other = same_masks()
    assert first != second
    assert mask.tolist() == other.tolist()


def test_a_node_that_is_named_in_both_lists_is_read() -> None:
    np.testing.assert_allclose(read_the_victim(), UPDATE, rtol=0, atol=2 * CLIP / TARGET)  # a step of its grid


def test_masks_leave_out_the_largest_value() -> None:
    assert values_of_masks() == [0, 1, 2]


def test_the_script_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert "the server reads" in capsys.readouterr().out
