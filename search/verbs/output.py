"""What verbs print with `--json`, if it is no value of its own elsewhere; docs/formats.md has all shapes.

Each verb that reports has `OUTPUT`, the class of what it prints (a list if it prints several). Stdout then
holds that alone, and messages go to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import Field, SerializeAsAny, TypeAdapter

from dhen.values import Value
from search.bundles.int8_cost import Int8Cost
from trials.cluster.cluster import Link, PeakFlops
from trials.records.serving_limits import ForwardTime
from trials.records.study_record import ColumnFinding, Comparison
from trials.records.trial_record import NAN_AS_WORD, Metrics

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
"""Type of arguments and options that are paths."""


def json_option(help_text: str) -> Callable[[Command], Command]:
    """Returns the decorator that gives a command the option `--json`, whose value is named `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help_text)


def print_json(value: Value | Sequence[Value]) -> None:
    """Prints what a verb has to say on stdout, as JSON; NaN, which JSON has not, as a word."""
    values = SerializeAsAny[Value] | list[SerializeAsAny[Value]]
    shape: TypeAdapter[Any] = TypeAdapter(values, config=NAN_AS_WORD)
    click.echo(shape.dump_json(value if isinstance(value, Value) else list(value), indent=1).decode())


class PreparedSummary(Value):
    """`prepare`: a log in its columnar cache, or with `--check` what its first rows show."""

    directory: str | None
    """The cache's folder; null with `--check`, as all that only the whole log can show."""
    fingerprint: str | None
    rows: dict[str, int] | None
    """Number of rows by split."""
    base_rate: dict[str, float] | None
    """Fraction of positives by split."""
    tables: int
    """Number of embedding tables."""
    table_rows: int | None
    """Number of their rows together."""
    numeric: int
    """Number of numeric inputs."""
    notes: tuple[str, ...]
    """What was noticed and decided, in sentences."""
    columns: tuple[ColumnFinding, ...]
    """Why columns have their roles; none if the schema was given."""
    unknown: tuple[str, ...] = ()
    """What only the whole log can show, in sentences."""


class GeneratedLog(Value):
    """`demo`: a generated log."""

    file: str
    rows: int


class FinishedRun(Value):
    """`run` and `average`: what a study has come to; `status --json` has the whole of it."""

    directory: str
    finished: bool
    baseline: int | None
    best: int | None
    knee: int | None
    front: tuple[int, ...]
    best_ne: float | None
    """NE of the best on validation."""
    baseline_ne: float | None
    """NE of the baseline on validation."""
    sentences: tuple[str, ...]
    """The findings in words."""
    report: str
    """Path of the report."""
    bundle: str | None
    """Path of the bundle of the best; None if nothing was found."""


class WrittenReport(Value):
    """`report`: a report that was written anew."""

    report: str
    """Its path."""
    sentences: tuple[str, ...]
    """The findings in words."""
    comparisons: tuple[Comparison, ...]
    """Winners against the baseline, once they were confirmed."""


class ExportedBundle(Value):
    """`export`: a trial that was taken away."""

    bundle: str
    """Path of what was written."""
    format: str
    """`bundle`, or `pt2` for a folder with the compiled model."""
    trial: int
    architectures: tuple[str, ...]
    """The model in short; of an average one for each of its networks."""
    ne: float
    """NE on validation at the end of training; what tables of 8 bits come to, `int8_tables` says."""
    flops: float
    comparison: Comparison | None
    """How it compares with the baseline, if it was confirmed."""
    forward: ForwardTime | None
    """Its measured forward pass; None if this device cannot hold it."""
    int8_tables: Int8Cost | None
    """What tables of 8 bits cost and save, if it has them."""


class RegisteredModel(Value):
    """`register`: a bundle that is a model in MLflow."""

    bundle: str
    model: str
    """Name of the registered model."""
    version: int
    alias: str
    """Alias that the version has."""
    tracking: str
    """Address of the store that it is registered in."""


class VerifiedSplit(Value):
    """Metrics of a bundle on one split of a log."""

    now: Metrics
    exported: Metrics | None
    """What they were at export; None if there is nothing to compare with."""


class VerifiedBundle(Value):
    """`verify`: whether a bundle still gives its numbers."""

    bundle: str
    version: int
    """Number of its newest version; 0 without increments."""
    flops: float
    """FLOPs per example, now as at export."""
    scores_within: float
    """Largest difference between scores of the stored examples now and at export."""
    forward: ForwardTime | None
    forward_exported: ForwardTime | None
    same_log: bool | None
    """Whether `--data` is the log that it was trained on; None without `--data`."""
    splits: dict[str, VerifiedSplit]
    """Metrics of validation and test, with `--data`."""
    ne_off: float
    """Largest difference between an NE now and at export; 0 if nothing was compared."""
    tolerance: float
    """Difference in NE that is allowed, as precision and machine may differ."""
    holds: bool
    """Whether all of it is within the tolerance; if not, the exit code is 1."""


class TrainedBundle(Value):
    """`train`: one configuration, trained and written as a bundle."""

    bundle: str
    """Its path."""
    architecture: str
    """The model in short."""
    epochs: int
    """Passes at most of the training that was kept."""
    trainings: int
    """Number of trainings among which it was the best: several if passes are `auto`."""
    seed: int
    refit: bool
    """Whether it was trained once more then, on the rows of training and validation together."""
    validation: Metrics
    """Metrics on validation, before it was trained on."""
    test: Metrics


class OnlineIncrement(Value):
    """A period that was scored, trained on, and left an increment."""

    period: str
    """When it begins, or its number."""
    increment: int
    """Number of the version that it made."""
    online: Metrics
    """Metrics of the network as it had learnt until then."""
    frozen: Metrics
    """Metrics of the bundle as it was."""
    begun: int
    """Number of ids that have got a row."""
    gone: int
    """Number of ids that have lost theirs."""
    size_bytes: int


class OnlineBundle(Value):
    """`online`: a bundle that was trained on newer rows. NE of a period whose labels are all equal is "NaN"."""

    bundle: str
    version: int
    figure: str
    """Path of the figure of NE by period."""
    notes: tuple[str, ...]
    increments: tuple[OnlineIncrement, ...]
    """Those of the rows in `--data`, of earlier commands too."""


class AppliedBundle(Value):
    """`apply`: a bundle with increments."""

    bundle: str
    version: int
    whole: str | None
    """Path of the bundle that has them in its weights, if `--out` was given."""


class ScoredRows(Value):
    """`predict`: a file of scores."""

    file: str
    rows: int


class CacheItem(Value):
    """Something that the cache has."""

    name: str
    """By which it is cleared: its path in the cache's folder."""
    what: str
    bytes: int
    last_used: str
    """ISO 8601, UTC."""


class CacheFacts(Value):
    """`cache`: what is kept for later commands, or with `--clear` what still is."""

    directory: str
    limit_bytes: int
    entries: tuple[CacheItem, ...]
    """The longest unused first."""
    cleared: tuple[str, ...]
    """Names of what `--clear` removed."""


class SpaceSizes(Value):
    """How large a space is (`spaces.nearest.SpaceSize`)."""

    model_config = NAN_AS_WORD

    architectures: int | float
    training_choices: int | float
    real_axes: int
    axes: int


class SpaceFacts(Value):
    """`spaces`: one search space."""

    name: str
    size: SpaceSizes
    space: dict[str, Any] | None = Field(default=None, exclude_if=lambda space: space is None)
    """The space as its file has it, if NAME was given."""


class BlockSetting(Value):
    """A setting of an interaction module."""

    default: Any
    description: str | None


class BlockFacts(Value):
    """`blocks`: one interaction module."""

    kind: str
    settings: dict[str, BlockSetting]
    flops: float
    """FLOPs with default settings at the reference shape."""
    parameters: int


class ClusterFacts(Value):
    """`clusters`: every key of `trials.cluster.cluster.Cluster`; null for what of this machine is not measured."""

    name: str
    description: str
    device: str | None
    verified: bool
    hosts: int | None
    gpus_per_host: int | None
    hbm: int | None
    host_memory_bytes: int | None
    memory_bandwidth: float | None
    peak_flops: PeakFlops | None
    host_link_bandwidth: float | None
    nvlink: Link | None
    network: Link | None
    sources: dict[str, str]


class StrategyPrice(Value):
    """One strategy of the ladder, priced."""

    name: str
    techniques: tuple[str, ...]
    memory: dict[str, Any]
    """Bytes on the fullest rank by item (`trials.planner.estimates.MemoryEstimate`), and their `total`."""
    step: dict[str, float]
    """Seconds by item (`trials.planner.estimates.StepTime`)."""
    examples_per_second: float
    fits: bool
    lacking_bytes: int
    reason: str


class PlannedCluster(Value):
    """`plan`: the ladder for one cluster."""

    cluster: str
    hosts: int
    gpus_per_host: int
    hbm: int
    verified: bool
    examples_per_rank: int
    batch_size: int
    precision: str
    chosen: str | None
    """The strategy's name; None if nothing fits."""
    strategies: tuple[StrategyPrice, ...]
    remedy: str | None
    other_shapes: tuple[str, ...]
    """Of each other shape of ranks that was tried, why it does not do."""
    faster: str | None
    notes: tuple[str, ...]
