"""Draws a demo log: its teacher, and its examples a group of rows at a time."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from dhen.atomic_write import atomic_file
from dhen.errors import UserError
from trials.data.demo import AFFINITY, ITEM, LOGIT_DEVIATION, SHARES, TIME, USER, DemoLog
from trials.data.prepare.staging import Progress
from trials.data.roles.names import ORACLE

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MISSING = -1
"""Mark of a missing value among ids and counts, which are never negative."""
HEAD = 100
"""Number of ids of a column that have effects of their own; all rarer ids share one."""
COUNTER, COUNTER_WINDOW = "I13", 10_000
"""The count that reports the drift: clicks among so many impressions before."""
_CARDINALITY = {
    "C1": 40, "C2": 100_000, "C3": 100, "C4": 4, "C5": 12, "C6": 3_000, "C7": 24, "C8": 500, "C9": 60,
    "C10": 50_000, "C11": 16, "C12": 300, "C13": 80, "C14": 12_000, "C15": 32, "C16": 1_000, "C17": 8,
    "C18": 80_000, "C19": 50, "C20": 6_000, "C21": 20, "C22": 25_000, "C23": 28, "C24": 1_500, "C25": 64, "C26": 10
}  # fmt: skip
CATEGORICAL = {name: (size, 1.0 if size <= HEAD else 1.2) for name, size in _CARDINALITY.items()}
MULTI_HOT = {"M1": (400, 0.9), "M2": (5_000, 1.1)}
"""Number of ids and exponent of their popularity: rank r from 0 on has a probability ~ (r + 1) ** -exponent."""
COUNTS = {
    "I1": (2, 1.2, 0.45), "I2": (3, 2.4, 0), "I3": (8, 1.8, 0.21), "I4": (5, 1.1, 0.21), "I5": (3_000, 2.2, 0.03),
    "I6": (40, 1.7, 0.22), "I7": (4, 1.8, 0.04), "I8": (8, 1.2, 0), "I9": (50, 1.6, 0.04), "I10": (1, 1.5, 0.45),
    "I11": (1.5, 1.4, 0.04), "I12": (0.6, 1.6, 0.76),
}  # fmt: skip
"""Of log-normal counts: median, deviation of the logarithm, share of missing ones. Below 1 they are zeros."""
MISSING_IDS = {"C3": 0.03, "C12": 0.03, "C19": 0.44, "C22": 0.76, "C25": 0.44, "M1": 0.1, "M2": 0.3}
"""Share of missing ids, or of empty bags."""


Examples = dict[str, Any]
"""B examples by column: counts, and ids as popularity ranks (those of users and items count through all who come);
of a multi-hot column all ids and B + 1 offsets; in `TIME` seconds since the log's start, ascending."""
Effect = tuple[str, int]
"""A column, and one of its traits."""
Term = tuple[str, tuple[Effect, ...], float]
"""An order of interaction (a key of `SHARES`, `own` or `affinity`), effects that are multiplied, their weight."""


