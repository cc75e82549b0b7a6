"""A value is read the same way wherever it comes from: training, CSV, Parquet, a request, a later period."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from search.serving.requests import CSV, JSON, rows_of
from trials.data.encoding import EncodedRows, encode_rows, transform
from trials.data.log_schema import MultiHotColumn, NumericColumn, TimestampColumn
from trials.data.prepare.prepare_log import prepare
from trials.data.read_options import ReadOptions

ROWS = 400
RNG = random.Random(11)
START = 1_790_000_000
Make = Callable[[float], str]


def either(usual: Make, other: str, share: float = 0.1) -> Make:
    return lambda amount: other if RNG.random() < share else usual(amount)


def bag(separator: str, weights: bool = False) -> Make:
    def make(_: float) -> str:
        tags = RNG.sample(range(9), RNG.randrange(1, 4))
        return separator.join(f"t{tag}:{RNG.random():.2f}" if weights else f"t{tag}" for tag in tags)

    return make


KINDS: dict[str, tuple[Make, dict[str, Any]]] = {
    "currency": (lambda amount: f"${amount:,.2f}", {"prefix": "$", "thousands": ","}),
    "percent": (lambda amount: f"{amount / 100:.1f}%", {"suffix": "%"}),
    "unit": (lambda amount: f"{amount:.1f} EUR", {"suffix": "EUR"}),
    "decimal comma": (lambda amount: f"{amount:.2f} €".replace(".", ","), {"decimal": ",", "suffix": "€"}),
    "apostrophes": (lambda amount: f"{10 * amount:,.0f}".replace(",", "'"), {"thousands": "'"}),
    "multipliers": (either(lambda amount: f"{amount / 1000:.2f}k", "1.2M"), {"multipliers": True}),
    "bounds": (either(lambda amount: f"{amount % 60:.0f}", ">60"), {"bounds": True}),
    "accounts": (either(lambda amount: f"${amount:.2f}", "($7.25)"), {"prefix": "$"}),
    "R and Excel": (either(lambda amount: f"{amount:.2f}", "#N/A"), {"missing": ()}),
    "dash": (either(lambda amount: f"{amount:.2f}", "-"), {"missing": ("-",)}),
    "a word": (either(lambda amount: f"{amount:.2f}", "tbd"), {"missing": ("tbd",)}),
    "hashes": (
        lambda amount: str(random.Random(int(amount)).getrandbits(63) - 2**62),
        {"role": "categorical"},
    ),
    "NA is a code": (lambda _: RNG.choice(("DE", "NA", "NL", "")), {"not_missing": ("NA",)}),
    "None is a plan": (lambda _: RNG.choice(("None", "Basic", "")), {"not_missing": ("None",)}),
    "control character": (bag("\x1d"), {"separator": "\x1d"}),
    "path": (bag(" > "), {"separator": " > "}),
    "hash tags": (lambda amount: "#" + bag("#")(amount), {"separator": "#"}),
    "weighted bag": (bag("|", weights=True), {"separator": "|", "weight_mark": ":"}),
    "age": (lambda amount: str(np.datetime64(START - int(86_400 * amount), "s")), {"days_before": "iso"}),
    "named month": (
        lambda amount: f"{int(amount) % 28 + 1:02d}-Mar-{2000 + int(amount) % 20}",
        {"days_before": "month_name"},
    ),
}


@pytest.fixture(scope="module")
def columns() -> dict[str, list[str]]:
    amounts = [RNG.lognormvariate(6, 1) for _ in range(ROWS)]
    made = {name: [make(amount) for amount in amounts] for name, (make, _) in KINDS.items()}
    hours = [np.datetime64(START + 60 * row, "s").item() for row in range(ROWS)]
    # one-digit hours and a date of zeros
    made["event_time"] = [f"{when:%Y-%m-%d} {when.hour}:{when:%M}" for when in hours]
    made["event_time"][5] = "0000-00-00 00:00:00"
    return made | {"click": [str(RNG.randrange(2)) for _ in range(ROWS)]}


@pytest.fixture(scope="module")
def files(columns: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("log")
    with (folder / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.csv", folder / "log.parquet"


@pytest.fixture(scope="module")
def read(
    files: tuple[Path, Path], columns: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EncodedRows]:
    """The same rows as a training has them, and by each other way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DHEN_SEARCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        log = prepare([files[0]], options=ReadOptions.model_validate({"split": {"by": "order"}}))
        later = prepare([files[1]], encoding=log.encoding, joins_splits=True)
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    requests = {JSON: json.dumps({"dataframe_records": records}).encode(), CSV: files[0].read_bytes()}
    found: dict[str, Any] = {"schema": log.schema, "training": splits(log), "online": splits(later)}
    for name, path in zip(("predict CSV", "predict Parquet"), files, strict=True):
        (found[name],) = encode_rows([path], log.encoding)
    for form, body in requests.items():
        batch = rows_of(body, form, log.schema)
        assert batch is not None
        found[form] = transform(batch, log.encoding)
    return found


def splits(log: Any) -> EncodedRows:
    return EncodedRows.joined([log.split(name).inputs for name in ("train", "validation", "test")])


def test_each_kind_is_recognised(read: dict[str, Any]) -> None:
    found = read["schema"].columns
    for name, (_, keys) in KINDS.items():
        assert {key: getattr(found[name], key) for key in keys} == keys, name
    assert isinstance(found["event_time"], TimestampColumn)
    assert sum(isinstance(each, NumericColumn) for each in found.values()) == 13
    assert sum(isinstance(each, MultiHotColumn) for each in found.values()) == 4


@pytest.mark.parametrize("way", ["online", "predict CSV", "predict Parquet", JSON, CSV])
def test_equal_rows_are_equal_inputs(read: dict[str, Any], way: str) -> None:
    training, other = read["training"], read[way]
    assert np.array_equal(training.numeric, other.numeric)
    assert np.array_equal(training.categorical, other.categorical)
    assert np.array_equal(training.share, other.share)
    for bags, same in zip(training.bags, other.bags, strict=True):
        assert np.array_equal(bags.ids, same.ids)
        assert np.array_equal(bags.offsets, same.offsets)
