"""The demo log is what it claims to be: deterministic, Criteo-like, and its floor is honestly the floor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dhen.errors import UserError
from dhen.values import parse
from trials.data.demo import TIME, DemoLog
from trials.data.demo.generate import (
    CATEGORICAL,
    COUNTER,
    COUNTS,
    HEAD,
    MISSING,
    MISSING_IDS,
    MULTI_HOT,
    Examples,
    Floats,
    Teacher,
    generate,
)

ROWS = 70_000  # more than one group of rows
SPEC = DemoLog(rows=ROWS, seed=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(SPEC, tmp_path_factory.mktemp("demo") / "demo.parquet")


@pytest.fixture(scope="module")
def table(path: Path) -> pa.Table:
    return pq.read_table(path)


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(SPEC)


@pytest.fixture(scope="module")
def examples(teacher: Teacher) -> Examples:
    return teacher.draw_examples(np.random.default_rng(0), np.linspace(0, 1, 20_000))


def _labels(table: pa.Table) -> tuple[Floats, Floats]:
    return table["label"].to_numpy().astype(float), table["oracle_probability"].to_numpy()


def _entropy(p: Floats) -> Floats:
    entropy: Floats = -(p * np.log(p) + (1 - p) * np.log1p(-p))
    return entropy


def test_columns_and_rows(table: pa.Table) -> None:
    names = [
        "label",
        "timestamp",
        *(f"I{i}" for i in range(1, 14)),
        *(f"C{i}" for i in range(1, 27)),
        "M1",
        "M2",
    ]
    assert table.column_names == [*names, "oracle_probability"]
    assert len(table) == ROWS
    assert pa.types.is_timestamp(table.schema.field("timestamp").type)
    assert {table.schema.field(name).type for name in CATEGORICAL} == {pa.string()}


def test_another_seed_gives_another_world(table: pa.Table, tmp_path: Path) -> None:
    other = pq.read_table(generate(DemoLog(rows=1000, seed=4), tmp_path / "other.parquet"))
    assert not other["C1"].combine_chunks().equals(table["C1"].combine_chunks().slice(0, 1000))
    assert not np.allclose(_labels(other)[1], _labels(table)[1][:1000])


def test_the_teacher_depends_on_the_seed_not_on_the_rows(teacher: Teacher, examples: Examples) -> None:
    fewer, other = Teacher(DemoLog(rows=10, seed=3)), Teacher(DemoLog(rows=ROWS, seed=4))
    np.testing.assert_array_equal(fewer.logit(examples), teacher.logit(examples))
    assert abs(np.corrcoef(other.logit(examples), teacher.logit(examples))[0, 1]) < 0.5


@given(rows=st.integers(1, 300), seed=st.integers(0, 2**40))
@settings(max_examples=5)
def test_any_size_and_seed(tmp_path_factory: pytest.TempPathFactory, rows: int, seed: int) -> None:
    table = pq.read_table(
        generate(DemoLog(rows=rows, seed=seed), tmp_path_factory.mktemp("any") / "a.parquet")
    )
    label, oracle = _labels(table)
    assert len(table) == rows
    assert set(label) <= {0.0, 1.0}
    assert ((oracle > 0) & (oracle < 1)).all()


def test_labels_follow_their_probabilities(table: pa.Table) -> None:
    label, oracle = _labels(table)
    assert oracle.mean() == pytest.approx(SPEC.base_rate, abs=0.005)
    for part in np.array_split(np.argsort(oracle), 10):
        error = np.sqrt((oracle[part] * (1 - oracle[part])).sum()) / len(part)
        assert label[part].mean() == pytest.approx(oracle[part].mean(), abs=4.5 * error)


def test_the_floor_is_the_entropy_of_the_probabilities(table: pa.Table) -> None:
    label, oracle = _labels(table)
    loss = -np.where(label == 1, np.log(oracle), np.log1p(-oracle))
    expected = _entropy(oracle)
    assert loss.mean() == pytest.approx(expected.mean(), abs=4.5 * (loss - expected).std() / np.sqrt(ROWS))
    assert 0.65 < loss.mean() / _entropy(label.mean()) < 0.75


def test_the_logit_has_its_deviation_and_the_base_rate_asked_for() -> None:
    teacher = Teacher(DemoLog(seed=3, base_rate=0.1))
    logit = teacher.logit(teacher.draw_examples(np.random.default_rng(0), np.linspace(0, 1, 20_000)))
    assert logit.std() == pytest.approx(1.75, rel=0.05)
    assert (1 / (1 + np.exp(-logit))).mean() == pytest.approx(0.1, abs=0.01)


def test_popularity_follows_zipf(table: pa.Table) -> None:
    for name, (cardinality, exponent) in CATEGORICAL.items():
        if cardinality < 1000:
            continue
        counts = np.sort(pc.value_counts(table[name].drop_null()).field("counts").to_numpy())[::-1][:40]
        slope = np.polyfit(np.log(np.arange(1, 41)), np.log(counts), 1)[0]
        assert slope == pytest.approx(-exponent, abs=0.12), name


def test_ids_are_hex_texts_counts_heavy_tailed_and_as_many_are_missing_as_promised(table: pa.Table) -> None:
    sizes = {}
    for name, (cardinality, _) in CATEGORICAL.items():
        texts = table[name].drop_null().unique()
        sizes[name] = len(texts)
        assert len(texts) <= cardinality
        assert pc.all(pc.match_substring_regex(texts, "^[0-9a-f]{8}$")).as_py()
    assert (sizes["C1"], sizes["C4"], sizes["C2"] > 5_000) == (40, 4, True)
    for name in (*CATEGORICAL, *COUNTS):
        fraction = COUNTS[name][2] if name in COUNTS else MISSING_IDS.get(name, 0)
        assert table[name].null_count / ROWS == pytest.approx(fraction, abs=0.01), name
        assert (table[name].null_count > 0) == (fraction > 0), name
    counts = {name: table[name].drop_null().to_numpy() for name in COUNTS}
    assert all(values.min() >= 0 for values in counts.values())
    assert all((counts[name] == 0).mean() > 0.1 for name in ("I1", "I2", "I11", "I12"))
    assert counts["I2"].mean() > 5 * np.median(counts["I2"])
    for name in MULTI_HOT:
        lengths = pc.list_value_length(table[name]).to_numpy()
        assert (lengths.min(), lengths.max()) == (0, 10)
        assert (lengths == 0).mean() == pytest.approx(MISSING_IDS[name], abs=0.01)
    stamps = table["timestamp"].to_numpy()
    assert (np.diff(stamps) >= np.timedelta64(0)).all()
    assert len(np.unique(stamps.astype("datetime64[h]"))) == 240  # of ten days


def test_the_base_rate_drifts_and_the_counter_says_so(table: pa.Table) -> None:
    hours = table["timestamp"].to_numpy().astype("datetime64[h]").astype(int)
    days = hours // 24 - hours[0] // 24
    oracle, clicks = table["oracle_probability"].to_numpy(), table[COUNTER].to_numpy()
    by_day = np.bincount(days, oracle) / np.bincount(days)
    reported = np.bincount(days, clicks) / np.bincount(days)
    assert np.ptp(by_day) > 0.03
    assert np.corrcoef(by_day, reported)[0, 1] > 0.95
    by_hour = np.bincount(hours % 24, oracle) / np.bincount(hours % 24)
    assert np.ptp(by_hour) > 0.05


def test_what_the_logit_depends_on(teacher: Teacher, examples: Examples) -> None:
    """Time acts through the hour and the counter alone, rare ids share one effect, and missing is not zero."""
    logit_B, ids = teacher.logit(examples), {name: examples[name] for name in CATEGORICAL}
    next_day = {TIME: examples[TIME] + 86_400}
    rare = {name: np.where(ids_B >= HEAD, HEAD + ids_B % 7, ids_B) for name, ids_B in ids.items()}
    for same in (next_day, rare):
        np.testing.assert_array_equal(teacher.logit(examples | same), logit_B)
    next_hour = {TIME: examples[TIME] + 3_600}
    head = {name: np.where(ids_B >= HEAD, 0, ids_B) for name, ids_B in ids.items()}
    filled = {name: np.where(examples[name] == MISSING, 0, examples[name]) for name in COUNTS}
    for other, least in ((next_hour, 0.01), (head, 0.1), (filled, 0.1)):
        assert np.abs(teacher.logit(examples | other) - logit_B).max() > least


def test_the_file_says_that_it_is_generated_and_how(path: Path) -> None:
    metadata = pq.read_schema(path).metadata
    assert b"not a real click log" in metadata[b"description"]
    assert json.loads(metadata[b"demo_log"]).items() >= {"rows": ROWS, "seed": 3, "base_rate": 0.22}.items()


def test_a_file_of_equal_settings_is_reused_and_another_replaced(tmp_path: Path) -> None:
    target, calls = tmp_path / "new" / "folder" / "log.parquet", []
    for rows in (100, 100, 200):
        generate(DemoLog(rows=rows), target, progress=lambda *event: calls.append(event))
    assert calls == [("generate", 100, 100), ("generate", 200, 200)]
    assert pq.read_metadata(target).num_rows == 200


def test_what_is_no_demo_log_is_left_alone(tmp_path: Path) -> None:
    parquet, text = tmp_path / "mine.parquet", tmp_path / "mine.csv"
    pq.write_table(pa.table({"label": [0, 1]}), parquet)
    text.write_text("label,x\n0,1\n")
    for mine in (parquet, text, tmp_path):
        with pytest.raises(UserError, match="isn't marked as a demo log, so it is left alone"):
            generate(DemoLog(rows=10), mine)
    assert pq.read_table(parquet).column_names == ["label"]
    assert text.read_text() == "label,x\n0,1\n"


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(DemoLog(rows=10), tmp_path / "log.parquet", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        generate(DemoLog(rows=10), tmp_path / "file" / "log.parquet")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"rows": 0}, "rows"),
        ({"seed": -1}, "seed"),
        ({"base_rate": 1.0}, "base_rate"),
        ({"row": 5}, "Did you mean 'rows'"),
    ],
)
def test_bad_settings_are_explained(data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(DemoLog, data, "demo")
