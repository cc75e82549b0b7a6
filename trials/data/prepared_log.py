"""PreparedLog: the columnar cache of a log, memory-mapped.

DIR/manifest.json                  written last: a directory without one is no prepared log
DIR/schema.yaml                    as it was given or inferred, to edit and prepare again
DIR/encoding/                      what was fitted (`Encoding.load`)
DIR/train|validation|test/
    labels.npy       float32 [N]      categorical.npy  int32 [N, T]     numeric.npy  float32 [N, K]
    share.npy        float32 [N, number of columns with buckets], if the log has any
    keys.npy         int64 [N, number of growing categorical tables], if the log has any
    bag0_ids.npy     int32 [nnz], int64 if the table is growing
                     bag0_offsets.npy int64 [N + 1]    and so on for each multi-hot table
    weight.npy       float32 [N]      oracle.npy       float64 [N]      timestamp.npy    int64 [N]
    pair.npy         bool [N]                                           the last four if the log has them
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from dhen.errors import UserError, unknown_name
from dhen.schema import FeatureSchema
from dhen.values import Value, fingerprint
from trials.data.encoding import Bags, EncodedRows, Encoding
from trials.data.log_schema import SPLITS, LogSchema
from trials.data.schema_yaml import read_schema
from trials.records.study_record import ColumnFinding, LogSummary
from trials.store.user_cache import use

VERSION = 6
"""Version of the layout of the cache and of the rules by which rows are encoded."""
MANIFEST = "manifest.json"


class Manifest(Value):
    """Facts that a prepared log states of itself."""

    version: int
    name: str
    key: str
    """Key by which the cache is found: made as `fingerprint`, with the schema as it was given or inferred."""
    fingerprint: str
    """Hash of the bytes of the files, the resolved schema, how bad rows were treated, and the encoding if
    given."""
    schema_fingerprint: str
    """Hash of schema.yaml, to notice that it was edited."""
    rows: dict[str, int]
    base_rate: dict[str, float]
    chronological: bool
    ne_floor: dict[str, float] | None
    notes: tuple[str, ...]
    """Sentences on what was noticed while the log was prepared, e.g. how many rows were skipped."""
    findings: tuple[ColumnFinding, ...] = ()
    """Why columns have their roles; none if a person wrote the schema."""
    sizes: dict[str, int]
    """Bytes of every file of the cache, by path."""
    checksums: dict[str, int] = Field(default_factory=dict)
    """CRC-32 of the encoding's files, by path: bundles take the encoding along. Empty: an older version's log."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """The rows of one split as memory-mapped arrays, in the order of the log."""

    name: str
    labels: NDArray[np.float32]
    """Labels (N), 0 or 1."""
    inputs: EncodedRows
    """Inputs of N examples."""
    weight: NDArray[np.float32] | None
    """The weight column (N)."""
    oracle: NDArray[np.float64] | None
    """The true probabilities (N) of a generated log."""
    timestamp: NDArray[np.int64] | None
    """Time stamps (N), milliseconds since 1970, the lowest int64 if missing."""
    base_rate: float
    """Fraction of positives (weighted, corrected for negative sampling)."""
    chronological: bool
    """Whether the log has time stamps and its rows are in their order."""
    pair: NDArray[np.bool_] | None = None
    """Which rows (N) were one with the row before, of a log whose label is a share of clicks."""

    @property
    def rows(self) -> int:
        """Number of rows, N."""
        return len(self.labels)


class PreparedLog:
    """A log that is ready to train on."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest

    @staticmethod
    def is_prepared(path: Path) -> bool:
        """Tells whether a path is the directory of a prepared log."""
        return (Path(path) / MANIFEST).is_file()

    @classmethod
    def open(cls, directory: Path) -> PreparedLog:
        """Opens a prepared log.

        Raises:
            UserError: when it is none, was made by another version, is damaged, or when its schema.yaml was
                edited since.
        """
        directory = Path(directory)
        use(directory)
        path = directory / MANIFEST
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{directory}: not a prepared log (it has no {MANIFEST}).") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error}). Prepare the log again.") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise UserError(
                f"{directory}: prepared by another version (layout {version}, this one reads {VERSION}). "
                "Prepare the log again."
            )
        try:
            manifest = Manifest.model_validate(data)
        except ValidationError:
            raise UserError(f"{path}: the manifest is damaged. Prepare the log again.") from None
        for name, size in manifest.sizes.items():
            actual_size = (directory / name).stat().st_size if (directory / name).is_file() else None
            if actual_size != size:
                state = "is missing" if actual_size is None else f"has {actual_size:,} bytes"
                raise UserError(
                    f"{directory}: the prepared log is damaged: {name} {state}, expected {size:,}. Delete "
                    "the directory and prepare the log again."
                )
        for name, checksum in manifest.checksums.items():
            if zlib.crc32((directory / name).read_bytes()) != checksum:
                raise UserError(
                    f"{directory}: the prepared log is damaged: {name} is not as it was written. Delete the "
                    "directory and prepare the log again."
                )
        edited = directory / "schema.yaml"
        if edited.is_file() and fingerprint(read_schema(edited).to_dict()) != manifest.schema_fingerprint:
            raise UserError(
                f"{edited} was edited after the log was prepared. Prepare the raw log again into this "
                "directory to apply the changes, or undo them."
            )
        return cls(directory, manifest)

    @property
    def fingerprint(self) -> str:
        """Identity of the log: equal for equal logs that were prepared alike."""
        return self.manifest.fingerprint

    @property
    def notes(self) -> tuple[str, ...]:
        """What was noticed while the log was prepared, for people."""
        return self.manifest.notes

    @cached_property
    def encoding(self) -> Encoding:
        """The encoding that was fitted on the training rows."""
        return Encoding.load(self.directory / "encoding")

    @property
    def schema(self) -> LogSchema:
        """The schema, with everything that was left open decided."""
        return self.encoding.schema

    @property
    def features(self) -> FeatureSchema:
        """The inputs of a model on this log."""
        return self.encoding.features

    def split(self, name: str) -> Split:
        """Returns one split: train, validation or test.

        Raises:
            UserError: for any other name.
        """
        if name not in SPLITS:
            raise unknown_name("split", name, SPLITS)
        directory = self.directory / name
        bags = tuple(
            Bags(ids=_mapped(directory, f"bag{i}_ids"), offsets=_mapped(directory, f"bag{i}_offsets"))
            for i in range(len(self.features.multi_hot))
        )
        return Split(
            name=name,
            labels=_mapped(directory, "labels"),
            inputs=EncodedRows(
                categorical=_mapped(directory, "categorical"),
                bags=bags,
                numeric=_mapped(directory, "numeric"),
                keys=_mapped(directory, "keys") if self.features.growing_columns else None,
                share=_mapped(directory, "share") if self.features.bucketed else None,
            ),
            weight=_mapped(directory, "weight") if self.schema.batch_weight else None,
            oracle=_mapped(directory, "oracle") if self.schema.oracle else None,
            timestamp=_mapped(directory, "timestamp") if self.schema.timestamp else None,
            base_rate=self.manifest.base_rate[name],
            chronological=self.manifest.chronological,
            pair=_mapped(directory, "pair") if self.schema.pairs else None,
        )

    def summary(self) -> LogSummary:
        """Returns what a study's record says of its log."""
        return LogSummary(
            name=self.manifest.name,
            fingerprint=self.fingerprint,
            rows=self.manifest.rows,
            base_rate=self.manifest.base_rate,
            tables=len(self.features.tables),
            numeric=len(self.features.numeric),
            ne_floor=self.manifest.ne_floor,
            columns={name: column.role for name, column in self.schema.columns.items()},
            findings=self.manifest.findings,
            notes=self.manifest.notes,
        )


