"""The command line: a few verbs, each in a file of `search/verbs`, loaded when it is called."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from difflib import get_close_matches
from types import FrameType
from typing import Any

import click

from dhen.errors import EXIT_CODE, ScoreError, UserError
from search.logs import escape_control_characters, show_logs
from trials.runtime.hosts.ray_connection import HeadGoneError
from trials.store.garbage import no_garbage_collection
from trials.store.user_cache import NO_SPACE, disk_full

VERBS = {
    "prepare": "turn a click log into a columnar cache and a schema.yaml to edit",
    "demo": "write a generated click log to a file",
    "run": "the main job: search for the best DHEN; the same command resumes it",
    "worker": "one more driver of a study whose ledger is on PostgreSQL",
    "status": "what a study has found so far",
    "leaderboard": "a study's winners at a glance, and how to export each",
    "report": "write a study's report.html anew",
    "ui": "a study's live page, and MLflow",
    "optuna": "write a study into an Optuna storage",
    "average": "means of the front's networks, chosen on validation, on the same front",
    "confirm": "are the winners better than the baseline? retrained from several seeds, with intervals",
    "ablate": "what each module, layer or member of a winner is worth, in NE and in FLOPs",
    "slices": "NE for each value of a column, of a winner and the baseline",
    "export": "take the best configuration away as a bundle",
    "register": "a bundle as a model that MLflow serves",
    "verify": "does a bundle still give its numbers?",
    "train": "train one configuration, or a bundle's again",
    "online": "train a bundle on newer rows, period by period, and leave increments",
    "apply": "bring increments into a bundle, or write it whole",
    "predict": "score a file of rows with a bundle",
    "serve": "score rows over HTTP, as MLflow does",
    "plan": "what each memory technique costs a configuration on a cluster, and the least that fits",
    "fidelity": "how much of the log it takes to rank candidates as on all of it",
    "reproduce": "the paper's tables 1, 2 and 3, trained on your log, with intervals",
    "spaces": "the named search spaces and their sizes",
    "blocks": "the interaction modules and what they cost",
    "cache": "what is kept for later commands: its size, its last use; clears it",
    "clusters": "the named clusters and this machine, with the source of each number",
}
INTERRUPTED = 130
REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EROFS), "Choose another folder, or its permissions"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR), "Move it away, or choose another folder"),
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ENOENT: "If it was moved or deleted meanwhile, put it back, or run the command again",
}
"""What helps against errors of the file system, by number."""
VERBOSE = "verbose"


class TerminationSignal(KeyboardInterrupt):
    """SIGTERM, which clusters and containers send before they kill; it is answered like Ctrl-C."""


class LazyGroup(click.Group):
    """A group whose verbs are imported only when called, so that --help needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs, in the order of use."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The verb's `command`."""
        if name not in VERBS:
            return None
        with no_garbage_collection():
            command = importlib.import_module(f"search.verbs.{name}").command
            # modules stay until the process ends: no search for garbage, nor the one at exit, need visit them
            gc.freeze()
        assert isinstance(command, click.Command)
        if all(param.name != VERBOSE for param in command.params):
            show = click.Option(
                ["-v", f"--{VERBOSE}"],
                count=True,
                callback=lambda context, parameter, verbosity: show_logs(verbosity),
                expose_value=False,
                help="Log on stderr what is done; -vv with details.",
            )
            command.params.append(show)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one line per verb, without importing any."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dhen-search")
def cli() -> None:
    """Find the DHEN ranking architecture with the best normalized entropy for its FLOPs.

    \b
    Start with:   dhen-search run --out runs/demo
    Your own log: dhen-search run --data log.csv --out runs/mine
    """


def main(arguments: list[str] | None = None) -> Any:
    """The console script: exit code 0 success, 2 the user's mistake (one message), 1 ours, 130 interrupted."""
    _open_missing_streams()
    escape_control_characters()
    try:
        with _interruptible_once(ends_process=arguments is None):
            cli.main(args=arguments, prog_name="dhen-search", standalone_mode=False)
    except click.exceptions.Abort as error:
        if isinstance(error.__cause__, TerminationSignal):
            click.echo("dhen-search: interrupted by SIGTERM; what was finished is safe.", err=True)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption):
            _say_setting(error, sys.argv[1:] if arguments is None else arguments)
        sys.exit(EXIT_CODE)
    except HeadGoneError as error:
        click.echo(f"dhen-search: {error}", err=True)
        # before Ray ends this process: its threads wait for the head that is gone, and crash it as it ends
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)
    except UserError as error:
        fail(str(error))
    except ScoreError as error:
        click.echo(f"dhen-search: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno in NO_SPACE:
            fail(str(disk_full(error.filename or "a file")))
        if error.errno not in REMEDIES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror}. {REMEDIES[error.errno]}; what was finished is safe.")


ALIKE = 0.8
"""How alike a mistyped setting is to the one that is offered, by `difflib`: `trails` is to `trials`, and `rows`
isn't to `grow`."""


def _say_setting(error: click.NoSuchOption, arguments: list[str]) -> None:
    """Prints how the verb takes a setting that was given as an option: `trials=5` for `--trials 5`."""
    from search.config import StudyConfig
    from search.log_config import DemoConfig

    if error.ctx is None:
        return
    metavars = [one.metavar or "" for one in error.ctx.command.params]
    if any("csv.KEY=value" in metavar for metavar in metavars):
        keys = ["csv"]
    elif any("key=value" in metavar for metavar in metavars):
        keys = [*(DemoConfig if error.ctx.info_name == "demo" else StudyConfig).model_fields, "model"]
    else:
        return
    key, dot, below = error.option_name.lstrip("-").replace("-", "_").partition(".")
    options = {one.name for one in error.ctx.command.params}
    if nearest := get_close_matches(key, [one for one in keys if one not in options], 1, ALIKE):
        # the value follows the option, or stands in its own word
        after = "\n".join(arguments).partition(error.option_name)[2].lstrip("=\n")
        value = after.split("\n")[0]
        setting = f"{nearest[0]}{dot}{below}={value or 'VALUE'}"
        click.echo(f"dhen-search: settings have no dashes; write {setting}", err=True)


def _open_missing_streams() -> None:
    """Opens closed standard streams on /dev/null. Otherwise the next pipe or file gets one of their descriptors,
    and whatever a process prints, or redirects, ends up in it."""
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
            setattr(sys, stream, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


@contextlib.contextmanager
def _interruptible_once(*, ends_process: bool) -> Iterator[None]:
    """A context in which SIGTERM raises `TerminationSignal`, as Ctrl-C raises `KeyboardInterrupt`.

    So processes are ended and trials are committed. What comes after the first must not cut that short, and
    is ignored. It stays ignored while the interpreter ends, if the process ends after this.
    """
    if threading.current_thread() is not threading.main_thread():  # no other thread may set signals
        yield
        return
    # a shell's background command, for one, ignores Ctrl-C
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if not ends_process or signal.getsignal(number) is _interrupt:
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    raise TerminationSignal if number == signal.SIGTERM else KeyboardInterrupt


def fail(message: str) -> None:
    """Prints one message on stderr and ends with exit code 2."""
    click.echo(f"dhen-search: {message}", err=True)
    sys.exit(EXIT_CODE)
