"""`register`: registers a bundle as a model in MLflow."""

from __future__ import annotations

from pathlib import Path

import click

from search.mlflow.model import ALIAS, register_bundle, registry
from search.run_directory import BEST
from search.verbs.output import PATH, RegisteredModel, json_option, print_json

OUTPUT = RegisteredModel


@click.command(
    epilog="""\b
Examples:
  dhen-search register runs/demo/best
  dhen-search register cheap --name ads-ranker --tracking http://tracking.example:5000
"""
)
@click.argument("bundle", type=PATH)
@click.option("--name", help="Name of the registered model. Default: that of the bundle's study.")
@click.option(
    "--tracking",
    help="Address of a tracking server, or a run directory with an mlflow.db. Default: MLFLOW_TRACKING_URI, else "
    f"the run directory whose {BEST}/ the bundle is.",
)
@json_option("Which version of which model it is, as JSON.")
def command(bundle: Path, name: str | None, tracking: str | None, as_json: bool) -> None:
    """Register a bundle as a model in MLflow, with the alias `best` on its version.

    `mlflow models serve -m models:/NAME@best --env-manager local` then answers raw rows with probabilities. What
    is registered already is not copied again. A study does this with its best at its end (register_model=).
    """
    with registry(bundle, tracking) as (client, uri):
        version = register_bundle(client, bundle, name=name)
    if as_json:
        registered = RegisteredModel(
            bundle=str(bundle),
            model=version.name,
            version=int(version.version),
            alias=ALIAS,
            tracking=uri,
        )
        print_json(registered)
        return
    click.echo(f"{bundle}: version {version.version} of the model {version.name}, alias {ALIAS}")
    address = f"models:/{version.name}@{ALIAS}"
    click.echo(f"serve: MLFLOW_TRACKING_URI={uri} mlflow models serve --env-manager local -m '{address}'")
