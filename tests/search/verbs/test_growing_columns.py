"""`train --from-weights growing.columns=`: it begins with exactly the bundle's scores, whichever tables grow.

Rates of 1e-30 change no weight, so that the bundle which is written has the scores that training began with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run, write_log
from safetensors.torch import load_file

from search.bundles.bundle import Member, read_bundle, write_bundle
from trials.data.prepared_log import PreparedLog

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "model: {family: dhen, embedding_dim: 4, layers: [{modules: [{kind: dlrm}, {kind: linear}]}]}"
GROWN = "table: {growing: {capacity: 40, evict: lru}}"
FIXED = "min_count: 2, hash_buckets: auto"
KEYS = "features.growing.keys"
AT_START = (
    "--from-weights",
    *("training.epochs=1", "training.learning_rate=1e-30", "training.embedding_learning_rate=1e-30"),
)
ALL = "growing.columns=[site,user,tags]"
NONE = "growing.columns=[]"


@pytest.fixture(scope="module")
def raw(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log's rows, and rows whose site, user and tags are unknown, missing, or both among others."""
    header, *rows = click_log.read_text().splitlines()
    cells = [row.split(",") for row in rows[:9]]
    odd = [
        [*row[:2], site, user, tags, *row[5:]]
        for row in cells
        for site in ("a", "nowhere", "")
        for user in ("u1", "nobody", "")
        for tags in ("x|y", "x|new", "new", "")
    ]
    path = tmp_path_factory.mktemp("raw") / "raw.csv"
    path.write_text("\n".join([header, *rows, *(",".join(row) for row in odd)]) + "\n")
    return path


