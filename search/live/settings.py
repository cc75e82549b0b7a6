"""What the server of `dhen-search ui` is told: what it shows, where it listens, who may look."""

from __future__ import annotations

from pathlib import Path

from dhen.values import Value

VARIABLE = "DHEN_SEARCH_UI"
"""Variable by which the server gets its settings: unlike a command line, no other user can read it."""
LISTENER = "DHEN_SEARCH_UI_LISTENER"
"""Variable with the file descriptor of the socket that the server listens on."""
READY = "DHEN_SEARCH_UI_READY"
"""Variable with the file descriptor that the server writes a byte to once it answers."""
TOKEN = "token"
"""Name of the query parameter that carries the token."""


class UiSettings(Value):
    """Settings of one server; it shows a run directory, or the studies of a database."""

    directory: Path | None = None
    """Run directory of the study; None where only a database is named."""
    database: str | None = None
    """SQLAlchemy URL of the database whose studies are shown; None for a run directory."""
    study: str | None = None
    """Name of the one study of the database that is shown; None for all."""
    host: str
    port: int
    token: str | None = None
    """What every request must show; None with `--no-token`."""
    host_names: tuple[str, ...] = ()
    """Names, beside `localhost` and IP addresses, under which browsers may ask for this server."""
