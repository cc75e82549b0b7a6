"""Predicted seconds of steps on this machine, corrected by the trainings that have ended on it.

The planner's roofline (`trials.planner.time`) is off by a factor of one to six on a CPU. So every training that
ends here leaves what was predicted and what a step took, in the user's cache, and predictions that follow are
corrected by them. Only seconds that are shown, and the division of a study's minutes, are corrected. The planner
chooses a strategy by the roofline alone: it cannot import this module.

Left out: kinds of modules, other load on the machine, launchers' hosts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import Timeout
from numpy.typing import NDArray
from pydantic import Field

from dhen.atomic_write import write_atomically
from dhen.errors import UserError
from dhen.values import Value
from trials.cluster.cluster import Cluster
from trials.cluster.machine import machine_name
from trials.planner.estimates import StepTime
from trials.planner.plan import Plan
from trials.records.trial_record import TrialRecord
from trials.store.user_cache import locked, user_cache

ENOUGH = 8
"""Number of trainings from which a step's items have factors of their own; before, all have one."""
MOST = 200
"""Number of trainings that are kept for one machine, torch, version and number of ranks: the newest."""
SPREAD = 4.0
"""Factor by which the roofline may be off on a CPU: beside other work steps took 1.2 to 6.6 times as long."""
TRUST = 0.5
"""Number of trainings that the roofline counts as, in the factor of fewer than `ENOUGH`."""
RIDGE = 0.03
"""Weight with which the factors of items are held together, beside one training's weight of 1."""
WAIT_SECONDS = 5.0
"""Longest time for which a training that has ended waits for another command to write its own."""
LOG = logging.getLogger(__name__)


class TimedStep(Value):
    """A step of a training that has ended."""

    operations: float = Field(ge=0.0)
    """Predicted seconds of what operations take however small they are (`StepTime.operations`)."""
    traffic: float = Field(gt=0.0)
    """All other predicted seconds, times the memory's bandwidth: bytes. How fast memory and products are found to
    be when a study begins depends on what else the machine does; the ratio of the two hardly does."""
    seconds: float = Field(gt=0.0)
    """Measured seconds."""
    precision: str
    threads: int


class TimedSteps(Value):
    """What a file holds: `key`, of which its name is a hash, and the steps in the order of their ends."""

    key: tuple[str, ...]
    steps: tuple[TimedStep, ...] = ()


class Correction(NamedTuple):
    """What a step takes, from what the roofline says of it."""

    constant: float
    """Seconds of any step."""
    of_operations: float
    """Factor of the seconds of operations."""
    of_traffic: float
    """Factor of all other seconds."""
    trainings: int
    """Number of trainings that it rests on."""
    spread: float
    """Factor by which a corrected prediction is typically off: what those trainings are off by, on average."""

    def seconds(self, items: Mapping[str, float]) -> float:
        """Corrected seconds of a step of so many predicted seconds by item, which may have a `total`."""
        operations, others = _parted(items)
        return self.constant + self.of_operations * operations + self.of_traffic * others

    @property
    def words(self) -> str:
        """How sure predicted seconds are, in a sentence."""
        if not self.trainings:
            return (
                f"Seconds are uncertain by a factor of {self.spread:.2g}: no training with as many ranks has been "
                "measured on this machine so far. Those that end here correct them."
            )
        few = self.trainings < ENOUGH
        words = (
            f"{self.trainings} training{'s' * (self.trainings > 1)} measured on this machine{' so far' * few}"
        )
        return f"Seconds are uncertain by a factor of {self.spread:.2g}, corrected by {words}."


class StepCorrections(NamedTuple):
    """Corrections of predicted seconds on this machine."""

    clusters: tuple[Cluster, ...]
    """This machine in each shape that trainings may have."""
    threads: int
    """Threads of a rank."""

    @classmethod
    def here(cls, clusters: tuple[Cluster, ...], threads: int | None = None) -> StepCorrections:
        """Corrections for ranks of so many threads; by default for as many as torch takes."""
        return cls(clusters, threads or torch.get_num_threads())

    def correction(self, shape: str, precision: str) -> Correction:
        """What trainings in this shape and precision have shown so far, or all in this shape if these are few."""
        path, bandwidth = _path(_key(shape)), self._cluster(shape).memory_bandwidth
        try:
            found = path.stat()
        except OSError:
            return fitted((), bandwidth)
        # a file that is written anew has another inode
        return _read_and_fitted(path, (found.st_ino, found.st_mtime_ns), precision, self.threads, bandwidth)

    def of_record(self, record: TrialRecord) -> Correction | None:
        """What holds for a trial's plan; None if that has no seconds."""
        summary = record.plan.summary
        if summary is None or not summary.step_seconds:
            return None
        return self.correction(record.plan.ranks or self.clusters[0].shape, record.job.training["precision"])

    def seconds(self, record: TrialRecord) -> float | None:
        """Seconds of a step of a trial's plan, corrected by what is known now; as noted if that has no items."""
        correction, summary = self.of_record(record), record.plan.summary
        if correction is None or summary is None:
            return record.plan.step_seconds
        return correction.seconds(summary.step_seconds)

    def factor(self, plan: Plan) -> float:
        """By which all seconds of a plan are multiplied, so that those of the chosen strategy, or of the closest,
        are corrected: what is faster by the roofline stays so. 1 if nothing was priced."""
        if plan.closest is None:
            return 1.0
        time = plan.closest.time
        return self.correction(plan.shape, plan.precision).seconds(time.to_dict()) / time.total

    def of_plan(self, plan: Plan) -> Plan:
        """The plan as it is shown: with corrected seconds, and how sure they are."""
        factor = self.factor(plan)

        def corrected(time: StepTime) -> StepTime:
            return time.replace(**{name: factor * seconds for name, seconds in time.to_dict().items()})

        shown = tuple(priced.replace(time=corrected(priced.time)) for priced in plan.strategies)
        words = self.correction(plan.shape, plan.precision).words if shown else None
        return plan.replace(strategies=shown, notes=(*plan.notes, *filter(None, [words])))

    def note(self, record: TrialRecord) -> None:
        """Keeps what a step took of a trial whose last attempt has ended well, as far as the disk allows."""
        attempt = record.attempts[-1]
        if attempt.plan is None or not attempt.plan.step_seconds or not attempt.measured_step_seconds:
            return
        shape = attempt.plan.ranks or self.clusters[0].shape
        operations, others = _parted(attempt.plan.step_seconds)
        step = TimedStep(
            operations=operations,
            traffic=others * self._cluster(shape).memory_bandwidth,
            seconds=attempt.measured_step_seconds,
            precision=record.job.training["precision"],
            threads=self.threads,
        )
        key = _key(shape)
        path = _path(key)
        try:
            with locked(path, seconds=WAIT_SECONDS):
                kept = (*_steps(path), step)[-MOST:]
                write_atomically(path, TimedSteps(key=key, steps=kept).model_dump_json(indent=1))
        except (OSError, Timeout, UserError) as error:
            LOG.info("%s was not written: %s", path, error)

    def _cluster(self, shape: str) -> Cluster:
        return next((one for one in self.clusters if one.shape == shape), self.clusters[0])


