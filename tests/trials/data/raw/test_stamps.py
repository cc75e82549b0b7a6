from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data.raw.columns import MISSING_STAMP, cycle_of, stamps_of

MOMENT = datetime(2014, 10, 21, 3, 4, 5, tzinfo=UTC)
MS = int(MOMENT.timestamp() * 1000)
HOUR = MS - (4 * 60 + 5) * 1000


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("2014-10-21 03:04:05", "iso", MS),
        ("2014-10-21T03:04:05Z", "iso", MS),
        ("2014-10-21T05:04:05.000000+02:00", "iso", MS),
        ("2014-10-21 03:04:05 UTC", "iso", MS),
        ("2014-10-21 03:04:05.123456z", "iso", MS + 123),
        ("2014/10/21 03:04:05", "iso", MS),
        ("2014-10-21 03:04:05.123456789", "iso", MS + 123),
        ("2014-10-21", "iso", HOUR - 3 * 3_600_000),
        (str(MS // 1000), "seconds", MS),
        (f"{MS // 1000}.25", "seconds", MS + 250),
        (str(MS), "milliseconds", MS),
        (f"{MS}000", "microseconds", MS),
        (f"{MS}000000", "nanoseconds", MS),
        ("14102103", "yymmddhh", HOUR),
        ("20141021", "yyyymmdd", HOUR - 3 * 3_600_000),
        ("2014102103", "yyyymmddhh", HOUR),
        ("20141021030405", "yyyymmddhhmmss", MS),
        ("21.10.2014 03:04:05", "day_first", MS),
        ("21/10/2014, 3:04:05", "day_first", MS),
        ("21-10-2014T03:04:05.1239", "day_first", MS + 123),
        ("21.10.2014 03:04:05,5", "day_first", MS + 500),
        ("21.10.2014", "day_first", HOUR - 3 * 3_600_000),
        ("10/21/2014 3:04:05 am", "month_first", MS),
        ("10/21/2014 03:04:05 PM", "month_first", MS + 12 * 3_600_000),
        ("10/21/2014 12:04:05 AM", "month_first", MS - 3 * 3_600_000),
        ("10/21/2014 12:00PM", "month_first", HOUR + 9 * 3_600_000),
        ("2014-10-21 3:4:5", "iso", MS),
        ("2014-10-21 3:04", "iso", HOUR + 4 * 60_000),
        ("2014-10-21 5:04:05 +0200", "iso", MS),
        ("20141021T030405", "iso", MS),
        ("21/Oct/2014:03:04:05 +0000", "month_name", MS),
        ("[21/Oct/2014:05:04:05 +0200]", "month_name", MS),
        ("Tue Oct 21 03:04:05 UTC 2014", "month_name", MS),
        ("Tue, 21 Oct 2014 03:04:05 GMT", "month_name", MS),
        ("October 21st, 2014 3:04:05 AM", "month_name", MS),
        ("21-Oct-2014", "month_name", HOUR - 3 * 3_600_000),
    ],
)
def test_formats(text: str, kind: str, expected: int) -> None:
    stamps, bad = stamps_of(pa.array([text.encode(), b" ? ", None, b"soon"]), kind)  # type: ignore[arg-type]
    assert stamps.tolist() == [expected, MISSING_STAMP, MISSING_STAMP, MISSING_STAMP]
    assert bad.tolist() == [False, False, False, True]
    assert stamps_of(pa.array([text]), kind)[0].tolist() == [expected]  # type: ignore[arg-type]


DAY_FIRST = (
    *("31.02.2014", "10/21/2014", "0.10.2014", "21.10.14"),
    *("2014-10-21", "1.10.2014 24:00", "1.10.2014 13:00 PM"),
)


def test_moments_that_do_not_exist() -> None:
    days = pa.array(["20140230", "20141301", "20141000", "120141021"])
    assert stamps_of(days, "yyyymmdd")[1].all()
    assert stamps_of(pa.array(["14102124"]), "yymmddhh")[1].all()
    stamps, bad = stamps_of(pa.array([*DAY_FIRST, "1.10.2014"]), "day_first")
    assert bad.tolist() == [True] * len(DAY_FIRST) + [False]
    assert (stamps[:-1] == MISSING_STAMP).all()


def test_typed_columns_need_no_format() -> None:
    east = timezone(timedelta(hours=5))
    for column in (
        pa.array([MOMENT], pa.timestamp("us", "UTC")),
        pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("ns")),
        pa.array([MOMENT.astimezone(east)], pa.timestamp("s", "+05:00")),
    ):
        assert stamps_of(column, "iso")[0].tolist() == [MS]
    assert stamps_of(pa.array([MOMENT.date(), None]), "iso")[0][1] == MISSING_STAMP


@given(st.datetimes(datetime(1990, 1, 1), datetime(2050, 1, 1)))
def test_every_form_of_a_moment_is_the_same_stamp(moment: datetime) -> None:
    moment = moment.replace(microsecond=0, tzinfo=UTC)
    expected = int(moment.timestamp()) * 1000
    for text, kind in (
        (moment.isoformat(), "iso"),
        (moment.strftime("%Y-%m-%d %H:%M:%S"), "iso"),
        (str(int(moment.timestamp())), "seconds"),
        (moment.strftime("%Y%m%d%H%M%S"), "yyyymmddhhmmss"),
        (moment.strftime("%d.%m.%Y %H:%M:%S"), "day_first"),
        (moment.strftime("%m/%d/%Y %I:%M:%S %p"), "month_first"),
    ):
        assert stamps_of(pa.array([text]), kind)[0].tolist() == [expected]  # type: ignore[arg-type]


@given(st.datetimes(datetime(1960, 1, 1), datetime(2050, 1, 1)))
def test_cycles(moment: datetime) -> None:
    ms = np.array([int(moment.replace(tzinfo=UTC, microsecond=0).timestamp()) * 1000, MISSING_STAMP])
    assert cycle_of(ms, "hour_of_day").tolist() == [moment.hour, -1]
    assert cycle_of(ms, "day_of_week").tolist() == [moment.weekday(), -1]
