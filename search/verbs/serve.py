"""`serve`: answers with a bundle's probabilities over HTTP, in MLflow's protocol."""

from __future__ import annotations

from pathlib import Path

import click

from dhen.errors import UserError
from search.http import LOCAL, LOOPBACK, TOKEN_VARIABLE, listening, needed_token, shown_address
from search.serving.workers import ServeSettings, Workers
from search.verbs.output import PATH
from trials.cluster.cluster import parse_bytes

MAX_BODY = "16MiB"


@click.command(
    epilog="""\b
Examples:
  dhen-search serve runs/demo/best --port 5000
  dhen-search serve live --port 5000 --workers 4 --mmap
  curl http://127.0.0.1:5000/invocations -H 'Content-Type: application/json' \\
    -d '{"dataframe_records": [{"site": "a", "price": 3.5}]}'
"""
)
@click.argument("bundle", type=PATH)
@click.option("--port", type=click.IntRange(0, 65535), help="Default: 5000, or a free one if that is taken.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that answer."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Torch's threads in each worker; workers x threads should not exceed the cores.",
)
@click.option(
    "--mmap", "mapped", is_flag=True, help="Leave embedding rows in the file until they are looked up."
)
@click.option("--max-body", default=MAX_BODY, show_default=True, help="Largest body of a request.")
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address to listen on. Another one than this machine's own is answered with a token alone.",
)
@click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help="What clients must show, as `Authorization: Bearer TOKEN`; with --host one is made if none is given.",
)
def command(
    bundle: Path,
    port: int | None,
    workers: int,
    threads: int,
    mapped: bool,
    max_body: str,
    host: str,
    token: str | None,
) -> None:
    """Serve BUNDLE in MLflow's scoring protocol: POST /invocations has raw rows (JSON or CSV) and answers with
    probabilities; GET /ping says whether it is up. Ctrl-C ends it, after the requests that it has begun.

    When the bundle changes on disk (replaced by a newer export, or by an increment) the new version answers
    without a restart; the header X-Model-Version says which one has. One that is damaged is refused.
    """
    from search.bundles.increments import check_is_bundle

    check_is_bundle(bundle)
    try:
        max_body_bytes = parse_bytes(max_body)
    except ValueError as error:
        raise UserError(f"--max-body {max_body}: {error}.") from None
    clients_token = needed_token(token, made=host not in LOCAL)
    settings = ServeSettings(
        bundle=bundle,
        mapped=mapped,
        threads=threads,
        max_body_bytes=max_body_bytes,
        token=clients_token,
    )
    with listening(host, port) as listener:
        address = shown_address(host, listener.getsockname()[1])
        click.echo(f"workers that start: {workers}; this takes some seconds ...")
        pool = None
        try:
            pool = Workers(settings, listener, workers)
            if host not in LOCAL:
                click.echo("note: token and rows travel unencrypted; a proxy in front encrypts.")
            if clients_token is not None and token is None:
                click.echo(f"clients must send: Authorization: Bearer {clients_token}")
            click.echo(f"version {pool.version} answers at {address}/invocations (Ctrl-C ends it)")
            for event in pool.watch():
                click.echo(event, err=True)
        except KeyboardInterrupt:
            click.echo("\nends after the requests that it has begun ...")
        finally:
            listener.close()
            if pool is not None:
                pool.end()
    click.echo("ended.")
