"""`convert`: a bundle whose tables become growing ones, or static ones, scores every raw row as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run, write_log
from safetensors.torch import load_file

from search.bundles.bundle import Member, read_bundle, write_bundle
from trials.data.cache import PreparedLog

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = "model: {family: dhen, embedding_dim: 4, layers: [{modules: [{kind: dlrm}, {kind: linear}]}]}"
GROWN = "table: {growing: {capacity: 40, evict: lru}}"
FIXED = "min_count: 2, hash_buckets: auto"
KEYS = "features.growing.keys"


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


@pytest.fixture(scope="module")
def growing_log(dhen_search: Run, click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log prepared with growing tables of users and tags."""
    folder = tmp_path_factory.mktemp("growing")
    dhen_search("prepare", click_log, "--out", folder / "inferred")
    schema = (folder / "inferred" / "schema.yaml").read_text()
    assert schema.count(FIXED) == 3
    site, *others = schema.split(FIXED)
    (folder / "log").mkdir()
    (folder / "log" / "schema.yaml").write_text(f"{site}{FIXED}{GROWN.join(others)}")
    dhen_search("prepare", click_log, "--out", folder / "log")
    return folder / "log"


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


def test_static_tables_grow_and_every_row_keeps_its_score(
    dhen_search: Run, static: Path, raw: Path, click_log: Path, tmp_path: Path
) -> None:
    grows, back = tmp_path / "grows", tmp_path / "back"
    said = dhen_search("convert", static, "--tables", "growing", "--out", grows).stdout
    assert "user: " in said
    assert same_scores(dhen_search, static, grows, raw, tmp_path)
    growing = {table.name: table.growing for table in read_bundle(grows).encoding.features.growing}
    assert set(growing) == {"site", "user", "tags"}
    site = growing["site"]
    assert site is not None
    assert site.capacity == 2 * 9  # eight sites and the missing one, and as many again
    assert "within 0.0e+00" in dhen_search("verify", grows).stdout
    assert "another one" in dhen_search("verify", grows, "--data", click_log).stdout
    info = json.loads((grows / "bundle.json").read_text())
    assert info["converted"]["identity"] == read_bundle(static).version.identity
    assert (
        info["embedding_parameters"]
        > json.loads((static / "bundle.json").read_text())["embedding_parameters"]
    )
    dhen_search("convert", grows, "--tables", "static", "--out", back)
    assert same_scores(dhen_search, static, back, raw, tmp_path)
    rows = {table.name: table.rows for table in read_bundle(back).encoding.features.tables}
    assert rows == {table.name: table.rows for table in read_bundle(static).encoding.features.tables}


def test_growing_tables_become_static_and_every_row_keeps_its_score(
    dhen_search: Run, grown: Path, raw: Path, tmp_path: Path
) -> None:
    fixed, grows = tmp_path / "fixed", tmp_path / "grows"
    dhen_search("convert", grown, "--tables", "static", "--out", fixed)
    assert same_scores(dhen_search, grown, fixed, raw, tmp_path)
    assert KEYS not in load_file(fixed / "weights.safetensors")
    assert not read_bundle(fixed).encoding.features.growing
    assert "within 0.0e+00" in dhen_search("verify", fixed).stdout
    dhen_search("convert", fixed, "--tables", "growing", "--column", "user", "--out", grows)
    assert same_scores(dhen_search, grown, grows, raw, tmp_path)
    assert [table.name for table in read_bundle(grows).encoding.features.growing] == ["user"]


def test_what_was_converted_learns_new_ids(dhen_search: Run, static: Path, tmp_path: Path) -> None:
    later, grows, live = tmp_path / "later.csv", tmp_path / "grows", tmp_path / "live"
    later.write_text(write_log(tmp_path / "log.csv", 3000, seed=3).read_text().replace(",u1,", ",new,"))
    words = ("--tables", "growing", "--column", "user", "--capacity", 300)
    dhen_search("convert", static, *words, "--out", grows)
    dhen_search("online", grows, "--data", later, "--out", live)
    increments = read_bundle(live).increments
    assert sum(one.info.begun for one in increments) > 0
    fixed = tmp_path / "fixed"
    dhen_search("convert", live, "--tables", "static", "--out", fixed)
    assert same_scores(dhen_search, live, fixed, later, tmp_path)
    assert not same_scores(dhen_search, grows, fixed, later, tmp_path)
    assert read_bundle(fixed).version.number == 0
    folder = live / "increments" / "000001"
    assert "another bundle" in dhen_search("apply", fixed, folder, code=2).stderr
    dhen_search(
        "train", fixed, "--data", later, "--from-weights", "--out", tmp_path / "on", "training.epochs=1"
    )