@pytest.fixture(scope="module")
def static(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    (folder / "model.yaml").write_text(MODEL)
    words = ("--data", click_log, "--out", folder / "bundle", "training.epochs=1")
    dhen_search("train", folder / "model.yaml", *words)
    return folder / "bundle"


def log_with(dhen_search: Run, click_log: Path, folder: Path, *tables: str) -> Path:
    """The log prepared with these kinds of tables for site, user and tags."""
    dhen_search("prepare", click_log, "--out", folder / "inferred")
    first, *others = (folder / "inferred" / "schema.yaml").read_text().split(FIXED)
    (folder / "log").mkdir()
    schema = first + "".join(f"{table}{rest}" for table, rest in zip(tables, others, strict=True))
    (folder / "log" / "schema.yaml").write_text(schema)
    dhen_search("prepare", click_log, "--out", folder / "log")
    return folder / "log"


@pytest.fixture(scope="module")
def growing_log(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log prepared with growing tables of users and tags."""
    return log_with(dhen_search, click_log, tmp_path_factory.mktemp("growing"), FIXED, GROWN, GROWN)


@pytest.fixture(scope="module")
def grown(dhen_search: Run, growing_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    (folder / "model.yaml").write_text(MODEL)
    words = ("--data", growing_log, "--out", folder / "bundle", "training.epochs=1")
    dhen_search("train", folder / "model.yaml", *words)
    return folder / "bundle"


def scores(dhen_search: Run, bundle: Path, raw: Path, out: Path) -> str:
    dhen_search("predict", bundle, "--data", raw, "--out", out)
    return out.read_text()


def same_scores(dhen_search: Run, one: Path, other: Path, raw: Path, folder: Path) -> bool:
    before, after = (scores(dhen_search, bundle, raw, folder / "scores.csv") for bundle in (one, other))
    return before == after


def grows(bundle: Path) -> list[str]:
    return [table.name for table in read_bundle(bundle).encoding.features.growing]


def test_static_tables_grow_and_every_row_keeps_its_score(
    dhen_search: Run, static: Path, raw: Path, click_log: Path, tmp_path: Path
) -> None:
    growing, tags, back = tmp_path / "growing", tmp_path / "tags", tmp_path / "back"
    words = ("--data", click_log, *AT_START)
    dhen_search("train", static, *words, "--out", growing, ALL)
    assert same_scores(dhen_search, static, growing, raw, tmp_path)
    assert grows(growing) == ["site", "user", "tags"]
    site = read_bundle(growing).encoding.schema.growing("site")
    assert site is not None
    assert site.capacity == 2 * 9  # eight sites and the missing one, and as many again
    dhen_search("train", growing, *words, "--out", tags, "growing.columns=[tags]")
    assert same_scores(dhen_search, static, tags, raw, tmp_path)
    assert grows(tags) == ["tags"]
    dhen_search("train", tags, *words, "--out", back, NONE)
    assert same_scores(dhen_search, static, back, raw, tmp_path)
    rows = {table.name: table.rows for table in read_bundle(back).encoding.features.tables}
    assert rows == {table.name: table.rows for table in read_bundle(static).encoding.features.tables}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "growing", "scores.csv", "tags"]


def test_growing_tables_become_static_and_every_row_keeps_its_score(
    dhen_search: Run, grown: Path, raw: Path, click_log: Path, tmp_path: Path
) -> None:
    fixed, growing = tmp_path / "fixed", tmp_path / "growing"
    words = ("--data", click_log, *AT_START)
    dhen_search("train", grown, *words, "--out", fixed, NONE)
    assert same_scores(dhen_search, grown, fixed, raw, tmp_path)
    assert KEYS not in load_file(fixed / "weights.safetensors")
    assert grows(fixed) == []
    dhen_search("train", fixed, *words, "--out", growing, "growing.columns=[user]", "growing.admit_after=255")
    assert same_scores(dhen_search, grown, growing, raw, tmp_path)
    assert grows(growing) == ["user"]


def test_tables_that_begin_to_grow_take_new_ids_in(dhen_search: Run, static: Path, tmp_path: Path) -> None:
    later, out = tmp_path / "later.csv", tmp_path / "out"
    later.write_text(write_log(tmp_path / "log.csv", 3000, seed=3).read_text().replace(",u1,", ",new,"))
    words = ("--data", later, "--out", out, "training.epochs=1")
    rules = ("growing.columns=[user]", "growing.capacity=300", "growing.evict=lru", "growing.ttl=6h")
    dhen_search("train", static, "--from-weights", *words, *rules, "training.order=log")
    vocabulary = read_bundle(static).encoding.vocabularies["user"]
    assert int(load_file(out / "weights.safetensors")[KEYS].count_nonzero()) > 0
    rule = read_bundle(out).encoding.schema.growing("user")
    assert rule is not None
    assert (rule.capacity, rule.evict, rule.ttl, rule.missing) == (300, "lru", "6h", "own")
    keys = set(read_bundle(out).model().features.growing.held(0)[0].tolist())
    assert keys - set(vocabulary.hashes.view("int64").tolist())


def test_a_member_of_an_average_keeps_its_scores(
    dhen_search: Run, grown: Path, growing_log: Path, click_log: Path, raw: Path, tmp_path: Path
) -> None:
    small, average, fixed = (tmp_path / name for name in ("small", "average", "fixed"))
    words = ("--data", growing_log, "--out", small, "seed=1", "model.capacity_share=0.5")
    dhen_search("train", grown, *words)
    bundles = [read_bundle(grown), read_bundle(small)]
    members = tuple(Member(trial=0, job=bundle.job()) for bundle in bundles)
    flops = sum(bundle.info.flops for bundle in bundles)
    info = bundles[0].info.replace(job=None, members=members, flops=flops)
    files = [bundle.weights() for bundle in bundles]
    assert [len(load_file(file)[KEYS]) for file in files] == [81, 41]
    write_bundle(average, info, files, PreparedLog.open(growing_log))
    words = ("--data", click_log, *AT_START)
    dhen_search("train", average, "--member", 1, *words, "--out", fixed, NONE)
    assert same_scores(dhen_search, small, fixed, raw, tmp_path)
    again = ("train", fixed, *words, "--out", tmp_path / "again", "growing.columns=[user]")
    assert "capacity_share=0.5" in dhen_search(*again, "growing.capacity=30", code=2).stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from-weights", "growing.columns=[usr]"], "Did you mean 'user'"),
        (["--from-weights", "growing.columns=[user]", "growing.capacity=3"], "is less than the"),
        (["--from-weights", NONE, "growing.capacity=30"], "growing tables need a capacity"),
        (["--from-weights", "growing.capacity=30"], "growing tables need a capacity"),
        (["growing.columns=[user]"], "growing tables need a capacity"),
        ([NONE], "growing tables need a capacity"),
    ],
)
def test_what_cannot_be_is_said(
    dhen_search: Run, static: Path, click_log: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    told = dhen_search("train", static, "--data", click_log, "--out", tmp_path / "out", *words, code=2)
    assert says in " ".join(told.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_rule_without_a_column_that_begins_to_grow_is_refused(
    dhen_search: Run, grown: Path, click_log: Path, tmp_path: Path
) -> None:
    words = ("--data", click_log, "--from-weights", "--out", tmp_path / "out")
    rule = ("growing.columns=[user,tags]", "growing.capacity=90")
    assert "none of growing.columns does" in dhen_search("train", grown, *words, *rule, code=2).stderr


def test_lengths_that_follow_from_rows_are_kept(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    config, bundle, growing = tmp_path / "model.yaml", tmp_path / "bundle", tmp_path / "growing"
    config.write_text(MODEL.replace("embedding_dim: 4", "embedding_dim: 16, table_dim_exponent: 0.3"))
    dhen_search("train", config, "--data", click_log, "--out", bundle, "training.epochs=1")
    words = ("train", bundle, "--data", click_log, *AT_START, "--out", growing, "growing.columns=[user]")
    assert "table_dim_exponent=0.3" in dhen_search(*words, "growing.capacity=100000", code=2).stderr
    dhen_search(*words)
    assert same_scores(dhen_search, bundle, growing, click_log, tmp_path)


def test_hashed_columns_cannot_grow(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    config, bundle = tmp_path / "model.yaml", tmp_path / "bundle"
    config.write_text(MODEL)
    hashed = FIXED.replace("auto", "7")
    log = log_with(dhen_search, click_log, tmp_path, *[hashed] * 3)
    dhen_search("train", config, "--data", log, "--out", bundle, "training.epochs=1")
    words = ("--data", click_log, "--from-weights", "--out", tmp_path / "out", "growing.columns=[user]")
    assert "hashed into buckets" in dhen_search("train", bundle, *words, code=2).stderr
