"""The faults that are put into studies: a registry, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Any, NamedTuple

from chaos import damages, kills, on_ray, services
from chaos.on_ray import OnRay
from chaos.scenes import Hit, OnSmallDisk, Scene, SeveralDrivers, Tracked


class Fault(NamedTuple):
    what: str
    """What happens, in words."""
    inject: Callable[[Any, Random], Hit | None]
    """Puts it into a study at this moment; None where the study had ended before."""
    scene: type[Scene] = Scene
    options: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of the scene."""
    reference: str = "one rank"
    """Which undisturbed study it is held against."""
    prepare: Callable[[Any, Random], None] | None = None
    """What has to be so before the study begins."""
    while_training: bool = False
    """Whether it strikes candidates that train; else whatever the study does, its end included."""
    scene_begins: bool = True
    """Whether it strikes once the first trial has begun; else from the start."""
    tool: str | None = None
    """What a machine must have for it (see `tools`)."""


def _disk(what: str, words: str, inject: Callable[[Any, Random], Hit | None] = services.fill_disk) -> Fault:
    return Fault(
        words,
        inject,
        OnSmallDisk,
        {"what": what},
        prepare=services.almost_full if what == "cache" else None,
        while_training=what == "study",
        scene_begins=what != "cache",
        tool="mount",
    )


_DRIVERS: dict[str, Any] = {"scene": SeveralDrivers, "tool": "postgresql"}
_RAY: dict[str, Any] = {"scene": OnRay, "reference": "two hosts", "tool": "ray"}
FAULTS = {
    "rank_killed": Fault("SIGKILL of a rank", kills.rank, while_training=True),
    "rank_of_two_killed": Fault(
        "SIGKILL of one of two ranks", kills.rank, while_training=True, reference="two ranks"
    ),
    "rank_paused": Fault("SIGSTOP of the only rank, for some seconds", kills.pause_rank, while_training=True),
    "rank_stopped": Fault(
        "SIGSTOP of one of two ranks, for good",
        kills.stop_rank,
        while_training=True,
        reference="two ranks",
        prepare=kills.hang_early,
    ),
    "rank_slow": Fault(
        "one of two ranks runs a tenth of the time",
        kills.slow_rank,
        while_training=True,
        reference="two ranks, long",
    ),
    "fork_server_killed": Fault("SIGKILL of the fork server", kills.fork_server),
    "driver_killed": Fault("SIGKILL of the driver", kills.driver),
    "all_killed": Fault("SIGKILL of all processes of the study at once", kills.everything),
    "one_of_two_drivers_killed": Fault("SIGKILL of one of two drivers", kills.one_driver, **_DRIVERS),
    "both_drivers_killed": Fault(
        "SIGKILL of both drivers and all their processes", kills.everything, **_DRIVERS
    ),
    "second_run": Fault("the same command a second time, beside the first", kills.second_run),
    "agent_killed": Fault("SIGKILL of a host's agent (Ray)", on_ray.agent, while_training=True, **_RAY),
    "node_killed": Fault("a Ray node is lost, another joins", on_ray.node, **_RAY),
    "head_killed": Fault(
        "the Ray head is lost, another cluster is started", on_ray.head, prepare=on_ray.sooner, **_RAY
    ),
    "postgresql_restarted": Fault("PostgreSQL crashes and is started again", services.restart, **_DRIVERS),
    "postgresql_gone": Fault("PostgreSQL is gone for 10 s", services.gone, **_DRIVERS),
    "postgresql_gone_for_long": Fault("PostgreSQL is gone for 120 s", services.gone_for_long, **_DRIVERS),
    "tracking_gone": Fault("the tracking server is gone for some seconds", services.tracking_gone, Tracked),
    "disk_full_checkpoint": _disk("study", "no space for checkpoints, weights, events"),
    "disk_full_ledger": _disk("ledger", "no space for the ledger"),
    "disk_full_cache": _disk("cache", "no space for the prepared log", services.before_the_cache),
    "disk_full_report": _disk("study", "no space for report, MLflow, bundle", services.fill_at_the_end),
    "checkpoint_damaged": Fault(
        "the newest checkpoint is damaged, all processes killed",
        damages.newest_checkpoint,
        while_training=True,
    ),
    "cache_truncated": Fault(
        "a file of the prepared log loses its end, all processes killed", damages.truncated_cache
    ),
    "flipped_bit": Fault(
        "a bit of a file that a study keeps is flipped, all processes killed", damages.flipped_bit
    ),
    "directory_moved": Fault("the run directory is renamed, all processes killed", damages.moved),
    "streams_closed": Fault(
        "SIGKILL of the driver, of a study without standard streams",
        kills.driver,
        prepare=kills.without_streams,
    ),
    "clock_jumps": Fault(
        "the clock jumps by up to a day, forth or back",
        damages.jump,
        prepare=damages.own_clock,
        tool="gcc",
    ),
}
