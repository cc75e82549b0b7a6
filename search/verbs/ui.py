"""`ui`: a study in the browser, at one address: a page that follows it, and MLflow."""

from __future__ import annotations

import atexit
import contextlib
import html
import os
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from dhen.errors import UserError
from search.http import LOCAL, LOOPBACK, TOKEN_VARIABLE, listening, needed_token, shown_address
from search.mlflow.contents import VIEW, view_link
from search.mlflow.store import check_store, database
from search.run_directory import STUDY_FILE, is_driven
from search.verbs.output import PATH

if TYPE_CHECKING:
    from search.live.app import MlflowPages

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Variables one of which is set on Linux where a browser can be opened."""
GRACE_SECONDS, LONGEST_END_SECONDS = 2, 5.0
"""Seconds that answers under way are given at the end, and those after which they are cut short in any case."""


@click.command(
    epilog="""\b
Example: dhen-search ui runs/demo --port 5001
         dhen-search ui runs/demo --host 0.0.0.0
         dhen-search ui --study postgresql://user@host/studies --name ads"""
)
@click.argument("directory", required=False, type=PATH)
@click.option("--study", metavar="URL", help="A study's database, as storage= has it, in place of DIRECTORY.")
@click.option("--name", help="The study of the database to show; by default all that it has.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 5000, or a free one if that is taken.")
@click.option(
    "--host", default=LOOPBACK, help="Address to listen on. Default: 127.0.0.1, this machine alone."
)
@click.option("--token", envvar=TOKEN_VARIABLE, help="What readers must show; by default, one is made.")
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
    place = _place(directory, study, name)
    if open_to_all and (token is not None or host not in LOCAL):
        admits = f"--host {host} lets other machines in"
        reason = admits if token is None else f"--token or ${TOKEN_VARIABLE} gives one"
        raise UserError(f"--no-token asks nobody for a token, but {reason}: leave one of the two out.")
    readers_token = needed_token(token, made=not open_to_all)
    try:
        with listening(host, port) as listener:
            click.echo("the server starts, this takes some seconds ...")
            # whole before there are threads: plotly would take what another has imported of it so far
            import pandas  # noqa: F401
            import uvicorn

            from search.live.app import Gate, web_app

            app, mlflow = web_app(place, name)
            port = listener.getsockname()[1]
            config = uvicorn.Config(
                Gate(app, host=host, port=port, token=readers_token),
                lifespan="off",
                ws="none",
                access_log=False,  # the first request's address holds the token
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
            server = uvicorn.Server(config)
            # in this process, so that nothing can outlive the command
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True, name="server")
            thread.start()
            try:
                _show_addresses(host, port, readers_token, mlflow, opens)
                thread.join()
            finally:
                server.should_exit = True
                thread.join(LONGEST_END_SECONDS)
    except KeyboardInterrupt:
        click.echo("\nended.")
        # the interpreter would wait for answers under way, and take seconds to unload MLflow
        atexit._run_exitfuncs()
        os._exit(0)
    raise RuntimeError(f"the server on port {port} ended by itself; what it printed says why")


def _place(directory: Path | None, study: str | None, name: str | None) -> Path | str:
    """Returns the run directory, or the URL of a database, with something to show."""
    if directory is None and study is not None:
        return study
    if directory is None or study is not None:
        raise UserError("give the directory of a run, e.g. runs/demo, or --study with the URL of a database.")
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
    return directory


def _show_addresses(host: str, port: int, token: str | None, mlflow: MlflowPages, opens: bool | None) -> None:
    """Prints the addresses, and opens a browser at the first if it is wanted."""
    address, query = shown_address(host, port), f"?token={quote(token)}" if token else ""
    if host not in LOCAL:
        click.echo(
            "whoever has the token can look and change runs in MLflow, and it travels unencrypted: "
            f"`ssh -L {port}:localhost:{port} {address[7:].rpartition(':')[0]}` and no --host is safer."
        )
    page = f"{address}/study{query}"
    click.echo(f"the study, as it goes on: {page}")
    has_desktop = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in DISPLAYS)
    if opens or (opens is None and sys.stdout.isatty() and has_desktop):
        _open(page)
    try:
        if mlflow.load() is None:
            click.echo("MLflow has no store of the study on this machine (yet). Ctrl-C ends the server.")
            return
    except UserError as error:
        click.echo(f"MLflow does not start: {error}", err=True)
        return
    for name, identity in mlflow.experiments:
        click.echo(f"study {name}, by NE: {address}/{query}{view_link(identity, VIEW)}")
    if token:
        click.echo(f"programs: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN={token}")
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