def _parted(items: Mapping[str, float]) -> tuple[float, float]:
    """Returns the predicted seconds of operations, and all others less what is hidden."""
    operations, hidden = items.get("operations", 0.0), items.get("hidden", 0.0)
    whole = sum(seconds for name, seconds in items.items() if name not in ("hidden", "total"))
    return operations, whole - operations - hidden


@lru_cache
def _key(shape: str) -> tuple[str, ...]:
    """Returns what trainings have in common that correct each other: another version prices steps otherwise."""
    return machine_name(), torch.__version__, version("dhen-search"), shape


def _path(key: tuple[str, ...]) -> Path:
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return user_cache() / "step-times" / f"{name}.json"


def _steps(path: Path) -> tuple[TimedStep, ...]:
    """Returns the steps that a file holds; none if there is no file, or none that can be read."""
    try:
        return TimedSteps.model_validate_json(path.read_bytes()).steps
    except (OSError, ValueError):
        return ()


@lru_cache(maxsize=16)
def _read_and_fitted(
    path: Path, _version: tuple[int, int], precision: str, threads: int, bandwidth: float
) -> Correction:
    """Returns the correction by a file's steps; a file that has changed is read again."""
    steps = _steps(path)
    alike = [step for step in steps if (step.precision, step.threads) == (precision, threads)]
    return fitted(alike if len(alike) >= ENOUGH else steps, bandwidth)


def fitted(steps: Sequence[TimedStep], bandwidth: float) -> Correction:
    """Returns the correction by these steps if memory has this bandwidth, in bytes/s.

    Before there are `ENOUGH`, all seconds have one factor, the median's, drawn towards 1. Then a constant and two
    factors are fitted by least squares of relative errors, with a ridge that draws them towards 0 and towards the
    one factor. A measured step is in the denominator, so that one slowed by other work counts little; that draws
    predictions down, which the median of what is left puts right.
    """
    if not steps:
        return Correction(0.0, 1.0, 1.0, 0, SPREAD)
    seconds = np.array([step.seconds for step in steps])
    predicted_N2 = np.array([(step.operations, step.traffic / bandwidth) for step in steps])
    factor = math.exp(_median_log(seconds, predicted_N2.sum(axis=1)))
    if len(steps) < ENOUGH:
        factor **= len(steps) / (len(steps) + TRUST)
        coefficients = np.array([0.0, factor, factor])
    else:
        # in these units the one factor is (0, 1, 1), and a constant of 1 a third of a usual step
        units = np.array([np.median(seconds) / 3, factor, factor])
        rows = np.insert(predicted_N2, 0, 1.0, axis=1) * units / seconds[:, np.newaxis]
        rows = np.vstack([rows, math.sqrt(RIDGE) * np.eye(3)])
        wanted = np.concatenate([np.ones(len(steps)), math.sqrt(RIDGE) * np.array([0.0, 1.0, 1.0])])
        # seconds are not negative
        coefficients = units * np.maximum(np.linalg.lstsq(rows, wanted, rcond=None)[0], 0.0)
        coefficients *= math.exp(_median_log(seconds, coefficients[0] + predicted_N2 @ coefficients[1:]))
    off = np.abs(np.log(seconds / (coefficients[0] + predicted_N2 @ coefficients[1:])))
    spread = math.exp((math.log(SPREAD) + float(off.sum())) / (1 + len(steps)))
    constant, of_operations, of_traffic = map(float, coefficients)
    return Correction(constant, of_operations, of_traffic, len(steps), spread)


def _median_log(measured: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    return float(np.median(np.log(measured / predicted)))