class Teacher:
    """How labels come about: how the base rate drifts, and what makes people click."""

    def __init__(self, spec: DemoLog) -> None:
        self._spec = spec
        rng = default_rng([spec.seed, 0])
        self._periods_days, self._phases = rng.uniform(2.0, 7.0, 3), rng.uniform(0.0, 2 * np.pi, 3)
        self._parameters, self._terms = _draw_parameters(rng, spec), _draw_terms(rng, spec)
        sample = self.draw_examples(default_rng([spec.seed, 1]), (np.arange(1 << 17) + 0.5) / (1 << 17), 1)
        self._moments: dict[Effect, tuple[float, float]] = {}
        for effect in dict.fromkeys(effect for _, effects, _ in self._terms for effect in effects):
            values_B = self._effect(effect, sample)
            self._moments[effect] = float(values_B.mean()), float(values_B.std())
        logit_B = np.sum(list(self.by_order(sample).values()), axis=0)
        low, high = -100.0, 100.0
        while high - low > 1e-9:  # bisection, until the mean probability is the base rate
            middle = (low + high) / 2
            above = (1.0 / (1.0 + np.exp(-(logit_B + middle)))).mean() > spec.base_rate
            low, high = (low, middle) if above else (middle, high)
        self._intercept = low

    def draw_examples(self, rng: Generator, position_B: Floats, *stream: int) -> Examples:
        """Draws examples; `position_B` (0 to 1, ascending) is the share of all impressions that went before each,
        and `stream` names these examples among all of the seed."""
        spec, size = self._spec, len(position_B)
        hours = np.arange(10 * 24 + 1)
        traffic = 1.0 + 0.6 * np.sin(2 * np.pi * (hours[:-1] % 24 - 11.5) / 24)  # busiest at 18 h
        passed = np.concatenate([[0.0], np.cumsum(traffic)])
        seconds_B = (np.interp(position_B, passed / passed[-1], hours) * 3600).astype(np.int64)
        examples: Examples = {TIME: seconds_B}
        for name, (median, spread, missing) in COUNTS.items():
            count_B = np.floor(rng.lognormal(np.log(median), spread, size)).astype(np.int64)
            examples[name] = np.where(rng.random(size) < missing, MISSING, count_B)
        # The drift is a sum of three waves, of about unit variance; the base rate itself moves about as far.
        angle_WB = 2 * np.pi * seconds_B / 86_400 / self._periods_days[:, None] + self._phases[:, None]
        drift_B = np.sqrt(2 / len(angle_WB)) * np.sin(angle_WB).sum(axis=0)
        odds_B = spec.base_rate / (1 - spec.base_rate) * np.exp(0.2 * drift_B)
        examples[COUNTER] = rng.binomial(COUNTER_WINDOW, odds_B / (1 + odds_B))
        for name, zipf in CATEGORICAL.items():
            rank_B = _draw_ranks(rng, zipf, size)
            examples[name] = np.where(rng.random(size) < MISSING_IDS.get(name, 0), MISSING, rank_B)
        for name, zipf in MULTI_HOT.items():  # about three ids; one may come more than once
            length_B = np.minimum(rng.geometric(0.3, size), 10)
            length_B[rng.random(size) < MISSING_IDS[name]] = 0
            offsets = np.concatenate([[0], np.cumsum(length_B)])
            examples[name] = _draw_ranks(rng, zipf, int(offsets[-1])), offsets
        # Who has a place keeps it for a lifetime, then somebody new comes. Multiples of the golden ratio, less
        # their whole parts, spread the times evenly at which places change hands.
        rng = default_rng([spec.seed, 4, *stream])
        for name, places in spec.populations.items():
            examples[name] = place_B = _draw_ranks(rng, (places, 0.0), size)
            if spec.lifetime_days is not None:
                lifetimes_B = seconds_B / 86_400 / spec.lifetime_days + place_B * 0.6180339887498949 % 1
                examples[name] = lifetimes_B.astype(np.int64) * places + place_B
        return examples

    def by_order(self, examples: Examples) -> dict[str, Floats]:
        """Returns the parts of the logit, by order of interaction, [B] each; without the intercept."""
        values = {
            effect: (self._effect(effect, examples) - mean) / deviation
            for effect, (mean, deviation) in self._moments.items()
        }
        logits: dict[str, Floats] = {}
        for order, effects, weight in self._terms:
            product_B = weight * np.prod([values[effect] for effect in effects], axis=0)
            logits[order] = logits.get(order, 0.0) + product_B
        return logits

    def logit(self, examples: Examples) -> Floats:
        """Returns the logit, shape [B]."""
        logit_B: Floats = self._intercept + np.sum(list(self.by_order(examples).values()), axis=0)
        return logit_B

    def _effect(self, effect: Effect, examples: Examples) -> Any:
        """Returns an effect that is not standardised yet, shape [B]; it reads only what a model may read too."""
        column, _ = effect
        if column == TIME:  # a daily curve with its peak in the evening
            angle_B = 2 * np.pi * (examples[TIME] // 3600 % 24) / 24
            return np.sin(angle_B - 3.9) + 0.4 * np.sin(2 * angle_B - 1.6)
        if column == COUNTER:
            return np.log1p(examples[COUNTER])
        if column == AFFINITY:
            vectors = (self._parameters[name, 1][examples[name]] for name in (USER, ITEM))
            return np.einsum("br,br->b", *(vector_BR.astype(np.float64) for vector_BR in vectors))
        parameters, values = self._parameters[effect], examples[column]
        if column in (USER, ITEM):
            return parameters[values].astype(np.float64)
        if column in COUNTS:  # a wave in the logarithm; missing values have an effect of their own
            frequency, phase, missing = parameters
            wave_B = np.sin(frequency * np.log1p(np.maximum(values, 0)) + phase)
            return np.where(values == MISSING, missing, wave_B)
        ids = values[0] if column in MULTI_HOT else values
        trait_N = parameters[np.where(ids == MISSING, -1, np.minimum(ids, len(parameters) - 2))]
        if column in CATEGORICAL:
            return trait_N
        running, offsets = np.concatenate([[0.0], np.cumsum(trait_N)]), values[1]
        return np.diff(running[offsets]) / np.maximum(np.diff(offsets), 1)  # the bag's mean; 0 if it is empty


def groups(spec: DemoLog) -> Iterator[dict[str, Any]]:
    """Yields the log's columns, a group of rows at a time; lists as all their texts and where each begins."""
    teacher, size = Teacher(spec), 1 << 16
    for group, first_row in enumerate(range(0, spec.rows, size)):
        rng = default_rng([spec.seed, 2, group])
        row_B = np.arange(first_row, min(first_row + size, spec.rows))
        examples = teacher.draw_examples(rng, (row_B + rng.random(len(row_B))) / spec.rows, 2, group)
        oracle_B = 1.0 / (1.0 + np.exp(-teacher.logit(examples)))
        columns: dict[str, Any] = {"label": (rng.random(len(row_B)) < oracle_B).astype(np.int8)}
        for name, values in examples.items():
            if name == TIME:
                columns[name] = np.datetime64("2024-01-01", "s") + values  # a Monday
            elif name in COUNTS or name == COUNTER:
                columns[name] = np.ma.array(values, mask=values == MISSING)
            elif name in MULTI_HOT:
                columns[name] = _texts(name, values[0]), values[1]
            else:
                columns[name] = _texts(name, values)
        yield columns | {ORACLE: oracle_B}


def _texts(name: str, ids: Ints) -> NDArray[np.object_]:
    """Returns eight hex digits for each id, which say nothing of its popularity; None if it is missing."""
    id_I, place_B = np.unique(ids, return_inverse=True)
    code_I = id_I.astype(np.uint64) * 2_654_435_761 + zlib.crc32(name.encode())  # an odd factor: all distinct
    text_I = np.array([f"{code:08x}" for code in (code_I % 2**32).tolist()], dtype=object)
    text_I[id_I == MISSING] = None
    return text_I[place_B]


@cache
def _shares(cardinality: int, exponent: float) -> tuple[Floats, Floats]:
    """Returns the probability of each id, and that of all ids up to it."""
    weight_I = np.power(1.0 + np.arange(cardinality), -exponent)
    share_I: Floats = weight_I / weight_I.sum()
    cumulative_I = np.cumsum(share_I)
    return share_I, cumulative_I / cumulative_I[-1]


def _draw_ranks(rng: Generator, zipf: tuple[int, float], size: int) -> Ints:
    return np.searchsorted(_shares(*zipf)[1], rng.random(size), side="right")


def _draw_parameters(rng: Generator, spec: DemoLog) -> dict[Effect, Any]:
    """Draws what effects are made of: traits of ids, waves of counts, vectors of users and items (trait 1)."""
    parameters: dict[Effect, Any] = {}
    for name, zipf in (CATEGORICAL | MULTI_HOT).items():
        for trait in range(2 if name in CATEGORICAL else 1):
            # Softened signs: of each id of the head, then of all rarer ones, then of missing values. Of several
            # draws the most balanced one is kept (half of the examples on either side), so that a product of
            # traits is no mere effect of one of its columns.
            head, missing = min(zipf[0], HEAD), MISSING_IDS.get(name, 0)
            present_I = _shares(*zipf)[0] * (1 - missing)
            share_I = np.concatenate([present_I[:head], [present_I[head:].sum(), missing]])
            sign_DI = rng.choice([-1.0, 1.0], (64, head + 2))
            softness_I = rng.uniform(0.5, 1.5, head + 2)
            softness_I[head] = 0.5  # rare ids say little
            parameters[name, trait] = sign_DI[np.abs(sign_DI @ share_I).argmin()] * softness_I
    for name in COUNTS:
        parameters[name, 0] = rng.uniform(0.4, 0.9), rng.uniform(0.0, 2 * np.pi), rng.normal()
    for number, (name, places) in enumerate(spec.populations.items()):
        total = places * (int(10 / spec.lifetime_days) + 2) if spec.lifetime_days else places
        if spec.own:
            parameters[name, 0] = default_rng([spec.seed, 5, number]).standard_normal(total, np.float32)
        if spec.affinity:
            parameters[name, 1] = default_rng([spec.seed, 6, number]).standard_normal((total, 2), np.float32)
    return parameters


def _draw_terms(rng: Generator, spec: DemoLog) -> list[Term]:
    """Draws which effects are multiplied. Weights give every order its share of the logit's variance.

    A product of four columns comes with those of its first two and first three, and with effects of each column
    alone, as interactions found in experiments tend to. So high orders can be learnt, though not by one level.
    """
    modest = [name for name, (size, _) in CATEGORICAL.items() if 8 <= size <= HEAD]
    order = rng.permutation(modest).tolist()
    terms: list[Term] = []
    for chain in (order[0:4], order[4:8], order[8:12]):
        parts = ("second", chain[:2]), ("second", chain[2:]), ("third", chain[:3]), ("fourth", chain)
        terms += [(name, tuple((column, 0) for column in columns), 1.0) for name, columns in parts]
    for _ in range(4):  # dot products of two columns' traits, whatever their cardinality
        first, second = rng.choice(list(CATEGORICAL), 2, replace=False).tolist()
        terms += [("second", ((first, trait), (second, trait)), 2**-0.5) for trait in range(2)]
    for column in (*rng.choice(list(COUNTS), 3, replace=False).tolist(), *MULTI_HOT):
        terms.append(("second", ((column, 0), (str(rng.choice(modest)), 0)), 1.0))
    for column in (*CATEGORICAL, *MULTI_HOT, *COUNTS):  # some much stronger, those of chains by half
        terms.append(("first", ((column, 0),), rng.gamma(2.0) * (1.5 if column in order[:12] else 1.0)))
    terms += [("drift", ((TIME, 0),), 1.0), ("drift", ((COUNTER, 0),), 1.0)]
    terms += [("own", ((name, 0),), 1.0) for name in spec.populations if spec.own]
    terms += [("affinity", ((AFFINITY, 0),), 1.0)] if spec.affinity else []
    variance = {name: sum(part[2] ** 2 for part in terms if part[0] == name) for name, _, _ in terms}
    rest = 1 - spec.own - spec.affinity
    share = {name: rest * part for name, part in SHARES.items()}
    share |= {"own": spec.own, "affinity": spec.affinity}
    scale = {name: LOGIT_DEVIATION * np.sqrt(share[name] / variance[name]) for name in variance}
    return [(name, effects, float(weight * scale[name])) for name, effects, weight in terms]


# Writes a demo log to Parquet, or to CSV or TSV as a log of one's own would come.


DELIMITERS = {".csv": ",", ".tsv": "\t", ".csv.gz": ",", ".tsv.gz": "\t"}
"""Endings of the names of files that are written as text, each with what stands between its columns."""
_KEY = b"demo_log"


def generate(spec: DemoLog, path: Path, *, progress: Progress | None = None) -> Path:
    """Writes the log to `path`, as text if it has an ending of `DELIMITERS`; the file appears when it is complete.

    Of demo logs in Parquet one of equal settings is kept as it is, and one of others is replaced.

    Raises:
        UserError: when `path` holds anything else, or cannot be written.
    """
    # Studies know their log by the file's hash: what was in its metadata first is always there, the rest if given.
    first = {"generator": 1, "logit_deviation": LOGIT_DEVIATION, "shares": SHARES}
    first |= spec.model_dump(mode="json", include={"rows", "seed", "base_rate"})
    first |= spec.model_dump(mode="json", exclude_defaults=True)
    settings = json.dumps(first, sort_keys=True).encode()
    if path.exists():
        try:
            found = (pq.read_schema(path).metadata or {})[_KEY]
        except (pa.ArrowInvalid, OSError, KeyError):
            raise UserError(
                f"{path} exists and isn't marked as a demo log, so it is left alone. Name another, or remove it."
            ) from None
        if found == settings:
            return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(spec, path, settings, progress or (lambda stage, rows_done, total: None))
    except OSError as error:
        raise UserError(
            f"{path}: the demo log cannot be written ({error}). Name a file in a folder of yours."
        ) from None
    return path


def _write(spec: DemoLog, path: Path, settings: bytes, progress: Progress) -> None:
    delimiter = next((mark for ending, mark in DELIMITERS.items() if path.name.endswith(ending)), None)
    notice = "Generated by dhen-search from a known teacher: not a real click log."
    compression = "gzip" if path.suffix == ".gz" else None
    with atomic_file(path) as unfinished, ExitStack() as stack:
        stream = stack.enter_context(pa.output_stream(unfinished, compression=compression))
        writer: Any = None
        rows_done = 0
        for columns in groups(spec):
            arrays = {name: _array(values, as_text=delimiter is not None) for name, values in columns.items()}
            table = pa.table(arrays, metadata={_KEY: settings, "description": notice})
            if writer is None and delimiter is None:
                writer = stack.enter_context(pq.ParquetWriter(stream, table.schema, compression="zstd"))
            elif writer is None:
                options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="none")  # no text has one
                writer = stack.enter_context(pa.csv.CSVWriter(stream, table.schema, write_options=options))
            writer.write_table(table)
            rows_done += len(table)
            progress("generate", rows_done, spec.rows)


def _array(values: Any, *, as_text: bool) -> pa.Array:
    """Returns a column; in a text a list is one text with a bar between ids, and time stamps have no fractions."""
    if isinstance(values, tuple):
        bags = pa.ListArray.from_arrays(pa.array(values[1], pa.int32()), pa.array(values[0], pa.string()))
        return pc.binary_join(bags, "|") if as_text else bags
    if values.dtype.kind == "M":
        return pa.array(values, pa.timestamp("s" if as_text else "ms"))
    return pa.array(values, pa.string() if values.dtype == object else None)
