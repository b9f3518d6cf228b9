"""The verbs of the `discreet` command: one Typer app. Only the requested verb is imported."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, TextIO

import click
import typer

from discreet import __version__
from discreet.cli.ctrl_c import ends_at_once


@dataclass(frozen=True)
class Verb:
    """One verb of the command.

    Attributes:
      line: its line in the help.
      file: its module in discreet.cli, which has `command`; the verb's name unless given.
      in_a_project: it needs a project that `discreet new` made, or a checkout.
      settings: it takes settings, NAME=VALUE, which are checked before PyTorch is imported.
      loads: it loads PyTorch, which takes some seconds.
      says_values: a ValueError in it is about a given value, so that its message is all that is
        shown.
    """

    line: str
    file: str | None = None
    in_a_project: bool = False
    settings: bool = False
    loads: bool = False
    says_values: bool = False


VERBS = {
    "advise": Verb("five questions: which guarantee fits, and what to expect"),
    "calibrate": Verb(
        "epsilon, noise or rounds: give two, the third is computed", says_values=True
    ),
    "report": Verb("a table of runs, and a page with pictures of them", loads=True),
    "ledger": Verb(
        "what a run or a node has spent, and whether its ledger is intact", says_values=True
    ),
    "predict": Verb("predictions with the model of a run", loads=True, says_values=True),
    "export": Verb(
        "a run's model as a folder that PyTorch and scikit-learn load alone", loads=True
    ),
    "status": Verb("the state of a run, during it or afterwards"),
    "data": Verb(
        "a table of your own: proposes its description, checks it, splits it by owner",
        file="own_table",  # no two files share a name
        says_values=True,
    ),
    "site": Verb("a guarded site: splits its patients, checks its walls, tries an app", loads=True),
    "new": Verb("makes a project to start from: model, data, settings, tests"),
    "run": Verb(
        "an experiment on Flower's simulation runtime, as `flwr run` *",
        in_a_project=True,
        settings=True,
    ),
    "simulate": Verb(
        "an experiment in one process, and sweeps with --multirun *",
        in_a_project=True,
        settings=True,
        loads=True,
    ),
    "plan": Verb(
        "what a run will cost: epsilon, noise, minutes, memory, bytes *",
        file="price",
        in_a_project=True,
        settings=True,
        loads=True,
    ),
    "tune": Verb(
        "tries settings, keeps the best run, and accounts for the choice *",
        in_a_project=True,
        settings=True,
        loads=True,
        says_values=True,
    ),
    "audit": Verb(
        "tries to break the privacy claim of a run, with canaries *",
        in_a_project=True,
        settings=True,
        loads=True,
    ),
    "statistics": Verb(
        "statistics of clients' data, noised and accounted for *",
        in_a_project=True,
        settings=True,
        loads=True,
    ),
    "benchmark": Verb(
        "measures Discreet side by side with others *", in_a_project=True, loads=True
    ),
}
HELP = ("-h", "--help")
EPILOG = """* in a project that `discreet new` made, or in a checkout of Discreet