def _mapped(directory: Path, name: str) -> NDArray[Any]:
    return np.asarray(np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False))


# How often the training rows have each id, for `training.frequency_decay`.
#
# Counted anew by every rank when a training begins, in one pass over the ids; the counts stay in the host's
# memory, four bytes for each row of a table (twelve for each key of a growing one), and what a batch needs of
# them travels with it.

Ids = NDArray[np.int32] | NDArray[np.int64]
IDS_AT_ONCE = 2**22
"""Ids counted at a time: numpy makes int64 of them."""


class IdCounts:
    """The counts of all ids in the last rows of a split, as 1 / count."""

    def __init__(self, split: Split, rows: int, growing: Sequence[int] = ()) -> None:
        """Counts the ids in the last `rows` rows; `growing` are the columns whose ids are keys."""
        inputs, first = split.inputs, split.rows - rows
        self._growing = {column: place for place, column in enumerate(growing)}
        columns = (self._column(inputs, column)[first:] for column in range(inputs.categorical.shape[1]))
        self._columns = [_counted(ids) for ids in columns]
        self._bags = [_counted(bags.ids[bags.offsets[first] :]) for bags in inputs.bags]

    def inverse(self, inputs: EncodedRows) -> NDArray[np.float32]:
        """Returns 1 / count for each categorical table and then each multi-hot one (N x T).

        The rows must be among those that were counted. A bag has the mean over its ids, an empty one 0.
        """
        columns = [inverse(self._column(inputs, place)) for place, inverse in enumerate(self._columns)]
        for inverse, bags in zip(self._bags, inputs.bags, strict=True):
            lengths = np.diff(bags.offsets)
            owners = np.repeat(np.arange(len(lengths)), lengths)
            sums = np.bincount(owners, weights=inverse(bags.ids), minlength=len(lengths))
            columns.append((sums / np.maximum(lengths, 1)).astype(np.float32))
        return np.stack(columns, axis=1)

    def _column(self, inputs: EncodedRows, column: int) -> Ids:
        if column not in self._growing:
            return inputs.categorical[:, column]
        assert inputs.keys is not None
        return inputs.keys[:, self._growing[column]]


def _counted(ids: Ids) -> Callable[[Ids], NDArray[np.float32]]:
    """Counts ids, and returns what gives 1 / count (N) of some of them."""
    if ids.dtype == np.int64:  # keys, found by halving: twelve bytes for each distinct one
        keys, counts = np.unique(ids, return_counts=True)
        inverse_of_key = (1.0 / counts).astype(np.float32)
        return lambda some: inverse_of_key[np.searchsorted(keys, some)]
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(ids), IDS_AT_ONCE):
        more = np.bincount(ids[start : start + IDS_AT_ONCE], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    # ids that are not there have 1, and are never asked for
    inverse = (1.0 / np.maximum(counts, 1)).astype(np.float32)
    return lambda some: inverse[some]
