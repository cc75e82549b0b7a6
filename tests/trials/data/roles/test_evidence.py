"""Roles that rest on evidence of several columns or rows: the event's time, outcomes, indexes, hashes, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhen.errors import UserError
from trials.data.log_schema import NumericColumn, TimestampColumn
from trials.data.prepare.prepare_log import prepare
from trials.data.raw.sources import open_log
from trials.data.read_options import ReadOptions
from trials.data.roles.infer import InferredSchema, infer

WriteCsv = Callable[..., Path]
Columns = dict[str, Any]
ROWS = 3000
RNG = np.random.default_rng(5)
CLICK = RNG.random(ROWS) < 0.2
START = np.datetime64("2026-10-01T00:00:00")
MINUTES = np.sort(RNG.integers(0, 14 * 288, ROWS)) * 5


@pytest.fixture
def inferred(write_csv: WriteCsv) -> Callable[..., InferredSchema]:
    def of(log: Columns, **options: Any) -> InferredSchema:
        path = write_csv({"site": RNG.choice(list("abc"), ROWS), **log, "click": CLICK.astype(int)})
        return infer(open_log([path]), ReadOptions.model_validate(options))

    return of


def roles(found: InferredSchema) -> dict[str, str]:
    return {name: column.role for name, column in found.schema.columns.items()}


def moments(minutes: Any) -> list[str]:
    return [str(START + np.timedelta64(int(minute * 60), "s")).replace("T", " ") for minute in minutes]


def test_the_event_is_the_stamp_in_the_order_of_the_file(inferred: Callable[..., InferredSchema]) -> None:
    """Another stamp has more values, and the event's is named like nothing in the second log."""
    created = moments(-RNG.integers(60, 10**6, ROWS) - RNG.random(ROWS))
    found = inferred({"created_at": created, "event_time": [moment[:16] for moment in moments(MINUTES)]})
    assert found.schema.timestamp == "event_time"
    age = found.schema.columns["created_at"]
    assert isinstance(age, NumericColumn)
    assert age.days_before == "iso"

    found = inferred({"click_time": created, "stored": moments(MINUTES)})
    assert found.schema.timestamp == "stored"
    assert "'stored', as it is in the file's order, not 'click_time'" in found.sentences[0]
    assert (
        inferred(
            {"click_time": created, "stored": moments(MINUTES)}, columns={"click_time": "timestamp"}
        ).schema.timestamp
        == "click_time"
    )


def test_without_order_the_event_is_named_like_one(inferred: Callable[..., InferredSchema]) -> None:
    shuffled = RNG.permutation(MINUTES)
    found = inferred(
        {"signup_ts": moments(shuffled - RNG.integers(1, 10**5, ROWS)), "impression_ts": moments(shuffled)}
    )
    assert found.schema.timestamp == "impression_ts"
    assert roles(found)["signup_ts"] == "numeric"


def test_a_stamp_after_the_event_is_no_input(inferred: Callable[..., InferredSchema]) -> None:
    later = [moment if RNG.random() < 0.5 else "" for moment in moments(MINUTES + 30)]
    found = inferred({"event_time": moments(MINUTES), "delivered_at": later})
    assert roles(found)["delivered_at"] == "ignore"
    assert any("later than the event" in sentence for sentence in found.sentences)
    same_day = inferred(
        {"event_date": [moment[:10] for moment in moments(MINUTES)], "created_at": moments(MINUTES)}
    )
    assert roles(same_day)["event_date"] == "timestamp" or roles(same_day)["created_at"] == "timestamp"


@pytest.mark.parametrize(
    "stamps",
    [
        [f"{moment[:10]} {int(moment[11:13])}:{moment[14:16]}" for moment in moments(MINUTES)],
        ["0000-00-00 00:00:00" if row % 50 == 0 else moment for row, moment in enumerate(moments(MINUTES))],
        ["unknown" if row % 99 == 0 else moment for row, moment in enumerate(moments(MINUTES))],
        ["garbled 7" if row % 200 == 0 else moment for row, moment in enumerate(moments(MINUTES))],
        [moment[: (10, 16, 19)[row % 3]] for row, moment in enumerate(moments(MINUTES))],
        [f"{np.datetime64(moment).item():%d/%b/%Y:%H:%M:%S +0000}" for moment in moments(MINUTES)],
        [f"{np.datetime64(moment).item():%b %d, %Y %I:%M %p}" for moment in moments(MINUTES)],
        [f"{moment}+02:00" if row % 2 else f"{moment}Z" for row, moment in enumerate(moments(MINUTES))],
    ],
)
def test_stamps_that_are_hard_to_read_split_the_log(stamps: list[str], write_csv: WriteCsv) -> None:
    log = prepare(
        [write_csv({"seen": stamps, "site": RNG.choice(list("abc"), ROWS), "click": CLICK.astype(int)})]
    )
    assert (log.schema.timestamp, log.schema.split.by) == ("seen", "timestamp")
    unread = sum("garbled" in stamp for stamp in stamps)
    assert any(f"taken for missing: {unread}" in note for note in log.notes) == bool(unread)


