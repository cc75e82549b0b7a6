from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dhen.errors import UserError
from dhen.schema import kept_rows
from trials.data.encoding import Encoding
from trials.data.log_schema import CategoricalColumn, IgnoredColumn, LogSchema, SplitRule
from trials.data.prepare import prepare_log as prepare_module
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import MANIFEST, VERSION, PreparedLog, Split
from trials.data.raw import readers
from trials.data.raw.columns import MISSING_STAMP
from trials.data.read_options import GivenSplit, ReadOptions
from trials.data.roles.infer import infer_schema
from trials.data.schema_yaml import read_schema
from trials.store import user_cache as atomic
from trials.store.user_cache import user_cache

Columns = dict[str, list[Any]]
WriteCsv = Callable[..., Path]


def arrays(split: Split) -> list[np.ndarray]:
    found = [
        split.labels,
        split.inputs.categorical,
        split.inputs.numeric,
        split.inputs.bags[0].ids,
        split.inputs.bags[0].offsets,
    ]
    return [*found, *(one for one in (split.weight, split.timestamp) if one is not None)]


def same(one: PreparedLog, two: PreparedLog) -> bool:
    return one.encoding.features == two.encoding.features and all(
        np.array_equal(a, b)
        for name in ("train", "validation", "test")
        for a, b in zip(arrays(one.split(name)), arrays(two.split(name)), strict=True)
    )


def written(columns: Columns, write_csv: WriteCsv, **rows: slice) -> list[Path]:
    """The rows of each file, by its name."""
    return [
        write_csv({name: values[of_file] for name, values in columns.items()}, f"{file}.csv")
        for file, of_file in rows.items()
    ]


def write_parquet(columns: Columns, path: Path) -> Path:
    typed = {
        **columns,
        "price": [value or None for value in columns["price"]],
        "country": pa.array([value or None for value in columns["country"]]).dictionary_encode(),
        "tags": [[tag for tag in tags.split("|") if tag] for tags in columns["tags"]],
        "event_time": pa.array(np.array(columns["event_time"], dtype="M8[us]")),
        "click": [bool(value) for value in columns["click"]],
    }
    pq.write_table(pa.table(typed), path)
    return path


def test_every_format_gives_the_same_arrays(clicks: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    reference = prepare([write_csv(clicks)])
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(write_csv(clicks).read_bytes()))
    parquet = write_parquet(clicks, tmp_path / "log.parquet")
    packed_parquet = tmp_path / "packed.parquet.gz"
    packed_parquet.write_bytes(gzip.compress(parquet.read_bytes()))
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in written(clicks, write_csv, a=slice(0, 200), b=slice(200, 599), c=slice(599, None)):
        shutil.move(path, folder)
    logs = [write_csv(clicks, "log.tsv", "\t", "\r\n"), packed, parquet, packed_parquet, folder]
    for path in logs:
        assert same(reference, prepare([path])), path.name


def test_the_arrays_hold_the_log(clicks: Columns, write_csv: WriteCsv) -> None:
    log = prepare([write_csv(clicks)])
    splits = [log.split(name) for name in ("train", "validation", "test")]
    assert np.concatenate([split.labels for split in splits]).tolist() == clicks["click"]
    weights = [split.weight for split in splits if split.weight is not None]
    assert np.concatenate(weights).tolist() == clicks["example_weight"]
    stamps = np.concatenate([split.timestamp for split in splits if split.timestamp is not None])
    assert stamps.tolist() == np.array(clicks["event_time"], dtype="M8[ms]").astype(int).tolist()
    assert [split.chronological for split in splits] == [True] * 3
    for split in splits:
        assert split.base_rate == pytest.approx(np.average(split.labels, weights=split.weight))
    summary = log.summary()
    assert sum(summary.rows.values()) == 600
    assert (summary.tables, summary.numeric, summary.ne_floor) == (7, 3, None)
    with pytest.raises(UserError, match="Did you mean 'train'"):
        log.split("tran")
    with pytest.raises(ValueError, match="read-only"):
        log.split("train").labels[0] = 1


