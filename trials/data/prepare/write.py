"""Writes the cache of a staged log: encodes batch by batch and deals the rows out to their splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from dhen.errors import UserError
from trials.data.encoding import EncodedRows, Encoding
from trials.data.log_schema import SPLITS, LogSchema, SplitRule
from trials.data.prepare.fit import split_of
from trials.data.prepare.splits import SplitPlan, plan_splits
from trials.data.prepare.staging import NpyWriter, Progress, StagedLog
from trials.data.raw.typed import PAIR, columns_of
from trials.records.metrics import ClickTotals


class _SplitWriter:
    """The growing files of one split."""

    def __init__(self, directory: Path, encoding: Encoding) -> None:
        directory.mkdir()
        schema, features = encoding.schema, encoding.features
        self._labels = NpyWriter(directory / "labels.npy", np.float32)
        inputs = (
            ("categorical", np.int32, len(features.categorical)),
            ("numeric", np.float32, len(features.numeric)),
            ("share", np.float32, len(features.bucketed) or None),
            ("keys", np.int64, len(features.growing_columns) or None),
        )
        self._inputs = {
            name: NpyWriter(directory / f"{name}.npy", dtype, (width,))
            for name, dtype, width in inputs
            if width is not None
        }
        self._bags = [
            (
                NpyWriter(directory / f"bag{i}_ids.npy", np.int64 if table.growing else np.int32),
                NpyWriter(directory / f"bag{i}_offsets.npy", np.int64),
            )
            for i, table in enumerate(features.multi_hot)
        ]
        for _, offsets in self._bags:
            offsets.append(np.zeros(1, dtype=np.int64))
        kept = (
            ("weight", schema.batch_weight, np.float32),
            ("oracle", schema.oracle, np.float64),
            ("timestamp", schema.timestamp, np.int64),
            ("pair", PAIR if schema.pairs else None, np.bool_),
        )
        self._extra = {
            name: NpyWriter(directory / f"{file}.npy", dtype)
            for file, name, dtype in kept
            if name is not None
        }
        self._label = schema.label

    def append(self, inputs: EncodedRows, columns: Mapping[str, pa.Array]) -> None:
        self._labels.append(columns[self._label].to_numpy())
        for name, file in self._inputs.items():
            file.append(getattr(inputs, name))
        for (ids, offsets), bags in zip(self._bags, inputs.bags, strict=True):
            offsets.append(bags.offsets[1:] + ids.rows)
            ids.append(bags.ids)
        for name, file in self._extra.items():
            file.append(columns[name].to_numpy())

    def close(self) -> None:
        pairs = [file for pair in self._bags for file in pair]
        for file in (self._labels, *self._inputs.values(), *pairs, *self._extra.values()):
            file.close()


def write_splits(
    staged: StagedLog,
    plan: SplitPlan,
    encoding: Encoding,
    directory: Path,
    pool: Executor,
    progress: Progress,
) -> None:
    """Writes the three splits below a directory."""
    rows_done = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(closing(_SplitWriter(directory / name, encoding))) for name in SPLITS]
        for file, first_open, batch in staged.batches():
            split = split_of(plan, encoding.schema, file, first_open, batch)
            inputs = encoding.encode(columns_of(batch), pool)
            for i in np.unique(split):
                rows = np.flatnonzero(split == i)
                if len(rows) == batch.num_rows:
                    writers[i].append(inputs, columns_of(batch))
                else:
                    writers[i].append(inputs.take(rows), columns_of(batch.take(pa.array(rows))))
            rows_done += batch.num_rows
            progress("writing", rows_done, staged.rows)


# Clicks of each part of a log: base rates, and whether a split leaves clicks and others in each part.

LARGER = (0.2, 0.3)
"""Fractions for validation and test that are tried if smaller ones lack clicks."""


def plan_of(staged: StagedLog, rule: SplitRule) -> SplitPlan:
    """Makes a rule definite for a staged log, as `plan_splits` does."""
    return plan_splits(rule, sum(staged.open_rows), staged.stamps, staged.first_of_file)


def count_clicks(staged: StagedLog, plan: SplitPlan, schema: LogSchema) -> dict[str, ClickTotals]:
    """Counts the clicks of each split, from which base rate and NE floor follow."""
    totals = {name: ClickTotals(schema.negative_sampling_rate) for name in SPLITS}
    for file, first_open, batch in staged.batches():
        split = split_of(plan, schema, file, first_open, batch)
        label = batch.column(schema.label).to_numpy()
        weight = batch.column(schema.batch_weight).to_numpy() if schema.batch_weight else None
        oracle = batch.column(schema.oracle).to_numpy() if schema.oracle else None
        for i, clicks in enumerate(totals.values()):
            rows = split == i
            weights = None if weight is None else weight[rows]
            oracles = None if oracle is None else oracle[rows]
            clicks.add(label[rows], weights, oracles)
    return totals


def check_classes(totals: Mapping[str, ClickTotals], staged: StagedLog, schema: LogSchema) -> None:
    """Checks that NE can be said of each split.

    Raises:
        UserError: when a split has no rows, or only clicks, or none. It counts them, and proposes a split by which
            each part has both, which was tried.
    """
    lacking = next((name for name, clicks in totals.items() if not _has_both(clicks)), None)
    if lacking is None:
        return
    part, rows = totals[lacking], sum(clicks.rows for clicks in totals.values())
    if not part.rows:
        held = "no rows"
    elif part.positive_rows in (0, part.rows):
        held = f"{part.rows:,} rows, all of them {'clicks' if part.positive_rows else 'without a click'}"
    else:
        held = f"{part.rows:,} rows whose weights leave only one class"
    clicks = sum(each.positive_rows for each in totals.values())
    each_part = ", ".join(f"{each.positive_rows:,} in {name}" for name, each in totals.items())
    fewer, kind = min((clicks, "clicks"), (rows - clicks, "rows without a click"))
    if fewer < len(SPLITS):
        remedy = f"With {fewer} {kind}, no split has one in each part: take a log with more"
    else:
        remedy = _OTHERWISE
        for rule in _others(schema):
            with suppress(UserError):  # too few rows, or stamps, to be cut so
                if all(map(_has_both, count_clicks(staged, plan_of(staged, rule), schema).values())):
                    fractions = zip(SPLITS[1:], rule.fractions, strict=True)
                    parts = [f"split.{name}={part:g}" for name, part in fractions if part]
                    words = " ".join([f"split.by={rule.by}", *parts])
                    remedy = f"This split has both classes in each part: {words}"
                    break
    raise UserError(
        f"the {lacking} split (by {schema.split.by}) has {held}: normalized entropy needs both classes. Of the "
        f"log's {rows:,} rows {clicks:,} are clicks: {each_part}. {remedy}."
    )


_OTHERWISE = (
    "Give the split more rows, or another rule (timestamp, order, random, files or column), under `split` in "
    "schema.yaml"
)


def _has_both(clicks: ClickTotals) -> bool:
    return 0.0 < clicks.base_rate < 1.0


def _others(schema: LogSchema) -> Iterator[SplitRule]:
    """Yields rules like the schema's with larger parts, and such at random; lists stay as they are."""
    rule = schema.split
    if not any(rule.fractions):
        return
    for by in dict.fromkeys((rule.by, "random")):
        for fraction in (0.0, *LARGER):
            parts = {
                part: max(fraction, own) for part, own in zip(SPLITS[1:], rule.fractions, strict=True) if own
            }
            if sum(parts.values()) < 1.0:
                yield rule.replace(by=by, **parts)
