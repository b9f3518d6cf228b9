"""Numbers in JSON, which has none for infinity and NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def json_ready(value: Any) -> Any:
    """The same value with infinity and NaN, at any depth, as the strings "inf", "-inf" and "nan".

    >>> json_ready({"epsilon": [math.inf, 2.5]})
    {'epsilon': ['inf', 2.5]}
    """
    if isinstance(value, Mapping):
        return {str(name): json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
