"""What can be set of online training: the length of periods, the training, and servers of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from dhen.errors import UserError, unknown_name
from dhen.values import Value, parse
from search.bundles.bundle import Bundle
from search.log_config import set_override
from trials.data.period_length import DAY, parse_length
from trials.job import Job, TablesConfig, TrainingConfig
from trials.training.progressive import FIXED, in_order_of_time

KEYS = ("period", "servers", "training")
"""Keys that a user may give; how tables on servers are trained is below `training.tables`."""


class OnlineSettings(Value):
    """The settings of online training."""

    period: str
    """Length of a period: `1d`, `6h`, or a number of rows."""
    servers: int | None = Field(default=None, gt=0)
    """Number of servers that hold the embedding tables, in processes of their own; None: the trainer does."""
    tables: TablesConfig = TablesConfig()
    """How tables on servers are trained."""
    training: TrainingConfig
    """The training, apart from its tables."""

    @model_validator(mode="after")
    def _servers_are_wanted(self) -> OnlineSettings:
        synchrony = self.tables.synchrony
        if synchrony == "async":
            raise ValueError(
                "training.tables.synchrony=async is for ranks that do not wait for each other, and online "
                "training has one: give training.tables.synchrony=semi or sync"
            )
        if self.servers is not None and synchrony == "local":
            raise ValueError(
                f"servers={self.servers} would hold tables, and training.tables.synchrony=local has them in the "
                "trainer: give training.tables.synchrony=semi or sync too, or leave servers out"
            )
        if self.servers is None and synchrony != "local":
            raise ValueError(
                f"training.tables.synchrony={synchrony} has the tables on servers, and none are given: give "
                "servers=1 or more too, or leave it out"
            )
        return self

    def job(self, bundle: Bundle) -> Job:
        """Returns the job of training a bundle's network online: with what the order of time leaves open."""
        training = in_order_of_time(self.training)
        return bundle.job().replace(training=training.replace(tables=self.tables))


def online_settings(bundle: Bundle, overrides: Sequence[str]) -> OnlineSettings:
    """Returns a bundle's settings with `key=value` words applied. Where servers are asked for, and not how tables
    on them are trained, it is as the bundle's were.

    Raises:
        UserError: for unknown keys and wrong values.
    """
    job = bundle.job()
    training = job.training.to_dict()
    of_bundle = training.pop("tables", {})
    data: dict[str, Any] = {"period": job.period or DAY, "training": training}
    for word in overrides:
        set_override(data, word)
    for unknown in sorted(set(data) - set(KEYS)):
        raise unknown_name("key", unknown, KEYS)
    tables = training.pop("tables", of_bundle if "servers" in data else {})
    data["period"] = str(data["period"])
    parse_length(data["period"])
    data["tables"] = parse(TablesConfig, tables, "training.tables")
    data["training"] = parse(TrainingConfig, training, "training")
    _check_open(data["training"], {word.partition("=")[0] for word in overrides})
    return parse(OnlineSettings, data, "online")


def _check_open(training: TrainingConfig, given: set[str]) -> None:
    """Checks that none of the keys given is settled by the order of time.

    Raises:
        UserError: naming the key, and what it is online.
    """
    settled = in_order_of_time(training)
    for key in sorted(given):
        name = key.removeprefix("training.")
        if name in FIXED and getattr(training, name) != getattr(settled, name):
            raise UserError(
                f"{key}: rows come once, in the order of time, so that online training has {name}="
                f"{getattr(settled, name)}; leave this key out."
            )


def check_servers(job: Job, servers: int) -> None:
    """Checks that each of so many servers has rows of a job's tables.

    Raises:
        UserError: where there are no tables, or fewer rows than servers.
    """
    if not job.features.tables:
        raise UserError(
            f"servers={servers} would hold embedding tables, and the bundle's network has none: leave servers out."
        )
    tables = job.features.tables
    most, what = sum(table.rows for table in tables), "the tables have"
    for table in tables:
        if table.growing is not None and table.rows - 1 < most:
            most, what = table.rows - 1, f"table {table.name!r} has"
    if servers > most:
        raise UserError(f"servers={servers}: {what} {most:,} row(s) to share; give servers={most} at most.")
