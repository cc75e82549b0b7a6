"""Logs without time stamps: whether they are split by order or at random is decided once all rows are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhen.errors import UserError
from search.log_config import set_override
from trials.data.log_schema import SPLITS
from trials.data.prepare import splits
from trials.data.prepare.prepare_log import prepare
from trials.data.prepared_log import PreparedLog
from trials.data.raw import readers
from trials.data.read_options import ReadOptions
from trials.data.schema_yaml import read_schema

Columns = dict[str, list[Any]]
WriteCsv = Callable[..., Path]
ROWS = 600


def unsorted(seed: int = 0) -> Columns:
    rng = np.random.default_rng(seed)
    return {
        "click": (rng.random(ROWS) < 0.2).astype(int).tolist(),
        "user_id": rng.integers(0, 90, ROWS).tolist(),
        "country": rng.choice(["NL", "DE", "FR"], ROWS).tolist(),
        "price": rng.normal(size=ROWS).round(4).tolist(),
    }


def with_column(name: str, values: list[Any]) -> Columns:
    return unsorted() | {name: values}


CASES = {
    "nothing is sorted": (unsorted(), "order", None),
    "the label, up": (with_column("click", [0] * 450 + [1] * 150), "random", "sorted by its label 'click'"),
    "the label, down": (with_column("click", [1] * 150 + [0] * 450), "random", "sorted by its label 'click'"),
    "numbers as text": (with_column("user_id", sorted(unsorted()["user_id"])), "random", "by 'user_id'"),
    "letters": (with_column("country", ["DE"] * 99 + [""] + ["FR"] * 500), "random", "by 'country'"),
    "numbers": (with_column("price", sorted(unsorted()["price"])[::-1]), "random", "sorted by 'price'"),
    "a counter of rows": (with_column("visits", list(range(7, ROWS + 7))), "order", None),
    "a day that rises": (
        with_column("day", np.repeat(np.arange(20), 30).tolist()) | {"user_id": sorted(unsorted()["user_id"])},
        "order",
        "'day' rises along it",
    ),
    "a day that falls": (with_column("day", np.repeat(np.arange(20), 30)[::-1].tolist()), "random", "by 'day'"),
    "one late value": (with_column("flag", ["a"] * (ROWS - 1) + ["b"]), "order", None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_all_rows_decides(
    name: str, write_csv: WriteCsv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1024)
    columns, by, why = CASES[name]
    path, out = write_csv(columns), tmp_path / "out"
    log = prepare([path], out=out)
    assert log.schema.split.by == by
    said = [note for note in log.notes if note.startswith("rows are split")]
    if why is None:
        assert not said
    else:
        other = "random" if by == "order" else "order"
        assert why in said[0]
        assert f"split.by={other}" in said[0]
    assert f"by: auto, validation: 0.1, test: 0.1}}  # {by}" in (out / "schema.yaml").read_text()


def found_again(log: PreparedLog, *arguments: Any, **more: Any) -> bool:
    """Whether a log is opened and not built anew: its files are as old as they were."""
    before = (log.directory / "manifest.json").stat().st_mtime_ns
    return (
        prepare(*arguments, **more).directory == log.directory
        and (log.directory / "manifest.json").stat().st_mtime_ns == before
    )


def test_a_decided_log_is_found_again(write_csv: WriteCsv, tmp_path: Path) -> None:
    path, out = write_csv(CASES["numbers"][0]), tmp_path / "out"
    cached, written = prepare([path]), prepare([path], out=out)
    assert found_again(cached, [path])
    assert found_again(cached, [path], schema=read_schema(out / "schema.yaml"))
    assert found_again(written, [path], out=out)
    assert found_again(written, [out])
    given = prepare([path], options=ReadOptions.model_validate({"split": {"by": "random"}}))
    assert given.fingerprint == cached.fingerprint == written.fingerprint
    assert not any(note.startswith("rows are split") for note in given.notes)


def test_the_first_rows_of_one_class_decide(write_csv: WriteCsv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "HEAD_ROWS", 200)
    columns = unsorted()
    columns["click"][:200] = [0] * 200
    log = prepare([write_csv(columns)])
    assert log.schema.split.by == "random"
    assert any("its first 200 rows are of one class" in note for note in log.notes)


def prices(log: PreparedLog) -> dict[str, list[float]]:
    return {
        name: log.encoding.numbers("price", np.asarray(log.split(name).inputs.numeric)).round(3).tolist()
        for name in SPLITS
    }


def test_random_follows_from_file_and_row_alone(
    write_csv: WriteCsv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ReadOptions.model_validate({"split": {"by": "random", "validation": 0.25}})
    first, second = write_csv(unsorted(), "first.csv"), write_csv(unsorted(1), "second.csv")
    whole = prepare([first, second], options=options)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 1024)
    renamed = second.rename(tmp_path / "renamed.csv")
    tiny = prepare([first, renamed], options=options, out=tmp_path / "tiny")
    assert prices(tiny) == prices(whole)
    assert whole.manifest.rows == {"train": 780, "validation": 300, "test": 120}
    # neither file is a copy of the other's split, and each has rows in every part
    alone = prepare([first], options=options)
    shared = [set(prices(alone)[name]) & set(prices(whole)[name]) for name in SPLITS]
    assert [len(rows) for rows in shared] == pytest.approx([390, 150, 60], rel=0.25)


def test_random_cuts_what_no_list_names(write_csv: WriteCsv) -> None:
    files = [write_csv(unsorted(seed), f"{seed}.csv") for seed in range(2)]
    options = ReadOptions.model_validate({"split": {"by": "random", "test": ["1.csv"], "validation": 0.2}})
    assert prepare(files, options=options).manifest.rows == {"train": 480, "validation": 120, "test": 600}


@pytest.mark.parametrize(
    ("clicks", "words"),
    [
        ([540], None),
        ([1, 2], None),
        ([1, 300, 590], "split.by=order split.validation=0.3 split.test=0.3"),
        ([*range(100)], "split.by=random split.validation=0.1 split.test=0.1"),
    ],
)
def test_a_split_that_was_tried_is_proposed(
    clicks: list[int], words: str | None, write_csv: WriteCsv
) -> None:
    columns = unsorted() | {"click": [int(row in clicks) for row in range(ROWS)]}
    path = write_csv(columns)
    with pytest.raises(UserError, match="normalized entropy needs both classes") as raised:
        prepare([path], options=ReadOptions.model_validate({"split": {"by": "order"}}))
    said = str(raised.value)
    assert f"Of the log's 600 rows {len(clicks)} are clicks: " in said
    if words is None:
        assert f"With {len(clicks)} clicks, no split has one in each part" in said
        return
    assert said.endswith(f"{words}.")
    proposed: dict[str, Any] = {}
    for word in words.split():
        set_override(proposed, word)
    prepared = prepare([path], options=ReadOptions.model_validate(proposed))
    assert all(0 < rate < 1 for rate in prepared.manifest.base_rate.values())
    assert re.search(r"\d+ in train, \d+ in validation, \d+ in test", said)
