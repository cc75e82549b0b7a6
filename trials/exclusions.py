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
    alone: str
    """What the setting is planned with, and why with nothing else."""
    instead: str

    def value(self, training: TrainingConfig) -> object:
        """Returns the setting's value; None for the default."""
        value = getattr(training, self.key)
        return None if value == TrainingConfig.model_fields[self.key].default else value


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


def exclusions_of(training: TrainingConfig) -> list[Exclusion]:
    """Returns the exclusions that the settings of a training bring."""
    return [each for each in EXCLUSIONS if each.value(training) is not None]


def check_together(training: TrainingConfig, strategy: Strategy) -> None:
    """Checks that a training can have a technique.

    Raises:
        UserError: naming the setting and the technique that exclude each other, and what would work.
    """
    for each in exclusions_of(training):
        if not each.goes_with(strategy):
            raise UserError(
                f"training.{each.key}={str(each.value(training)).lower()} is planned with {each.alone}; "
                f"technique={strategy.name} excludes that. {each.instead}, or leave training.{each.key} out."
            )
