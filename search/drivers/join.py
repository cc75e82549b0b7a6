"""How a further driver joins a study: it finds the study in its database, its settings, and a run directory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.exc import ArgumentError

from dhen.errors import UserError
from dhen.values import parse
from search.config import ADDRESSES, StudyConfig, written_config
from search.log_config import set_override
from search.read_study import HEAD, run_directory_of, stored_studies
from trials.address import LOCAL
from trials.storage.database import masked, parsed_url
from trials.storage.ledger import Ledger

SETTINGS = "settings"
"""Key of the facts that holds the settings with which the study was begun, for drivers that join it."""
WRITTEN = "written"
"""Key of the facts that says whether the end of a study with several drivers is in its report and in MLflow."""
OWN_KEYS = ("parallel", "threads", "tracking", "optuna")
"""Settings that a further driver may have of its own: what its machine takes, and where other services are."""


class Joined(NamedTuple):
    """A study that is joined."""

    config: StudyConfig
    directory: Path
    """The run directory to work in."""
    elsewhere: str | None
    """Run directory of the study, where it is not on this machine."""


def for_other_drivers(config: StudyConfig) -> dict[str, Any]:
    """The settings of a study as its ledger keeps them: without the address of the ledger itself, and without
    addresses that have a password."""
    return {
        key: None if key == "storage" or (key in ADDRESSES and value and masked(value) != value) else value
        for key, value in config.to_dict().items()
    }


def join(
    url: str, name: str | None, out: Path | None, data: Sequence[str], overrides: Iterable[str]
) -> Joined:
    """Finds a study that has begun, for one more driver of it.

    Args:
        url: the study's database.
        name: the study's name there; None where it is the only one.
        out: the run directory; by default the study's own, where it is on this machine.
        data: files of the log, where they have other names here.
        overrides: `key=value` words of what this driver may have of its own.

    Raises:
        UserError: for a database that takes one driver alone, has no such study, or several to choose from; for a
            setting that all drivers of a study share.
    """
    _check_server(url)
    studies = stored_studies(url, name)
    if len(studies) > 1:
        names = ", ".join(study.name for study in studies)
        raise UserError(f"the database holds several studies ({names}); say with --name which one to join.")
    (study,) = studies
    facts = _facts(url, study.name)
    home = run_directory_of(url, study)
    if home is not None and out is None:
        out = home
    at_home = home is not None and out is not None and out.resolve() == home.resolve()
    settings = written_config(home).to_dict() if home is not None else _noted_settings(facts, study.name)
    if settings.get("launcher") != LOCAL:
        raise UserError(
            f"study {study.name!r} trains on the hosts of a Ray cluster (launcher={settings['launcher']}), which "
            "its one driver reserves; with launcher=local it takes several."
        )
    for word in overrides:
        key = word.partition("=")[0]
        if key not in OWN_KEYS:
            raise UserError(
                f"{masked(word)!r}: all drivers of a study share its settings; a further one may have its own "
                f"{', '.join(OWN_KEYS)}."
            )
        set_override(settings, word)
    settings |= {"storage": url, "name": study.name} | ({"data": list(data)} if data else {})
    return Joined(
        config=parse(StudyConfig, settings, f"the settings of study {study.name}"),
        directory=out or Path("runs") / study.name,
        elsewhere=None if at_home else study.directory,
    )


def _check_server(url: str) -> None:
    """Raises UserError for a database that takes one driver."""
    try:
        kind = parsed_url(url).get_backend_name()
    except ArgumentError:
        return  # opening it says what is wrong
    if kind == "sqlite":
        raise UserError(
            f"{masked(url)}: a SQLite database takes one driver; a study with several has its ledger on "
            "PostgreSQL: `dhen-search run storage=postgresql://user@host/studies` begins one."
        )


def _facts(url: str, name: str) -> dict[str, Any]:
    """What the study notes of itself; raises UserError where nothing is left to do."""
    ledger = Ledger(url, name, create=False)
    try:
        facts = ledger.facts() or {}
    finally:
        ledger.close()
    if facts.get(HEAD, {}).get("finished") and facts.get(WRITTEN, True):
        raise UserError(
            f"study {name!r} is finished; `dhen-search run` with its run directory and more trials= or minutes= "
            "goes on, and then takes further drivers."
        )
    return facts


def _noted_settings(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings that the study's driver has left for others."""
    settings: dict[str, Any] | None = facts.get(SETTINGS)
    if settings is None:
        raise UserError(
            f"study {name!r} was begun by a version that leaves no settings for other drivers, and its run "
            "directory is not on this machine; start the worker where it is."
        )
    return settings
