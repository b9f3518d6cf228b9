"""A planted fault for audits: noise of half its size, in every mechanism at once."""

from __future__ import annotations

import pytest

from discreet.privacy import mechanisms


def halve_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on Gaussian and Laplace noise is half as large as it is said to be."""
    whole = mechanisms._noise_for
    monkeypatch.setattr(mechanisms, "_noise_for", lambda *given: whole(*given) / 2)
