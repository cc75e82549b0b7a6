"""Probabilities of raw rows by a bundle: encoded as in training, corrected for negative sampling.

Files, data frames, MLflow's model and the server all score through this one class, so that a row has the same
probability wherever it comes from.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from dhen.atomic_write import atomic_file
from dhen.errors import ScoreError
from dhen.tape import MOST_ROWS, rows_at_once
from search.bundles.bundle import Bundle
from trials.cluster.machine import device
from trials.data.encoding import EncodedRows, encode_rows, transform
from trials.data.loader import feature_batch
from trials.data.read_options import ReadOptions
from trials.records.metrics import undo_negative_sampling

if TYPE_CHECKING:
    import pandas as pd


class Scorer:
    """The network of a bundle, or the mean of those of an average, ready to score.

    Nothing is kept from call to call, so several threads may share one.
    """

    def __init__(self, bundle: Bundle, *, mapped: bool = False) -> None:
        """Reads the weights, onto the accelerator if there is one; with `mapped` they stay in the bundle's
        files, and rows of tables are read when they are looked up, by this machine's CPU."""
        self.encoding = bundle.encoding
        self._device = torch.device("cpu") if mapped else device()
        self.model = bundle.model(mapped=mapped).to(self._device)
        """The network, which computes in fp32."""
        self._rate = bundle.info.negative_sampling_rate

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the columns that rows must have; others are ignored."""
        return self.encoding.schema.inputs

    def score(self, rows: pa.RecordBatch | pd.DataFrame) -> NDArray[np.float64]:
        """Returns the probability of a click of each raw row (B), in the rows' order.

        Args:
            rows: raw values under the log's column names, as text or typed; missing ones are null. A multi-hot
                column holds lists, or text with the log's separator.

        Raises:
            UserError: if a column is missing that the model needs, or for a value that its role does not allow.
            ScoreError: as `score_encoded`.
        """
        table = rows if isinstance(rows, pa.RecordBatch) else record_batch(rows)
        encoded = transform(table, self.encoding)
        return self.score_encoded(encoded)

    @torch.no_grad()
    def score_encoded(self, rows: EncodedRows, *, first: int = 0) -> NDArray[np.float64]:
        """Returns the probability of each encoded row (B).

        Args:
            rows: the rows.
            first: number of rows before these, which messages count too.

        Raises:
            ScoreError: for the first row whose score is no probability.
        """
        at_once = rows_at_once(self.model)
        parts = (rows.slice(start, min(start + at_once, rows.rows)) for start in range(0, rows.rows, at_once))
        logits = [self.model(feature_batch(part).to(self._device)).double() for part in parts]
        p_B: NDArray[np.float64] = torch.sigmoid(torch.cat(logits)).cpu().numpy() if logits else np.empty(0)
        p_B = undo_negative_sampling(p_B, self._rate)
        good_B = (p_B >= 0.0) & (p_B <= 1.0)  # NaN is neither
        if not good_B.all():
            row = int(good_B.argmin())
            raise ScoreError(
                f"row {first + row + 1}: the score is {p_B[row]:g}, which is no probability. The model's weights "
                "are damaged: `dhen-search verify BUNDLE` names which; export the bundle again."
            )
        return p_B


def record_batch(columns: Mapping[str, Iterable[Any]] | pd.DataFrame) -> pa.RecordBatch:
    """Returns columns of Python values, or those of a data frame, as Arrow has them.

    A column whose values have several types is text, as it would be in a CSV file of the same rows, and lists of
    such values are lists of text.
    """
    return pa.RecordBatch.from_pydict({str(name): _array(values) for name, values in columns.items()})


def _array(values: Iterable[Any]) -> pa.Array:
    try:
        column = pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        # values of several types are text, or lists of text if all are lists
        mixed = [None if _missing(value) else value for value in values]
        if all(isinstance(value, list | tuple | np.ndarray) for value in mixed if value is not None):
            bags = [bag if bag is None else [*map(_text, bag)] for bag in mixed]
            return pa.array(bags, pa.list_(pa.string()))
        return pa.array(map(_text, mixed), pa.string())
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    # pandas gives a column of missing values the type of text, which lists are not
    return pa.nulls(len(column)) if column.null_count == len(column) else column


def _text(value: Any) -> str | None:
    return None if _missing(value) else str(value)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value))


# Scores raw rows of a log with a bundle: encodes them as the bundle learned to, and writes a score for each.


def score_rows(
    bundle: Bundle, files: Sequence[Path], out: Path, *, options: ReadOptions, on_rows: Callable[[int], None]
) -> int:
    """Writes `row,score` in input order to a CSV file, which appears whole or not at all.

    Args:
        bundle: the bundle whose encoding and weights are used.
        files: raw rows.
        out: the CSV file.
        options: how the files are read.
        on_rows: is called with how many rows are scored so far.

    Returns:
        The number of rows.

    Raises:
        UserError: for files that cannot be read as rows of the bundle's log.
        ScoreError: for the first row whose score is no probability.
    """
    scorer, scored = Scorer(bundle), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("row", "score"))
        for rows in encode_rows(files, bundle.encoding, options=options, batch_size=MOST_ROWS):
            scores_B = scorer.score_encoded(rows, first=scored)
            writer.writerows((scored + i, f"{score:.9g}") for i, score in enumerate(scores_B))
            scored += len(scores_B)
            on_rows(scored)
    return scored