def test_an_average_is_converted_whole(
    dhen_search: Run, grown: Path, growing_log: Path, raw: Path, tmp_path: Path
) -> None:
    """Of two networks, one of which has fewer rows, so that ids have a row in one and none in the other."""
    small, average, fixed, grows = (tmp_path / name for name in ("small", "average", "fixed", "grows"))
    words = ("--data", growing_log, "--out", small, "seed=1", "model.capacity_share=0.5")
    dhen_search("train", grown, *words)
    bundles = [read_bundle(grown), read_bundle(small)]
    members = tuple(Member(trial=0, job=bundle.job()) for bundle in bundles)
    flops = sum(bundle.info.flops for bundle in bundles)
    info = bundles[0].info.replace(job=None, members=members, flops=flops)
    files = [bundle.weights() for bundle in bundles]
    assert [len(load_file(file)[KEYS]) for file in files] == [81, 41]
    write_bundle(average, info, files, PreparedLog.open(growing_log))
    dhen_search("convert", average, "--tables", "static", "--out", fixed)
    assert same_scores(dhen_search, average, fixed, raw, tmp_path)
    dhen_search("verify", fixed)
    said = dhen_search(
        "convert", fixed, "--tables", "growing", "--capacity", 50, "--out", grows, code=2
    ).stderr
    assert "capacity_share=0.5" in said
    dhen_search("convert", fixed, "--tables", "growing", "--out", grows)
    assert same_scores(dhen_search, average, grows, raw, tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tables", "static"], "nothing to convert: no table of it grows"),
        (["--tables", "static", "--column", "user"], "its table is static already"),
        (["--tables", "growing", "--column", "usr"], "Did you mean 'user'"),
        (["--tables", "growing", "--capacity", "3"], "is less than the"),
        (["--tables", "growing", "--capacity", "0"], "capacity"),
        (["--tables", "static", "--capacity", "30"], "--capacity is of growing tables"),
        (["--tables", "hashed"], "growing"),
        ([], "--tables"),
    ],
)
def test_what_cannot_be_is_said(
    dhen_search: Run, static: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    assert says in dhen_search("convert", static, *words, "--out", tmp_path / "out", code=2).stderr
    assert not (tmp_path / "out").exists()


def test_the_bundle_itself_and_other_folders_stay(
    dhen_search: Run, static: Path, click_log: Path, tmp_path: Path
) -> None:
    words = ("--tables", "growing", "--out")
    assert "choose another --out" in dhen_search("convert", static, *words, static, code=2).stderr
    assert "is not a bundle" in dhen_search("convert", static, *words, click_log.parent, code=2).stderr
    dhen_search("verify", static)


def test_lengths_that_follow_from_rows_are_kept(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    config, bundle, grows = tmp_path / "model.yaml", tmp_path / "bundle", tmp_path / "grows"
    config.write_text(MODEL.replace("embedding_dim: 4", "embedding_dim: 16, table_dim_exponent: 0.3"))
    dhen_search("train", config, "--data", click_log, "--out", bundle, "training.epochs=1")
    words = ("--tables", "growing", "--column", "user")
    said = dhen_search("convert", bundle, *words, "--capacity", 100000, "--out", grows, code=2).stderr
    assert "table_dim_exponent=0.3" in said
    dhen_search("convert", bundle, *words, "--out", grows)
    assert same_scores(dhen_search, bundle, grows, click_log, tmp_path)


def test_hashed_columns_stay_as_they_are(dhen_search: Run, click_log: Path, tmp_path: Path) -> None:
    log, config, bundle = tmp_path / "log", tmp_path / "model.yaml", tmp_path / "bundle"
    config.write_text(MODEL)
    dhen_search("prepare", click_log, "--out", log)
    schema = (log / "schema.yaml").read_text()
    edited = schema.replace("hash_buckets: auto", "hash_buckets: 7")
    assert edited != schema
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "schema.yaml").write_text(edited)
    dhen_search("prepare", click_log, "--out", tmp_path / "other")
    dhen_search("train", config, "--data", tmp_path / "other", "--out", bundle, "training.epochs=1")
    words = ("convert", bundle, "--tables", "growing", "--out", tmp_path / "out")
    assert "nothing to convert" in dhen_search(*words, code=2).stderr
    assert "hashed into buckets" in dhen_search(*words, "--column", "user", code=2).stderr


def test_a_log_that_was_prepared_for_another_bundle_is_refused(
    dhen_search: Run, study: Path, tmp_path: Path
) -> None:
    """The ids of such a log name other rows of the tables."""
    other = write_log(tmp_path / "other.csv", 3000, seed=7)
    dhen_search("prepare", other, "--out", tmp_path / "prepared")
    for words in (("verify", study / "best"), ("slices", study / "best", "--column", "site")):
        said = dhen_search(*words, "--data", tmp_path / "prepared", code=2).stderr
        assert "was prepared in another encoding than that of" in " ".join(said.split())
    assert "another one" in dhen_search("verify", study / "best", "--data", other).stdout
