"""NE against what it costs, as points: the data of the front of FLOPs, and of that of table bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dashboards.figures.frame import Frame, frame
from dashboards.figures.techniques import study_techniques
from dashboards.rows import TrialRow, trial_rows
from dashboards.units import known, si
from trials.record import Outcome, TrialKind, TrialRecord
from trials.study_record import Comparison, StudyRecord

NEAR_FLOOR = 1.0
"""The floor is drawn where it is no farther below the lowest NE than this many heights of the frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What NE is drawn against."""

    of: Callable[[TrialRecord], float | None]
    """A trial's price; None where it is not known."""
    words: Callable[[float], str]
    """A price in words: `1.23 M FLOPs`."""


FLOPS = Price(of=lambda trial: trial.job.flops, words=lambda flops: f"{si(flops)} FLOPs")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One trial in the plane."""

    row: TrialRow
    ne: float
    price: float
    """FLOPs, or what else NE is drawn against."""

    @property
    def number(self) -> int:
        """Number of the trial."""
        return self.row.trial.number

    @property
    def stopped(self) -> bool:
        """Whether the trial ended before its budget was used up: its NE could have become lower."""
        return self.row.trial.result.outcome is not Outcome.COMPLETED

    @property
    def average(self) -> bool:
        """Whether the trial is a mean of networks, in place of one."""
        return self.row.trial.kind is TrialKind.AVERAGE

    @property
    def technique(self) -> str | None:
        """The memory technique that the trial is planned for; None for an average, which is not trained, and where
        none fits."""
        return None if self.average else self.row.trial.plan.unsized_technique

    @property
    def memory_bytes(self) -> int | None:
        """Predicted peak of a rank; None where nothing was planned."""
        return None if self.average else self.row.trial.plan.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WinnerInterval:
    """Where a winner's NE lies by its retrainings: its difference on test, of the baseline's NE on validation."""

    number: int
    price: float
    ne: float
    low: float
    high: float
    words: str
    """The verdict: `yes`, `no`, `cannot tell`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontInfo:
    """What the figure shows."""

    price: Price
    candidates: tuple[FrontPoint, ...]
    """Finished candidates and averages that have an NE and a price, in order of number."""
    front: tuple[FrontPoint, ...]
    """Points on the front, in order of price."""
    networks_front: tuple[FrontPoint, ...]
    """The front without averages, in order of FLOPs; empty where no average is on the front."""
    baseline: FrontPoint | None
    best: FrontPoint | None
    knee: FrontPoint | None
    floor: float | None
    """Lowest reachable NE on validation."""
    frame: Frame | None
    """Range of the NE axis; None where there is no point."""
    floor_in_frame: bool
    techniques: tuple[str, ...]
    """All memory techniques of the study, in the order of the ladder."""
    intervals: tuple[WinnerInterval, ...]
    """Intervals of the winners that were compared with the baseline."""


def info_against(
    price: Price,
    record: StudyRecord,
    on_front: Sequence[int],
    *,
    networks: Sequence[int] = (),
    knee: int | None = None,
) -> FrontInfo:
    """What a figure of NE against a price shows.

    Args:
        price: what NE is drawn against.
        record: the study's record.
        on_front: numbers of the trials on the front.
        networks: numbers of the networks on the front without averages, where it is drawn too.
        knee: number of the trial where the front bends most, where it is marked.
    """
    drawn = (_point(row, price) for row in trial_rows(record))
    points = {point.number: point for point in drawn if point is not None}
    numbers = {trial.number for trial in (*record.field, *record.averages)}
    candidates = tuple(point for number, point in points.items() if number in numbers)
    front = [points[number] for number in on_front if number in points]
    alone = [points[number] for number in networks if number in points]
    baseline = points.get(record.baseline) if record.baseline is not None else None
    intervals = tuple(_intervals(record.comparisons, points, baseline))
    floor = (record.log.ne_floor or {}).get("validation")
    frame_without_floor = _frame(candidates, front, baseline, intervals, None)
    near = frame_without_floor is not None and floor is not None and _near(floor, frame_without_floor)
    return FrontInfo(
        price=price,
        candidates=candidates,
        front=tuple(sorted(front, key=lambda point: point.price)),
        networks_front=tuple(alone) if any(point.average for point in front) else (),
        baseline=baseline,
        best=points.get(record.best) if record.best is not None else None,
        knee=points.get(knee) if knee is not None else None,
        floor=floor,
        frame=_frame(candidates, front, baseline, intervals, floor if near else None),
        floor_in_frame=near,
        techniques=study_techniques(record),
        intervals=intervals,
    )


def _point(row: TrialRow, price: Price) -> FrontPoint | None:
    """The trial's point; None where a coordinate is missing, and while the trial still trains."""
    ne, value = row.ne, price.of(row.trial)
    if row.trial.result.outcome is Outcome.RUNNING or ne is None or not value or not known(value):
        return None
    return FrontPoint(row=row, ne=ne, price=value)


def _intervals(
    comparisons: Sequence[Comparison], points: dict[int, FrontPoint], baseline: FrontPoint | None
) -> list[WinnerInterval]:
    """Intervals on the axis of the figure: relative to the baseline's NE there."""
    if baseline is None:
        return []
    return [
        WinnerInterval(
            number=each.trial,
            price=points[each.trial].price,
            ne=baseline.ne * (1 + each.difference_percent / 100),
            low=baseline.ne * (1 + each.low_percent / 100),
            high=baseline.ne * (1 + each.high_percent / 100),
            words=each.better.value,
        )
        for each in comparisons
        if each.trial in points
    ]


def _frame(
    candidates: tuple[FrontPoint, ...],
    front: list[FrontPoint],
    baseline: FrontPoint | None,
    intervals: tuple[WinnerInterval, ...],
    floor: float | None,
) -> Frame | None:
    always = [point.ne for point in front] + ([baseline.ne] if baseline else [])
    always += [end for interval in intervals for end in (interval.low, interval.high)]
    always += [floor] if floor is not None and (always or candidates) else []
    return frame([point.ne for point in candidates], always) if candidates or always else None


def _near(floor: float, frame_without_floor: Frame) -> bool:
    return frame_without_floor.low - floor <= NEAR_FLOOR * (
        frame_without_floor.high - frame_without_floor.low
    )
