"""`ui`: a study in the browser, at one address: a page that follows it, and MLflow."""

from __future__ import annotations

import atexit
import contextlib
import html
import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from urllib.parse import quote

import click

from dhen.errors import UserError
from search.http.listener import LOCAL, LOOPBACK, listening, shown_address
from search.http.token import VARIABLE, needed_token
from search.live.settings import TOKEN, UiSettings
from search.live.start import Server, names_of, started
from search.mlflow.store import check_store, database
from search.mlflow.views import VIEW, view_link
from search.read_study import stored_studies
from search.run_directory import STUDY_FILE, is_driven

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables one of which is set on Linux where a browser can be opened."""


@click.command(
    epilog="""\b
Example: dhen-search ui runs/demo --port 5001
         dhen-search ui runs/demo --host 0.0.0.0
         dhen-search ui --study postgresql://user@host/studies --name ads"""
)
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--study", metavar="URL", help="A study's database, as storage= has it, in place of DIRECTORY.")
@click.option("--name", help="The study of the database to show; by default all that it has.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 5000, or a free one if that is taken.")
@click.option(
    "--host", default=LOOPBACK, help="Address to listen on. Default: 127.0.0.1, this machine alone."
)
@click.option(
    "--token",
    envvar=VARIABLE,
    help="What readers must show; one is made where none is given.",
)
@click.option(
    "--no-token",
    "open_to_all",
    is_flag=True,
    help="Ask for no token. Every account of this machine can then read the study and do as you in MLflow: read, "
    "write and delete its runs and files, and use its assistant. Not with --host.",
)
@click.option("--open/--no-open", "opens", default=None, help="Open a browser; the default on a desktop.")
def command(
    directory: Path | None,
    study: str | None,
    name: str | None,
    port: int | None,
    host: str,
    token: str | None,
    open_to_all: bool,
    opens: bool | None,
) -> None:
    """Look at the study in DIRECTORY in a browser. Ctrl-C ends it.

    One address has its report, which follows the study while it runs, and MLflow with its trials, their curves and
    files. Without --host it answers this machine alone; it reports to no one. Open the whole address that it
    prints: it ends with a token, which the browser then keeps in a cookie. Programs take MLFLOW_TRACKING_TOKEN.
    """
    _check(directory, study, name)
    if open_to_all and (token is not None or host not in LOCAL):
        reason = (
            f"--host {host} lets other machines in" if token is None else f"--token or ${VARIABLE} gives one"
        )
        raise UserError(f"--no-token asks nobody for a token, but {reason}: leave one of the two out.")
    if study is not None:
        stored_studies(study, name)
    readers_token = needed_token(token, made=not open_to_all)
    try:
        with listening(host, port) as listener:
            settings = UiSettings(
                directory=directory,
                database=study,
                study=name,
                host=host,
                port=listener.getsockname()[1],
                token=readers_token,
                host_names=names_of(host),
            )
            click.echo("the server starts, this takes some seconds ...")
            with started(settings, listener) as server:
                _say_where(settings, server, opens=opens)
                server.process.wait()
    except KeyboardInterrupt:
        click.echo("\nended.")
        return
    raise RuntimeError(
        f"the server at {server.address} ended by itself with exit code {server.process.returncode}"
    )


def _check(directory: Path | None, study: str | None, name: str | None) -> None:
    """Checks that there is something to show."""
    if (directory is None) == (study is None):
        raise UserError("give the directory of a run, e.g. runs/demo, or --study with the URL of a database.")
    if directory is None:
        return
    if name is not None:
        raise UserError(f"--name names a study of a database (--study); {directory} holds one alone.")
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give the one of a run, e.g. runs/demo.")
    if not ((directory / STUDY_FILE).exists() or database(directory).exists() or is_driven(directory)):
        raise UserError(
            f"{directory}: nothing to browse, there is no {STUDY_FILE}, there is no {database(directory).name}. "
            f"`dhen-search run --out {directory}` starts a study there."
        )
    check_store(directory)


def _say_where(settings: UiSettings, server: Server, *, opens: bool | None) -> None:
    """Prints the addresses, and opens a browser at the first where it is wanted."""
    address = shown_address(settings.host, settings.port)
    query = f"?{TOKEN}={quote(settings.token)}" if settings.token else ""
    if settings.host not in LOCAL:
        click.echo(
            "whoever has the token can look and change runs in MLflow, and it travels unencrypted: "
            f"`ssh -L {settings.port}:localhost:{settings.port} {address.split('/')[-1].split(':')[0]}` and no "
            "--host is safer."
        )
    page = f"{address}/study{query}"
    click.echo(f"the study, as it goes on: {page}")
    if opens or (opens is None and sys.stdout.isatty() and _has_desktop()):
        _open(page)
    try:
        experiments = server.experiments()
    except RuntimeError as error:
        click.echo(f"MLflow does not start: {error}", err=True)
        return
    if experiments is None:
        click.echo("MLflow has no store of the study on this machine (yet). Ctrl-C ends the server.")
        return
    for name, identity in experiments:
        click.echo(f"study {name}, by NE: {address}/{query}{view_link(identity, VIEW)}")
    if settings.token:
        click.echo(f"programs: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN={settings.token}")
    click.echo(f"MLflow answers at {address}{f'/{query}' if query else ''} (Ctrl-C ends it)")


def _open(page: str) -> None:
    """Opens a browser by way of a file that leads to the page, and goes when this command ends: on the browser's
    command line every account could read the token. It lies in the home folder: sandboxed browsers see no other.
    """
    opened = False
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(".html", "dhen-search-ui-", Path.home())
        atexit.register(Path(name).unlink, missing_ok=True)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={html.escape(page)}">')
        opened = webbrowser.open(Path(name).as_uri())
    if not opened:
        click.echo("no browser could be opened here; open the address above in one.")


def _has_desktop() -> bool:
    """Whether a browser with a window can be expected."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in DISPLAYS)
