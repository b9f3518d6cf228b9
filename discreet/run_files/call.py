"""A call: the folder that a run is written to and the device that computes it. Neither is a setting
of the run."""

from __future__ import annotations

import re
from typing import Annotated

from discreet.settings import rules
from discreet.settings.rules import CALL_SETTINGS, require, section
from discreet.settings.wording import Key, Wording

FOLDER = rules.Rule("a folder", lambda value: bool(value.strip()) and "\0" not in value)
DEVICE = rules.Rule(
    "cpu, cuda or cuda:NUMBER",
    lambda value: re.fullmatch(r"cpu|cuda(:\d{1,3})?", value, re.ASCII) is not None,
)


@section("")
class Call:
    """One call of a run. Another call may resume the run from another place."""

    output_dir: Annotated[rules.Text, FOLDER] | None = None
    resume: bool = False
    device: Annotated[rules.Text, DEVICE] = "cpu"

    def __post_init__(self) -> None:
        rule = Wording("given with ", Key("resume=true"))
        require(not self.resume or self.output_dir is not None, "output_dir", rule, None)


assert tuple(Call.__annotations__) == CALL_SETTINGS