def test_blocks_and_batches_change_nothing(
    clicks: Columns, write_csv: WriteCsv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parquet = write_csv(clicks), write_parquet(clicks, tmp_path / "log.parquet")
    whole = prepare([path], out=tmp_path / "whole")
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(readers, "PARQUET_ROWS", 31)
    tiny, tiny_parquet = prepare([path], out=tmp_path / "tiny"), prepare([parquet], out=tmp_path / "parquet")
    assert same(whole, tiny)
    assert same(whole, tiny_parquet)


def test_columns_that_are_empty_for_long(
    clicks: Columns, write_csv: WriteCsv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole batches without a value, or without a row."""
    clicks["late"] = [""] * 300 + ["x", "y"] * 150
    clicks["late_tags"] = [""] * 300 + ["x|y", "y"] * 150
    clicks["late_price"] = [""] * 300 + [1.5, 2.5] * 150
    clicks["click"][:100] = [""] * 100
    whole = prepare([write_csv(clicks)], options=ReadOptions(skip_bad_rows=True))
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1024)
    tiny = prepare(
        [write_csv(clicks)], options=ReadOptions(skip_bad_rows=True), out=whole.directory.with_name("tiny")
    )
    assert same(whole, tiny)
    assert sum(tiny.summary().rows.values()) == 500
    names = [table.name for table in tiny.features.tables]
    assert {"late", "late_tags"} <= set(names)
    assert np.all(tiny.split("train").inputs.categorical[:200, names.index("late")] == 0)
    assert "late_price__missing" in tiny.features.numeric


def test_rows_out_of_order_are_split_by_time(clicks: Columns, write_csv: WriteCsv) -> None:
    order = np.random.default_rng(1).permutation(600)
    clicks = {name: [values[i] for i in order] for name, values in clicks.items()}
    clicks["event_time"][0] = clicks["event_time"][1] = ""
    log = prepare([write_csv(clicks)])
    stamps = [log.split(name).timestamp for name in ("train", "validation", "test")]
    train, validation, test = (one for one in stamps if one is not None)
    assert train[train != MISSING_STAMP].max() < validation.min() <= validation.max() < test.min()
    assert (train == MISSING_STAMP).sum() == 2
    assert log.notes[-1] == "training rows for want of a time stamp: 2"
    assert not log.split("train").chronological


def test_split_by_files_which_gives_way_to_what_is_given(clicks: Columns, write_csv: WriteCsv) -> None:
    paths = written(clicks, write_csv, a=slice(0, 100), b=slice(100, 400), c=slice(400, None))
    schema = infer_schema(paths).replace(split=SplitRule(by="files", validation=("a.csv",), test=("c.csv",)))
    log = prepare(paths, schema=schema)
    assert log.summary().rows == {"train": 300, "validation": 100, "test": 200}
    over = ReadOptions(split=GivenSplit(validation=0.25))
    cut = prepare(paths, schema=schema, options=over)
    assert cut.schema.split == SplitRule(by="timestamp", validation=0.25, test=("c.csv",))
    assert cut.summary().rows == {"train": 300, "validation": 100, "test": 200}
    (folder := paths[0].parent / "later").mkdir()
    again = paths[1].rename(folder / "c.csv")
    with pytest.raises(UserError, match=r"2 files of the log are called 'c\.csv'"):
        prepare([paths[0], again, paths[2]], schema=schema)
    again.rename(paths[1])
    renamed = paths[0].rename(paths[0].with_name("renamed.csv"))
    with pytest.raises(UserError, match=r"unknown file 'a\.csv'"):
        prepare([renamed, *paths[1:]], schema=schema)


def test_given_test_files_beside_a_fraction_for_validation(clicks: Columns, write_csv: WriteCsv) -> None:
    """As most public sets come: the official test file is kept, validation is the latest of the other rows."""
    # the earliest rows are given: time decides nothing
    test, train = written(clicks, write_csv, test=slice(0, 100), train=slice(100, None))
    inferred = infer_schema([test, train])
    rule = {"by": inferred.split.by, "test": ["test.csv"], "validation": 0.2}
    schema = inferred.replace(split=SplitRule.model_validate(rule))
    log = prepare([test, train], schema=schema)
    assert log.summary().rows == {"train": 400, "validation": 100, "test": 100}
    assert log.split("test").labels.tolist() == clicks["click"][:100]
    assert log.split("validation").labels.tolist() == clicks["click"][-100:]
    by_order = schema.replace(split=schema.split.replace(by="order"))
    assert same(prepare([test, train], schema=by_order), log)
    with pytest.raises(UserError, match=r"test takes all rows: training and validation need one each"):
        prepare([test], schema=schema)
    renamed = test.rename(test.with_name("renamed.csv"))
    with pytest.raises(
        UserError, match=r"split: unknown file 'test\.csv'\. .*Known: renamed\.csv, train\.csv"
    ):
        prepare([renamed, train], schema=schema)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, {"by": "timestamp", "validation": 0.1, "test": 0.1}),
        ({"validation": 0.2}, {"by": "timestamp", "validation": 0.2, "test": 0.1}),
        ({"test": ["b.csv"]}, {"by": "timestamp", "validation": 0.1, "test": ["b.csv"]}),
        ({"by": "order", "test": ["b.csv"]}, {"by": "order", "validation": 0.1, "test": ["b.csv"]}),
        (
            {"validation": ["c.csv"], "test": ["b.csv"]},
            {"by": "files", "validation": ["c.csv"], "test": ["b.csv"]},
        ),
    ],
)
def test_what_is_given_of_a_split_replaces_the_inferred(
    clicks: Columns, write_csv: WriteCsv, given: dict[str, Any], rule: dict[str, Any]
) -> None:
    paths = written(clicks, write_csv, a=slice(0, 200), b=slice(200, 300), c=slice(300, None))
    log = prepare(paths, options=ReadOptions(split=GivenSplit.model_validate(given)))
    assert log.schema.split == SplitRule.model_validate(rule)
    assert read_schema(log.directory / "schema.yaml").split == log.schema.split
    assert same(log, prepare(paths, schema=log.schema))


def test_the_ne_floor_of_a_generated_log(clicks: Columns, write_csv: WriteCsv) -> None:
    rng = np.random.default_rng(0)
    truth = rng.uniform(0.1, 0.9, 600)
    clicks["oracle_probability"] = truth.tolist()
    clicks["click"] = (rng.random(600) < truth).astype(int).tolist()
    log = prepare([write_csv(clicks)])
    split = log.split("test")
    assert split.oracle is not None
    np.testing.assert_array_equal(split.oracle, truth[-split.rows :])
    loss = -np.where(split.labels > 0, np.log(split.oracle), np.log1p(-split.oracle))
    rate = np.average(split.labels, weights=split.weight)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    floors = log.summary().ne_floor
    assert floors["test"] == pytest.approx(np.average(loss, weights=split.weight) / entropy)
    assert "oracle_probability" not in [*log.features.numeric, *(table.name for table in log.features.tables)]
    clicks["oracle_probability"][3] = 1.5
    with pytest.raises(
        UserError, match=r"line 5: column 'oracle_probability' holds '1.5', which is no probability"
    ):
        prepare([write_csv(clicks)])


def test_negative_sampling_is_corrected_for(clicks: Columns, write_csv: WriteCsv) -> None:
    path = write_csv(clicks)
    schema = infer_schema([path]).replace(negative_sampling_rate=0.1)
    split = prepare([path], schema=schema).split("train")
    counts = np.where(split.labels > 0, 1, 10) * split.weight
    assert split.base_rate == pytest.approx(np.average(split.labels, weights=counts))


def test_a_prepared_log_is_found_again(
    clicks: Columns, write_csv: WriteCsv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_csv(clicks)
    first = prepare([path])
    assert first.directory.parent == user_cache()
    monkeypatch.setattr(prepare_module, "build", None)  # calling it would fail
    assert prepare([path]).directory == first.directory
    copy = tmp_path / "elsewhere" / "copy.csv"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    assert prepare([copy]).directory == first.directory
    assert prepare([first.directory]).fingerprint == first.fingerprint


def test_the_fingerprint_is_of_what_the_arrays_depend_on(clicks: Columns, write_csv: WriteCsv) -> None:
    path = write_csv(clicks)
    first = prepare([path])
    assert (
        prepare([path], schema=first.schema).fingerprint == first.fingerprint
    )  # everything left open decided alike
    ignoring = {**first.schema.columns, "country": IgnoredColumn()}
    others = [
        prepare([path], schema=first.schema.replace(columns=ignoring)),
        prepare([path], schema=first.schema.replace(split=SplitRule(by="order"))),
        prepare([path], encoding=first.encoding),
    ]
    clicks["price"][0] = 1.25
    others.append(prepare([write_csv(clicks)]))
    assert len({first.fingerprint, *(log.fingerprint for log in others)}) == 5


def test_an_encoding_that_was_fitted_before(clicks: Columns, write_csv: WriteCsv) -> None:
    clicks["oracle_probability"] = [0.3] * 600
    first = prepare([write_csv(clicks)])
    later = {
        name: values[::-1]
        for name, values in clicks.items()
        if name not in ("oracle_probability", "request_id")
    }
    later["user_id"] = [user + 1000 for user in later["user_id"]]
    log = prepare([write_csv(later, "later.csv")], encoding=first.encoding)
    assert log.features == first.features
    users = [table.name for table in log.features.tables].index("user_id")
    assert np.all(log.split("train").inputs.categorical[:, users] == 1)
    by_order = first.schema.replace(split=SplitRule(by="order", validation=0.3, test=0.3))
    assert prepare([write_csv(later)], encoding=first.encoding, schema=by_order).summary().rows["test"] == 180
    given = prepare(
        [write_csv(later)],
        encoding=first.encoding,
        options=ReadOptions(split=GivenSplit(by="order", test=0.3)),
    )
    assert given.encoding.schema.split.test == 0.3
    assert given.fingerprint != prepare([write_csv(later)], encoding=first.encoding).fingerprint
    del later["price"]
    with pytest.raises(UserError, match=r"the encoding: unknown column in the schema 'price'"):
        prepare([write_csv(later)], encoding=first.encoding)


def test_the_schema_in_the_output_directory_is_the_one_to_edit(
    clicks: Columns, write_csv: WriteCsv, tmp_path: Path
) -> None:
    path, out = write_csv(clicks), tmp_path / "out"
    first = prepare([path], out=out)
    edited = (
        (out / "schema.yaml")
        .read_text()
        .replace("price: {role: numeric", "price: {role: ignore}  # {role: numeric")
    )
    (out / "schema.yaml").write_text(edited + "# my comment\n")
    with pytest.raises(UserError, match=r"was edited after the log was prepared"):
        PreparedLog.open(out)
    second = prepare([path], out=out)
    assert second.fingerprint != first.fingerprint
    assert second.features.numeric == ("dwell_seconds",)
    assert (out / "schema.yaml").read_text().endswith("# my comment\n")
    assert PreparedLog.open(out).fingerprint == second.fingerprint
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_schema_alone_may_wait_in_the_output_directory(
    clicks: Columns, write_csv: WriteCsv, tmp_path: Path
) -> None:
    path, out = write_csv(clicks), tmp_path / "out"
    out.mkdir()
    shutil.copy(prepare([path]).directory / "schema.yaml", out)
    assert prepare([path], out=out).schema.label == "click"
    assert read_schema(out / "schema.yaml") == infer_schema([path])


def test_other_directories_are_left_alone(clicks: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    path = write_csv(clicks)
    for out in (tmp_path, path):
        with pytest.raises(UserError, match="no prepared log and not empty"):
            prepare([path], out=out)
    with pytest.raises(UserError, match="cannot be written"):
        prepare([path], out=path / "below")
    log = prepare([path])
    with pytest.raises(UserError, match="prepared already"):
        prepare([log.directory], out=tmp_path / "new")
    assert prepare([log.directory], options=ReadOptions(label="click")).directory == log.directory
    for other in ({"label": "country"}, {"weight": "price"}, {"format": "tsv"}, {"skip_bad_rows": True}):
        with pytest.raises(UserError, match="prepared already"):
            prepare([log.directory], options=ReadOptions.model_validate(other))
    assert PreparedLog.is_prepared(log.directory)
    assert not PreparedLog.is_prepared(tmp_path)
    with pytest.raises(UserError, match="not a prepared log"):
        PreparedLog.open(tmp_path)


class Bad(NamedTuple):
    change: Callable[[Columns], object]
    message: str
    skipped: str | None
    """The note when bad rows are skipped; None where that does not help."""


def put(name: str, row: int, value: object) -> Callable[[Columns], object]:
    return lambda columns: columns[name].__setitem__(row, value)


BAD = [
    Bad(
        put("price", 40, "12 EUR"),
        r"log.csv, line 42: column 'price' holds '12 EUR', which is no number",
        "unreadable values of 'price', taken for missing: 1",
    ),
    Bad(
        lambda columns: columns["event_time"].__setitem__(slice(9, 60), ["soon"] * 51),
        r"line 11: column 'event_time' holds 'soon', which is no time stamp",
        "unreadable values of 'event_time', taken for missing: 51",
    ),
    Bad(
        put("click", 3, ""),
        r"1 of 600 rows have no label in 'click'",
        "rows skipped for want of a label or a weight: 1",
    ),
    Bad(
        put("example_weight", 5, "-1.0"),
        r"line 7: the weight 'example_weight' is -1.0",
        "rows skipped for want of a label or a weight: 1",
    ),
    Bad(put("click", 3, "maybe"), r"more than two values: '\d', '\d', 'maybe'", None),
    Bad(lambda columns: columns.update(click=[0] * 600), "only one class: '0'", None),
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_rows_are_named_or_skipped(bad: Bad, clicks: Columns, write_csv: WriteCsv) -> None:
    schema = infer_schema([write_csv(clicks)])
    bad.change(clicks)
    path = write_csv(clicks)
    with pytest.raises(UserError, match=bad.message):
        prepare([path], schema=schema)
    if bad.skipped is not None:
        assert bad.skipped in prepare([path], schema=schema, options=ReadOptions(skip_bad_rows=True)).notes


def test_ragged_rows(clicks: Columns, write_csv: WriteCsv) -> None:
    path = write_csv(clicks)
    path.write_text(path.read_text() + "1,2\n")
    with pytest.raises(UserError, match=r"log.csv, line 602: expected 9 fields, found 2"):
        prepare([path])
    log = prepare([path], options=ReadOptions(skip_bad_rows=True))
    assert log.notes[-1] == "rows skipped for a wrong number of fields: 1"
    assert sum(log.summary().rows.values()) == 600


def test_lines_that_an_open_quote_takes_are_counted(clicks: Columns, write_csv: WriteCsv) -> None:
    path = write_csv(clicks)
    head, *rows = path.read_text().splitlines()
    rows[500] = 'r,2024-02-01,"1' + rows[500]
    path.write_text("\n".join((head, *rows)) + "\n")
    log = prepare([path], options=ReadOptions(skip_bad_rows=True))
    left_out = 600 - sum(log.summary().rows.values())
    assert left_out == 100
    assert log.notes[-1] == "further lines within these, which a quote that is not closed takes: 99"


def test_a_split_of_one_class(clicks: Columns, write_csv: WriteCsv) -> None:
    clicks["click"] = [i % 2 if i < 540 else 0 for i in range(600)]
    with pytest.raises(
        UserError, match=r"the test split \(by timestamp\) has 60 rows, all of them without a click"
    ):
        prepare([write_csv(clicks)])
    clicks["click"] = [i % 2 for i in range(600)]
    clicks["example_weight"] = [1.0 if i < 540 else i % 2 for i in range(600)]
    with pytest.raises(UserError, match=r"the test split .* whose weights leave only one class"):
        prepare([write_csv(clicks)])


def test_splits_that_are_joined_may_be_of_one_class(clicks: Columns, write_csv: WriteCsv) -> None:
    clicks["click"] = [1] * 20 + [0] * 580
    path = write_csv(clicks)
    log = prepare([path], joins_splits=True)
    assert log.summary().base_rate["test"] == 0.0
    with pytest.raises(UserError, match="all of them without a click"):
        prepare([path])  # it is not the same log for others


def test_how_often_ids_come_again_is_counted(clicks: Columns, write_csv: WriteCsv) -> None:
    """Shares of the ids of the train split whose row occurs among the most frequent ones, but for its first time;
    missing and rare values have a row each."""
    clicks["user_id"] = [None if i % 7 == 0 else user for i, user in enumerate(clicks["user_id"])]
    log = prepare([write_csv(clicks)])
    counted = {table.name: table for table in log.features.tables}
    places = {table.name: place for place, table in enumerate(log.features.tables)}
    assert counted["user_id"].repeats
    for name in log.schema.categorical:
        ids = log.split("train").inputs.categorical[:, places[name]]
        again = np.sort(np.bincount(ids, minlength=counted[name].rows))[::-1].clip(min=1) - 1
        shares = [again[:rows].sum() / len(ids) for rows in kept_rows(counted[name].rows)]
        assert counted[name].repeats == pytest.approx(shares, abs=1e-4)
    assert all(not counted[name].repeats for name in log.schema.cycles)


def test_an_encoding_of_before_ids_were_counted(clicks: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    log = prepare([write_csv(clicks)])
    log.encoding.save(tmp_path)
    file = tmp_path / "tables.json"
    kept = json.loads(file.read_text())
    assert kept.pop("repeats")
    file.write_text(json.dumps(kept))
    tables = Encoding.load(tmp_path).features.tables
    assert tables == tuple(table.replace(repeats=()) for table in log.features.tables)


def test_schemas_that_do_not_fit(clicks: Columns, write_csv: WriteCsv) -> None:
    path = write_csv(clicks)
    schema = infer_schema([path])
    with pytest.raises(UserError, match="label=country is given, but the schema says label=click: change"):
        prepare([path], schema=schema, options=ReadOptions(label="country"))
    unknown = LogSchema(columns={**schema.columns, "cuntry": CategoricalColumn()})
    with pytest.raises(UserError, match=r"'cuntry'. Did you mean 'country'"):
        prepare([path], schema=unknown)


def test_progress(clicks: Columns, write_csv: WriteCsv) -> None:
    calls: list[tuple[str, int, int | None]] = []
    prepare([write_csv(clicks)], progress=lambda *call: calls.append(call))
    assert [calls[i] for i in range(3)] == [(step, 600, 600) for step in ("reading", "fitting", "writing")]


def test_damage_is_noticed_and_repaired(clicks: Columns, write_csv: WriteCsv) -> None:
    path = write_csv(clicks)
    log = prepare([path])
    array, manifest = log.directory / "train" / "labels.npy", log.directory / MANIFEST
    scales = log.directory / "encoding" / "numeric.json"
    other_version = f'"version": {VERSION}', '"version": 0'
    for damage, said in (
        (array.unlink, "damaged: train/labels"),
        (lambda: array.write_bytes(array.read_bytes()[:-4]), "damaged: train/labels"),
        (lambda: scales.write_text(scales.read_text().replace("1", "3")), "damaged: encoding/num"),
        (lambda: manifest.write_text(manifest.read_text()[:-9]), "cannot be read"),
        (lambda: manifest.write_text(manifest.read_text().replace(*other_version)), "another version"),
    ):
        damage()
        with pytest.raises(UserError, match=said):
            PreparedLog.open(log.directory)
        assert prepare([path]).split("train").rows == log.manifest.rows["train"]


def test_a_full_disk_is_foreseen(
    clicks: Columns, write_csv: WriteCsv, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(user_cache())
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"needs about 0.00 GiB of disk, 0.00 GiB are free"):
        prepare([write_csv(clicks)])
    assert list(user_cache().iterdir()) == []


def run(script: str, *arguments: Path, **popen: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(prepare_module.__file__).parents[3])}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, **popen)


def test_a_disk_that_fills_up(clicks: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the kernel refuses to write on."""
    script = """
        import sys
        from pathlib import Path
        from dhen.errors import UserError
        from trials.data.prepare.prepare_log import prepare
        try:
            prepare([Path(sys.argv[1])], out=Path(sys.argv[2]))
        except UserError as error:
            sys.exit(f"user: {error}")
    """

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = run(script, write_csv(clicks), tmp_path / "out", preexec_fn=limit)
    assert done.stderr.startswith("user: "), done.stderr
    assert "GiB of disk" in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.csv"]


def test_a_killed_process_leaves_nothing_that_looks_finished(
    clicks: Columns, write_csv: WriteCsv, tmp_path: Path
) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from trials.data.prepare.prepare_log import prepare
        die = lambda step, done, total: step == "writing" and os.kill(os.getpid(), signal.SIGKILL)
        prepare([Path(sys.argv[1])], out=Path(sys.argv[2]), progress=die)
    """
    path, out = write_csv(clicks), tmp_path / "out"
    assert run(script, path, out).returncode == -signal.SIGKILL
    assert not out.exists()
    assert list(tmp_path.glob(".out.*.partial"))
    assert prepare([path], out=out).directory == out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.csv", "out"]


def test_two_processes_prepare_one_log_once(clicks: Columns, write_csv: WriteCsv, tmp_path: Path) -> None:
    script = """
        import multiprocessing, sys
        from pathlib import Path
        from trials.data.prepare.prepare_log import prepare

        def work(path, out, results):
            steps = []
            prepare([Path(path)], out=Path(out), progress=lambda step, done, total: steps.append(step))
            results.put(len(steps))

        if __name__ == "__main__":
            context = multiprocessing.get_context("fork")
            results = context.SimpleQueue()
            both = [context.Process(target=work, args=(*sys.argv[1:], results)) for _ in range(2)]
            for process in both:
                process.start()
            print(sorted(results.get() for _ in both))
    """
    done = run(script, write_csv(clicks), tmp_path / "out")
    assert done.stdout.strip() == "[0, 3]", done.stderr
    assert PreparedLog.open(tmp_path / "out").split("train").rows == 480
