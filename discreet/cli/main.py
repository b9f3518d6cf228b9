"""The `discreet` command: what comes after it is a verb, and the words of that verb."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from discreet import __version__

# What works anywhere, and what needs the conf of a project or of a checkout: a line for each verb.
ANYWHERE = {
    "calibrate": "epsilon, noise or rounds: give two, the third is computed",
    "report": "a table of runs, and a page with pictures of them",
    "ledger": "what a run or a node has spent, and whether its ledger is whole",
    "predict": "predictions with the model of a run",
    "status": "how a run stands, while it goes on or afterwards",
    "new": "makes a project to start from: model, data, settings, tests",
}
IN_A_PROJECT = {
    "run": "an experiment on Flower's simulation runtime, as `flwr run`",
    "simulate": "an experiment in one process, and sweeps with --multirun",
    "tune": "tries settings, keeps the best run, and accounts for the choice",
    "audit": "tries to break the privacy claim of a run, with canaries",
    "statistics": "what clients' data are like, noised and paid for",
    "benchmark": "measures Discreet side by side with others",
}
OF_SETTINGS = ("run", "simulate", "statistics", "tune")  # their words are settings


def usage() -> str:
    """What `discreet --help` prints."""
    here, there = (
        "\n".join(f"  {verb:10} {line}" for verb, line in verbs.items()) for verbs in (ANYWHERE, IN_A_PROJECT)
    )
    return (
        "usage: discreet VERB ...\n\nDifferentially private federated learning on Flower.\n\n"
        f"anywhere:\n{here}\n\nin a project that `discreet new` made, or in a checkout of Discreet:\n{there}\n\n"
        "`discreet VERB --help` explains a verb, with examples. For instance:\n\n"
        "  discreet calibrate user --population 3383 --cohort 120 --rounds 100 --noise 1.2\n"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Runs a verb; 2 if there is none of that name."""
    verb, *rest = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    if verb in ("-h", "--help"):
        print(usage(), end="")
        return 0
    if verb == "--version":
        print(f"discreet {__version__}")
        return 0
    if verb not in ANYWHERE | IN_A_PROJECT:
        known = ", ".join(ANYWHERE | IN_A_PROJECT)
        print(f"discreet: there is no verb {verb}; there are {known} (discreet --help)", file=sys.stderr)
        return 2
    try:
        return int(_imported(verb, rest).main(rest))
    except KeyboardInterrupt:
        return _say_ended()


def _imported(verb: str, rest: Sequence[str]) -> ModuleType:
    """The module of a verb, after a look whether it may start here.

    A Ctrl-C meanwhile ends this process at once: nothing has begun that would need cleaning up, and an extension that
    is being imported may make another error, or a traceback of its own, of an exception.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not if whoever started it wants Ctrl-C to be ignored
        signal.signal(signal.SIGINT, _end)
    try:
        if verb in IN_A_PROJECT and not {"-h", "--help"} & {*rest}:
            _check(verb, rest)
        return import_module(f"discreet.cli.{verb}")
    finally:
        signal.signal(signal.SIGINT, before)


def _check(verb: str, rest: Sequence[str]) -> None:
    """Ends this process if the verb has no place here, or if a setting is written as an option."""
    from discreet.client_settings import ConfigError
    from discreet.places import app_folder

    try:
        app_folder()
        for word, value in zip(rest, [*rest[1:], "VALUE"], strict=True):
            if verb in OF_SETTINGS and word.startswith("--") and (name := _setting(word)) and word != "--resume":
                given = word.partition("=")[2] or value
                raise ConfigError(f"{word} is no option: settings have no dashes, write {name}={given}")
    except ConfigError as error:
        print(f"discreet: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _setting(word: str) -> str | None:
    """The full name of the setting that an option is meant for; None if there is none, or several.

    >>> _setting("--rounds"), _setting("--learning-rate=1"), _setting("--batch-size=8"), _setting("--jobs")
    ('rounds', None, 'training.batch_size', None)
    """
    from discreet.settings import rules

    asked = word.removeprefix("--").partition("=")[0].replace("-", "_")
    found = [name for name, _ in rules() if f".{name}".endswith(f".{asked}")]
    return asked if asked in found else found[0] if len(found) == 1 else None


def _say_ended() -> int:
    print("discreet: ended by Ctrl-C", file=sys.stderr, flush=True)
    return 128 + signal.SIGINT


def _end(number: int, frame: object) -> NoReturn:
    os._exit(_say_ended())