@pytest.mark.parametrize("month", ["number", "word"])
def test_a_date_in_three_columns(month: str, write_csv: WriteCsv) -> None:
    days = [np.datetime64(moment).item() for moment in moments(RNG.permutation(MINUTES) * 9)]
    columns = {
        "booking_year": [day.year for day in days],
        "booking_month": [day.month if month == "number" else f"{day:%B}" for day in days],
        "booking_date": [day.day for day in days],
        "click": CLICK.astype(int),
    }
    log = prepare([write_csv(columns)])
    column = log.schema.columns["booking_year"]
    assert isinstance(column, TimestampColumn)
    assert column.parts == ("booking_month", "booking_date")
    assert {"booking_month", "booking_date"} <= log.schema.tables.keys() | log.schema.numeric.keys()
    first = {name: int(log.split(name).timestamp.min()) for name in ("validation", "test")}
    assert log.split("train").timestamp.max() < first["validation"] < first["test"]


def test_a_date_beside_the_time_of_day(write_csv: WriteCsv) -> None:
    when = moments(MINUTES)
    columns = {"date": [moment[:10] for moment in when], "time": [moment[11:16] for moment in when]}
    log = prepare([write_csv({**columns, "site": RNG.choice(list("ab"), ROWS), "click": CLICK.astype(int)})])
    stamps = np.concatenate([log.split(name).timestamp for name in ("train", "validation", "test")])
    assert np.array_equal(stamps, np.array(when, dtype="M8[ms]").astype(np.int64))
    assert "hour_of_day" in log.schema.cycles


def test_an_index_that_tells_the_label_is_not_used(inferred: Callable[..., InferredSchema]) -> None:
    index = np.where(CLICK, 10**6, 0) + RNG.choice(10**5, ROWS, replace=False)
    for name in ("", "Unnamed: 0", "index"):
        found = inferred({name: index})
        assert roles(found)[name or "column_2"] == "ignore"
        assert any("data frame" in sentence for sentence in found.sentences)


@pytest.mark.parametrize(
    ("values", "role"),
    [
        (RNG.integers(-(2**63), 2**63 - 1, 80), "categorical"),
        (RNG.integers(2**54, 2**60, 80), "categorical"),
        (RNG.integers(-(2**31), 2**31, 80), "categorical"),
        (RNG.integers(-999, 999, 500), "numeric"),
        (np.floor(RNG.lognormal(16, 3, 500)).astype(np.int64), "numeric"),
    ],
)
def test_whole_numbers_like_hashes_are_ids(
    values: Any, role: str, inferred: Callable[..., InferredSchema]
) -> None:
    found = inferred({"f1": RNG.choice(values, ROWS)})
    assert roles(found)["f1"] == role


def test_a_persons_weight_is_a_feature(inferred: Callable[..., InferredSchema]) -> None:
    kilograms = np.round(RNG.normal(75, 12, ROWS), 1)
    found = inferred({"weight": kilograms})
    assert roles(found)["weight"] == "numeric"
    assert any("columns.weight=weight" in sentence for sentence in found.sentences)
    assert inferred({"weight": kilograms}, columns={"weight": "weight"}).schema.weight == "weight"
    assert inferred({"sample_weight": kilograms}).schema.weight == "sample_weight"


def test_outcomes_of_the_event_are_left_out(inferred: Callable[..., InferredSchema]) -> None:
    columns = {
        "conversion": (CLICK & (RNG.random(ROWS) < 0.3)).astype(int),
        "dwell_ms": np.where(CLICK, RNG.integers(800, 90_000, ROWS), 0),
        "page": np.where(CLICK, RNG.choice(["lp1", "lp2"], ROWS), ""),
        "score": np.where(CLICK, 10.0, 0.0) + RNG.normal(0, 1, ROWS),
        "user_id": RNG.choice(ROWS, ROWS, replace=False) // 2,
        "orders": RNG.integers(0, 30, ROWS),
    }
    found = inferred(columns)
    left_out = [name for name, role in roles(found).items() if role == "ignore"]
    assert left_out == ["conversion", "dwell_ms", "page"]
    assert found.sentences[0].startswith(
        "left out, since they are known only after the label: 'conversion', 'dwell_ms'"
    )
    assert "'score' alone all but tells the label" in found.sentences[1]
    kept = inferred(columns, columns={"dwell_ms": "numeric"})
    assert roles(kept)["dwell_ms"] == "numeric"
    with pytest.raises(UserError, match=r"columns.dwel_ms: unknown column.*Did you mean 'dwell_ms'"):
        inferred(columns, columns={"dwel_ms": "numeric"})


def test_ids_in_columns_whose_names_say_nothing(inferred: Callable[..., InferredSchema]) -> None:
    ids = RNG.integers(110_000, 310_000, 300)
    counts = np.floor(RNG.lognormal(3, 2, ROWS)).astype(np.int64)
    found = inferred({"c3": RNG.choice(ids, ROWS), "c4": counts, "depth": RNG.choice(ids, ROWS)})
    assert [roles(found)[name] for name in ("c3", "c4", "depth")] == ["categorical", "numeric", "numeric"]
