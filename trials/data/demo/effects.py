"""Effects: known functions of one column, [B] each. The teacher multiplies and adds them.

Everything an effect reads is among a model's inputs: ids, counts, whether a value is missing, the hour.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.random import Generator

from trials.data.demo.columns import CATEGORICAL, COUNTER, COUNTS, HEAD, MULTI_HOT, IdColumn, zipf
from trials.data.demo.examples import MISSING, Examples, Floats, Ints

Effect = Callable[[Examples], Floats]
Name = tuple[str, int]
"""A column, and one of its traits."""
TRAITS = 2
"""Number of scalar traits of every id: an id's latent factors."""
HOUR = "hour_of_day"


def draw_effects(rng: Generator) -> dict[Name, Effect]:
    """Returns the effects of all columns, not yet standardised; some columns have several, one per trait."""
    effects: dict[Name, Effect] = {(HOUR, 0): _hour, (COUNTER, 0): _log_clicks}
    for column in CATEGORICAL:
        for trait in range(TRAITS):
            effects[column.name, trait] = partial(_of_id, column.name, _draw_traits(rng, column))
    for column in MULTI_HOT:
        effects[column.name, 0] = partial(_of_bag, column.name, _draw_traits(rng, column))
    for count in COUNTS:
        frequency, phase, missing = rng.uniform(0.4, 0.9), rng.uniform(0.0, 2 * np.pi), rng.normal()
        effects[count.name, 0] = partial(_wave, count.name, frequency, phase, missing)
    return effects


def _draw_traits(rng: Generator, column: IdColumn) -> Floats:
    """Returns one trait for each id of the head, then one that all rarer ids share, then that of missing values.

    Traits are softened signs. Of several draws the most balanced one is kept (half of the examples on
    either side), so that a product of traits is no mere effect of one of its columns.
    """
    head = min(column.cardinality, HEAD)
    present = zipf(column) * (1 - column.missing)
    probability = np.concatenate([present[:head], [present[head:].sum(), column.missing]])
    sign_DI = rng.choice([-1.0, 1.0], (64, head + 2))
    sign_I = sign_DI[np.abs(sign_DI @ probability).argmin()]
    softness_I = rng.uniform(0.5, 1.5, head + 2)
    softness_I[head] = 0.5  # rare ids say little
    traits_I: Floats = sign_I * softness_I
    return traits_I


def _look_up(traits_I: Floats, ids: Ints) -> Floats:
    rare, missing = len(traits_I) - 2, len(traits_I) - 1
    return traits_I[np.where(ids == MISSING, missing, np.minimum(ids, rare))]


def _of_id(column: str, traits_I: Floats, examples: Examples) -> Floats:
    return _look_up(traits_I, examples.ids[column])


def _of_bag(column: str, traits_I: Floats, examples: Examples) -> Floats:
    """Returns the mean trait of the bag's ids; 0 for an empty bag."""
    ids, offsets = examples.bags[column]
    running = np.concatenate([[0.0], np.cumsum(_look_up(traits_I, ids))])
    mean_B: Floats = np.diff(running[offsets]) / np.maximum(np.diff(offsets), 1)
    return mean_B


def _wave(column: str, frequency: float, phase: float, missing: float, examples: Examples) -> Floats:
    """Returns a smooth wave in the logarithm of the count; missing values have an effect of their own."""
    counts_B = examples.counts[column]
    wave_B = np.sin(frequency * np.log1p(np.maximum(counts_B, 0)) + phase)
    return np.where(counts_B == MISSING, missing, wave_B)


def _log_clicks(examples: Examples) -> Floats:
    log_B: Floats = np.log1p(examples.counts[COUNTER])
    return log_B


def _hour(examples: Examples) -> Floats:
    """Returns a daily curve with its peak in the evening."""
    angle_B = 2 * np.pi * examples.hours / 24
    curve_B: Floats = np.sin(angle_B - 3.9) + 0.4 * np.sin(2 * angle_B - 1.6)
    return curve_B
