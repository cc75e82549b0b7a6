"""`register`: registers a bundle as a model in MLflow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dhen.errors import UserError
from search.run_directory import BEST
from search.tracking.register import register_bundle
from trials.mlflow.registry import ALIAS
from trials.mlflow.server import VARIABLE, check_server, open_server, server_errors
from trials.mlflow.store import database, open_store, store_errors, store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient


@click.command(
    epilog="""\b
Examples:
  dhen-search register runs/demo/best
  dhen-search register cheap --name ads-ranker --tracking http://tracking.example:5000
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the registered model. Default: that of the bundle's study.")
@click.option(
    "--tracking",
    help="Address of a tracking server, or a run directory with an mlflow.db. Default: MLFLOW_TRACKING_URI, else "
    f"the run directory whose {BEST}/ the bundle is.",
)
def command(bundle: Path, name: str | None, tracking: str | None) -> None:
    """Register a bundle as a model in MLflow, with the alias `best` on its version.

    `mlflow models serve -m models:/NAME@best --env-manager local` then answers raw rows with probabilities. What
    is registered already is not copied again. A study does this with its best at its end (register_model=).
    """
    with _registry(bundle, tracking) as (client, uri):
        version = register_bundle(client, bundle, name=name)
    click.echo(f"{bundle}: version {version.version} of the model {version.name}, alias {ALIAS}")
    address = f"models:/{version.name}@{ALIAS}"
    click.echo(f"serve: MLFLOW_TRACKING_URI={uri} mlflow models serve --env-manager local -m '{address}'")


@contextmanager
def _registry(bundle: Path, tracking: str | None) -> Iterator[tuple[MlflowClient, str]]:
    """A client of the store that has the registry, and its address; its errors become a UserError.

    Raises:
        UserError: where no registry is named, or it does not answer.
    """
    source, given = ("--tracking", tracking) if tracking else (VARIABLE, os.environ.get(VARIABLE))
    beside = bundle.absolute().parent
    directory = Path(given) if given else beside if database(beside).exists() else None
    if given and "://" in given:
        server = check_server(given, source)
        with server_errors(server):
            yield open_server(server), server
    elif directory is not None and database(directory).exists():
        with store_errors(directory):
            yield open_store(directory), store_uri(directory)
    else:
        raise UserError(
            f"{bundle}: name with --tracking where to register the model, a tracking server such as "
            f"http://tracking.example:5000 or a run directory such as runs/demo; received {given or 'none'}."
        )
