"""A generated click log whose labels follow from decision trees: the home ground of gradient boosting.

The demo log's teacher is a sum of products, which networks of products are made to find. Here log odds are a sum
of random trees, which cut numbers at thresholds and ask for sets of categories: nothing in it is smooth.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

CATEGORIES = (4, 8, 15, 30, 60, 120, 250, 500, 1_000, 2_000)
"""Number of ids of each categorical column; the k-th comes in proportion to 1 / k."""
NUMBERS = 6
TREES, DEPTH = 80, 4
LOGIT_DEVIATION, BIAS = 1.6, -1.8


def write_tree_log(path: Path, rows: int, seed: int) -> None:
    """Writes a CSV file with `label`, c0 to c9, and n0 to n5, which have heavy tails."""
    rng = np.random.default_rng(seed)
    ids = [
        rng.choice(count, rows, p=(weights := 1 / np.arange(1, count + 1)) / weights.sum())
        for count in CATEGORIES
    ]
    numbers = [np.exp(rng.normal(0, 0.5 + 0.3 * place, rows)) for place in range(NUMBERS)]
    log_odds = np.zeros(rows)
    for _ in range(TREES):
        leaf = np.zeros(rows, dtype=np.int64)
        for _ in range(DEPTH):
            place = int(rng.integers(len(ids) + NUMBERS))
            leaf = 2 * leaf + _question(place, ids, numbers, rng)
        log_odds += rng.normal(0, 1, 2**DEPTH)[leaf]
    log_odds = BIAS + LOGIT_DEVIATION * (log_odds - log_odds.mean()) / log_odds.std()
    label = rng.random(rows) < 1 / (1 + np.exp(-log_odds))
    columns = {"label": label.astype(int)}
    columns |= {f"c{place}": [f"v{value}" for value in column] for place, column in enumerate(ids)}
    columns |= {f"n{place}": column.round(5) for place, column in enumerate(numbers)}
    pd.DataFrame(columns).to_csv(path, index=False)


def _question(
    place: int, ids: list[np.ndarray], numbers: list[np.ndarray], rng: np.random.Generator
) -> np.ndarray:
    """The answer of each row: whether its category is in a random half, or its number over a random quantile."""
    if place < len(ids):
        half = rng.random(CATEGORIES[place]) < 0.5
        answer: np.ndarray = half[ids[place]]
        return answer
    column = numbers[place - len(ids)]
    above: np.ndarray = column > np.quantile(column, rng.uniform(0.15, 0.85))
    return above
