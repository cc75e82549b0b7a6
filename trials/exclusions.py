"""Which training settings and techniques exclude each other, in one wording for plans and for what trains.

What ranks exclude (`hsdp` on one host) is the ladder's business, and servers of tables are that of
`trials.planner.choice.servers_needed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dhen.errors import UserError
from trials.job import TrainingConfig
from trials.strategy import COMPRESSING, DELAYING, Strategy


class Exclusion(NamedTuple):
    """A training setting that some techniques cannot have unless it has its default."""

    key: str
    goes_with: Callable[[Strategy], bool]
    """Whether a strategy can have the setting."""
    alone: str
    """The techniques that can have it, and why others cannot."""
    instead: str
    """What would work in place of the others."""


EXCLUSIONS = (
    Exclusion(
        "delayed_update",
        lambda strategy: strategy.dense == DELAYING,
        f"{DELAYING} alone, whose updates are the host's",
        f"Give technique={DELAYING}",
    ),
    Exclusion(
        "optimizer",
        lambda strategy: strategy.can_compress,
        f"{' and '.join(COMPRESSING)} alone, under which every rank has whole gradients",
        f"Give technique={' or technique='.join(COMPRESSING)}",
    ),
    Exclusion(
        "power_sgd_rank",
        lambda strategy: strategy.can_send_low_rank,
        "dp alone, whose gradients DistributedDataParallel averages",
        "Give technique=dp",
    ),
    Exclusion(
        "table_decay",
        lambda strategy: strategy.tables == "device",
        "tables on the device alone, since every step reads every row",
        "Leave host_tables and ssd_tables out",
    ),
)


def exclusions_of(training: TrainingConfig) -> tuple[Exclusion, ...]:
    """Returns the exclusions that the settings of a training bring."""
    return tuple(each for each in EXCLUSIONS if getattr(training, each.key) != _default(each))


def check_together(training: TrainingConfig, strategy: Strategy) -> None:
    """Checks that a training can have a technique.

    Raises:
        UserError: naming the setting and the technique that exclude each other, and what would work.
    """
    for each in exclusions_of(training):
        if not each.goes_with(strategy):
            given, default = (
                f"training.{each.key}={str(value).lower()}"
                for value in (getattr(training, each.key), _default(each))
            )
            raise UserError(
                f"{given} is planned with {each.alone}; technique={strategy.name} excludes that. "
                f"{each.instead}, or {default}."
            )


def _default(exclusion: Exclusion) -> object:
    return TrainingConfig.model_fields[exclusion.key].default
