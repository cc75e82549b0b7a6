"""Labels that are comparisons, clicks among impressions, rates and probabilities are 0 and 1 once prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhen.errors import UserError
from search.analysis.losses import blocks_of
from trials.data.encoding import encode_rows
from trials.data.log_schema import SPLITS
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.raw import readers
from trials.data.read_options import ReadOptions
from trials.data.schema_yaml import read_schema
from trials.records.metrics import example_weights, log_loss

Columns = dict[str, list[Any]]
WriteCsv = Callable[..., Path]
ROWS = 300


@pytest.fixture
def rated(clicks: Columns) -> Columns:
    """The click log with ratings, states, and what an aggregated log has."""
    rng = np.random.default_rng(3)
    impressions = rng.integers(0, 9, ROWS)
    clicked = rng.binomial(impressions, 0.4)
    rates = np.round(rng.random(ROWS), 3)
    columns = {name: values[:ROWS] for name, values in clicks.items() if name != "example_weight"}
    return columns | {
        "rating": rng.integers(1, 6, ROWS).tolist(),
        "status": rng.choice(["delivered", "Canceled", "open"], ROWS).tolist(),
        "clicks": clicked.tolist(),
        "impressions": impressions.tolist(),
        "ctr": rates.tolist(),
    }


def labels_of(log: PreparedLog) -> list[int]:
    return np.concatenate([log.split(name).labels for name in SPLITS]).astype(int).tolist()


def weights_of(log: PreparedLog) -> list[float]:
    return np.concatenate([np.asarray(log.split(name).weight) for name in SPLITS]).tolist()


@pytest.mark.parametrize(
    ("label", "column", "true"),
    [
        ("rating>=4", "rating", lambda value: value >= 4),
        ("rating > 3.5", "rating", lambda value: value > 3),
        ("rating<2", "rating", lambda value: value < 2),
        ("rating<=2", "rating", lambda value: value <= 2),
        ("rating=4.0", "rating", lambda value: value == 4),
        ("status==delivered", "status", lambda value: value == "delivered"),
        ("status!=canceled", "status", lambda value: value != "Canceled"),
    ],
)
def test_a_comparison_is_the_label(
    label: str, column: str, true: Callable[[Any], bool], rated: Columns, write_csv: WriteCsv
) -> None:
    log = prepare([write_csv(rated)], options=ReadOptions(label=label))
    assert labels_of(log) == [int(true(value)) for value in rated[column]]
    assert column not in log.schema.inputs


def test_a_comparison_is_found_again(rated: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    path, out, options = write_csv(rated), tmp_path / "log", ReadOptions(label="rating >= 4")
    log = prepare([path], out=out, options=options)
    assert prepare([path], out=out).fingerprint == log.fingerprint, "by the schema that was written"
    assert prepare([path], options=ReadOptions(label="rating>=4")).fingerprint == log.fingerprint
    assert prepare([out], options=options).directory == log.directory
    with pytest.raises(UserError, match=r"label=rating>=5 is given, but .* says label=rating>=4"):
        prepare([path], out=out, options=ReadOptions(label="rating>=5"))


def test_a_column_of_the_name_goes_before_a_comparison(rated: Columns, write_csv: WriteCsv) -> None:
    rated["rating>=4"] = [int(value == 1) for value in rated["rating"]]
    rated["a=b"] = rated["rating"]
    assert (
        labels_of(prepare([write_csv(rated)], options=ReadOptions(label="rating>=4"))) == rated["rating>=4"]
    )
    of_equals = prepare([write_csv(rated)], options=ReadOptions(label="a=b>=2"))
    assert labels_of(of_equals) == [int(value >= 2) for value in rated["rating"]]


def expanded(columns: Columns, clicks: Sequence[int], impressions: Sequence[int]) -> Columns:
    """The log before it was aggregated: a row for each impression."""
    inputs = {
        name: columns[name] for name in columns if name not in ("clicks", "impressions", "ctr", "click")
    }
    rows = np.repeat(np.arange(len(clicks)), impressions)
    shown = {name: [values[row] for row in rows] for name, values in inputs.items()}
    label = [int(place < n) for n, of in zip(clicks, impressions, strict=True) for place in range(of)]
    return {**shown, "click": label}


def test_clicks_among_impressions_are_a_row_for_each_impression(
    rated: Columns, write_csv: WriteCsv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base rate and NE are those of the log before it was aggregated."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 2048)
    path = write_csv(rated)
    log = prepare([path], options=ReadOptions(label="clicks/impressions"))
    # split by hand where the aggregated log's cuts are: both are by time
    singly = expanded(rated, rated["clicks"], rated["impressions"])
    for name in ("ctr", "click"):
        assert name in log.schema.inputs, "ignored by nobody: the person may ignore them in schema.yaml"
    for name in SPLITS:
        split = log.split(name)
        assert split.pair is not None
        first, last = (str(np.datetime64(int(stamp), "ms")) for stamp in split.timestamp[[0, -1]])
        times = [time.replace(" ", "T") for time in singly["event_time"]]
        shown = np.array([first[:19] <= time <= last[:19] for time in times])
        label = np.array(singly["click"])[shown]
        assert split.base_rate == pytest.approx(label.mean())
        weights = example_weights(split.labels, split.weight, 1.0)
        assert weights.sum() == shown.sum()
        # a prediction that depends on the row: by its rating
        rating = {stamp: r / 6 for stamp, r in zip(times, np.array(singly["rating"]), strict=True)}
        stamps = [str(np.datetime64(int(stamp), "ms"))[:19] for stamp in split.timestamp]
        of_pairs = log_loss(np.array([rating[stamp] for stamp in stamps]), split.labels, weights)
        of_rows = log_loss(
            np.array([rating[time] for time in np.array(times)[shown]]), label, np.ones(len(label))
        )
        assert of_pairs == pytest.approx(of_rows)
        pair = np.flatnonzero(split.pair)
        assert np.array_equal(split.inputs.take(pair).categorical, split.inputs.take(pair - 1).categorical)
        assert split.labels[pair].tolist() == [0] * len(pair)
        assert split.labels[pair - 1].tolist() == [1] * len(pair)
    assert f"rows left out, whose weight is 0: {rated['impressions'].count(0)}" in log.notes
    assert sum(part.rows for part in encode_rows([path], log.encoding)) == ROWS
    train, ratings = log.split("train"), log.encoding.vocabularies["rating"]
    assert train.pair is not None
    assert ratings.counts.sum() == (~train.pair).sum(), "values of a row count once"


def test_pairs_stay_together_in_splits_and_blocks(rated: Columns, write_csv: WriteCsv) -> None:
    del rated["event_time"]
    for by in ("order", "random"):
        options = ReadOptions.model_validate({"label": "clicks/impressions", "split": {"by": by}})
        log = prepare([write_csv(rated)], options=options)
        for name in SPLITS:
            split = log.split(name)
            assert not split.pair[0], "no part begins with the rest of a row"
            blocks, second = blocks_of(log, split), np.flatnonzero(split.pair)
            assert np.array_equal(blocks.block_N[second], blocks.block_N[second - 1])
        assert sum(int(log.split(name).pair.sum()) for name in SPLITS) == sum(  # type: ignore[union-attr]
            0 < clicks < shown for clicks, shown in zip(rated["clicks"], rated["impressions"], strict=True)
        )


@pytest.mark.parametrize("weighted", [False, True])
def test_a_rate_is_two_rows(weighted: bool, rated: Columns, write_csv: WriteCsv) -> None:
    options = ReadOptions(label="ctr", weight="impressions" if weighted else None)
    log = prepare([write_csv(rated)], options=options)
    rates = np.array(rated["ctr"])
    weight = np.array(rated["impressions"]) if weighted else np.ones(ROWS)
    total = np.average(rates, weights=weight)
    clicks = np.dot(labels_of(log), weights_of(log))
    assert clicks / sum(weights_of(log)) == pytest.approx(total, rel=1e-5)
    assert sum(weights_of(log)) == pytest.approx(weight.sum(), rel=1e-5)
    assert ("impressions" in log.schema.inputs) != weighted
    assert any("'ctr' is a click rate or probability" in note for note in log.notes)


def test_a_rate_in_percent_is_one_in_hundredths(rated: Columns, write_csv: WriteCsv) -> None:
    options = ReadOptions(label="ctr", weight="impressions")
    plain = prepare([write_csv(rated)], options=options)
    rated["ctr"] = [f"{100 * rate:.1f}%" for rate in rated["ctr"]]
    percent = prepare([write_csv(rated)], options=options)
    assert labels_of(percent) == labels_of(plain)
    assert weights_of(percent) == pytest.approx(weights_of(plain), rel=1e-5)


def test_a_named_weight_is_no_feature(rated: Columns, write_csv: WriteCsv) -> None:
    rated["example_weight"] = [1.0, 2.0] * (ROWS // 2)
    log = prepare([write_csv(rated)], options=ReadOptions(weight="impressions"))
    assert weights_of(log) == rated["impressions"]
    assert labels_of(log) == rated["click"]
    assert not {"impressions", "example_weight"} & set(log.schema.inputs)


@pytest.mark.parametrize(
    ("options", "columns", "said"),
    [
        ({"label": "rating"}, {}, r"more than two values.*label='rating>=4'.*label=rating/impressions.*weight="),
        ({"label": "rting>=4"}, {}, r"Did you mean 'rating'.*label='rating>=4'"),
        ({"label": "clicks/impression"}, {}, r"'impression'.*Did you mean 'impressions'"),
        ({"label": "status>=delivered"}, {}, r">= compares with a number, received 'delivered'"),
        ({"label": "rating>=9"}, {}, r"only one class.*true where the value is >=9"),
        ({"label": "rating>=4"}, {"rating": ["good"] + [3, 4] * 150}, r"line 2: column 'rating' holds 'good'"),
        ({"label": "clicks/impressions"}, {"clicks": [2, 3] * 150, "impressions": [3, 2] * 150},
         r"line 3: the label 'clicks' is 3; expected from 0 to 'impressions', which is 2"),
        ({"label": "ctr", "weight": "impresions"}, {}, r"unknown weight column.*Did you mean 'impressions'"),
        ({"label": "ctr"}, {"ctr": [0.5, 0.25, 1.5] * 100}, r"more than two values.*label=ctr weight=impressions"),
    ],
)  # fmt: skip
def test_a_wrong_label_is_answered_with_the_ways(
    options: dict[str, str], columns: Columns, said: str, rated: Columns, write_csv: WriteCsv
) -> None:
    rated |= {name: values[:ROWS] for name, values in columns.items()}
    with pytest.raises(UserError, match=said):
        prepare([write_csv(rated)], options=ReadOptions.model_validate(options))


def test_rows_with_a_wrong_share_may_be_skipped(rated: Columns, write_csv: WriteCsv) -> None:
    rated["clicks"][:3], rated["impressions"][:3] = [5, "", 1], [2, 4, ""]
    options = ReadOptions(label="clicks/impressions", skip_bad_rows=True)
    log = prepare([write_csv(rated)], options=options)
    assert "rows skipped for want of a label or a weight: 3" in log.notes
    assert sum(weights_of(log)) == sum(rated["impressions"][3:])


def test_shares_have_their_negatives_in_them(rated: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    log = prepare([write_csv(rated)], options=ReadOptions(label="clicks/impressions"))
    text = (log.directory / "schema.yaml").read_text()
    edited = tmp_path / "edited.yaml"
    edited.write_text(text.replace("negative_sampling_rate: 1.0", "negative_sampling_rate: 0.1"))
    with pytest.raises(UserError, match=r"negative_sampling_rate is 1, not 0\.1"):
        read_schema(edited)