`discreet VERB --help` explains a verb, with examples.
"""


def run(given: Sequence[str]) -> int:
    """Runs the verb in `given`, and returns its exit code: see `discreet.cli.main.main`. It is 141,
    without a word, if nobody reads the output any more, as in `discreet plan | head`, and 1, with
    one line, if it does not fit on a disk."""
    _open_streams()
    code = 2
    try:
        _check_locale(given)
        with ends_at_once():
            command = typer.main.get_command(_app(given))
        with command.make_context("discreet", [*given]) as context:
            code = int(command.invoke(context) or 0)
    except typer.Exit as ended:
        code = ended.exit_code
    except BrokenPipeError as error:
        return _after_broken_pipe(error)
    except click.Abort:
        print("\ndiscreet: ended at a question; options answer it: see --help", file=sys.stderr)
    except _told(given[0]) as error:
        print(f"discreet: {_said(error, given[0])}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        return _after_broken_pipe(error)
    except OSError as error:
        _send_nowhere(sys.stdout)
        return code or _after_full_disk(error)
    return code or _after_full_disk(None)


def _after_broken_pipe(error: BrokenPipeError) -> int:
    unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
    for stream in unread:
        _send_nowhere(stream)
    if unread:
        return 128 + signal.SIGPIPE
    print(f"discreet: {error}", file=sys.stderr)
    return 2


def _after_full_disk(error: OSError | None) -> int:
    """The exit code of a command that has done its work: 1 if some of its output is lost. `error`:
    that of its last words."""
    from discreet.logs import LOST, is_lost

    if is_lost():  # the log has said so
        return 1
    if error is None:
        return 0
    print(f"discreet: {LOST}: {error.strerror}", file=sys.stderr)
    return 1


def _send_nowhere(stream: TextIO) -> None:
    """What is left in its buffer would cause a traceback when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Sends the output of a process that was started without one to nowhere. Otherwise the next
    file that is opened, such as a ledger, would take its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _is_unread(stream: TextIO) -> bool:
    """True for a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(stream, 0)  # asks for nothing: errors are always reported
    return bool(poll.poll(0))


def _said(error: Exception, verb: str) -> str:
    """The line about an error whose message alone is shown."""
    if not isinstance(error, click.ClickException):
        return str(error)
    said = " ".join(error.format_message().split())
    is_unknown = isinstance(error, click.NoSuchOption) and not error.possibilities
    if is_unknown and verb in VERBS and VERBS[verb].in_a_project:
        said += " A setting has no dashes: write NAME=VALUE"
    return said


def _check_locale(given: Sequence[str]) -> None:
    """Raises click.UsageError for a word that this process could not decode, so that Python has
    replaced parts of it."""
    for word in given:
        if any("\udc80" <= character <= "\udcff" for character in word):
            shown = word.encode("ascii", "replace").decode()
            raise click.UsageError(
                f"the locale of this process can't read {shown}: set LC_ALL=C.UTF-8"
            )


def _app(given: Sequence[str]) -> typer.Typer:
    """The app for these words. Other verbs have only their line in the help."""
    # With rich, Typer escapes brackets even in help that it prints as plain text.
    typer.core.HAS_RICH = False
    settings = {"help_option_names": [*HELP]}
    app = typer.Typer(
        rich_markup_mode=None,
        add_completion=False,
        suggest_commands=False,
        context_settings=settings,
    )
    app.callback(epilog=_as_written(EPILOG))(_root)
    asked = VERBS.get(given[0])
    if asked is not None and asked.in_a_project and not {*HELP} & {*given}:
        import_module("discreet.run_files.places").app_folder()
        if asked.settings:
            if given[0] == "tune":
                listed = ["--multirun"]
            else:
                listed = []
            import_module("discreet.run_files.compose").check_words([*listed, *given[1:]])
    if asked is not None and asked.loads and sys.stderr.isatty():
        print(f"discreet {given[0]}: loading PyTorch", file=sys.stderr)
    for name, verb in VERBS.items():
        command: Callable[..., object] = lambda: None  # noqa: E731
        text = None
        if verb is asked:
            module = import_module(f"discreet.cli.{verb.file or name}")
            command = module.command
            text = _as_written(module.__doc__ or "")
        app.command(name, help=text, short_help=verb.line)(command)
    return app


def _version(asked: bool) -> None:
    if asked:
        print(f"discreet {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Differentially private federated learning on Flower."""


def _as_written(text: str) -> str:
    """A help text whose line breaks Click preserves."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip("\n").split("\n\n"))


def _told(verb: str) -> tuple[type[Exception], ...]:
    """The errors whose message alone is shown. They are imported only if something was raised."""
    from discreet.ledger.charges import LedgerError
    from discreet.settings.rules import ConfigError

    if verb in VERBS and VERBS[verb].says_values:
        return click.ClickException, OSError, ValueError
    return click.ClickException, OSError, ConfigError, LedgerError
