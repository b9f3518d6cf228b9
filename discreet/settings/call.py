"""A call: the folder that a run is written to and the device that computes it. Neither is a setting
of the run."""

from __future__ import annotations

from discreet.settings import rules
from discreet.settings.rules import CALL_SETTINGS, require, section
from discreet.settings.wording import Key, Wording


@section("")
class Call:
    """One call of a run. Another call may resume the run from another place."""

    output_dir: rules.Text | None = None
    resume: bool = False
    device: rules.Text = "cpu"

    def __post_init__(self) -> None:
        rule = Wording("given with ", Key("resume=true"))
        require(not self.resume or self.output_dir is not None, "output_dir", rule, None)


assert tuple(Call.__annotations__) == CALL_SETTINGS
