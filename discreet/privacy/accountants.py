"""The names of the accountants, and when a budget is passed. What they compute: `discreet.privacy.accounting`."""

PLD, RDP = "pld", "rdp"
ACCOUNTANTS = (PLD, RDP)
_ROUNDING = 1e-9  # a target of 8 that is met at 8.000000001 is met


def exceeds(epsilon: float, budget: float) -> bool:
    """Whether an epsilon passes a budget by more than rounding, a billionth of it.

    >>> exceeds(8.000000001, 8), exceeds(8.0001, 8)
    (False, True)
    """
    return epsilon > budget * (1 + _ROUNDING)
