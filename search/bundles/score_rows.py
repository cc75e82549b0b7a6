"""Scores raw rows of a log with a bundle: encodes them as the bundle learned to, and writes a score for each."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from dhen.atomic_write import atomic_file
from dhen.memory.passes import MOST_ROWS
from search.bundles.bundle import Bundle
from search.bundles.scorer import Scorer
from trials.data.encoding.encode_rows import encode_rows
from trials.data.read_options import ReadOptions


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
