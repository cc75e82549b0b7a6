"""Users and items of the demo log recur, come and go, and mean what the settings say; nothing else moves."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dhen.errors import UserError
from dhen.values import parse
from trials.data.demo.examples import Examples, Floats, Ints, draw_examples
from trials.data.demo.spec import DemoLog
from trials.data.demo.teacher import Teacher, variance_shares
from trials.data.demo.visits import with_visits
from trials.data.demo.write import generate

ROWS = 70_000  # more than one group of rows
RECURRING = DemoLog(rows=ROWS, seed=3, users=2_000, items=300, own=0.1, affinity=0.5)
DRIFTING = RECURRING.replace(lifetime_days=3.0, turn_days=5.0)
PLAIN_SHA256 = "fee0dc8945b18a7867a38565ded41dfe098c84dda55503ac61ba39f9eed7a473"
"""Hash of the first 5,000 rows of the log as it was before there were users and items."""
DAY = 86_400


def table_of(spec: DemoLog, folder: Path) -> pa.Table:
    return pq.read_table(generate(spec, folder / "log.parquet"))


@pytest.fixture(scope="module")
def recurring(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return table_of(RECURRING, tmp_path_factory.mktemp("recurring"))


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    return table_of(DRIFTING, tmp_path_factory.mktemp("drifting"))


def visits_on(spec: DemoLog, teacher: Teacher, day: float, ids: dict[str, Ints]) -> Examples:
    """Examples at one moment, alike but for their user and item."""
    size = len(next(iter(ids.values())))
    alike = draw_examples(np.random.default_rng(0), teacher.drift, spec.base_rate, np.zeros(1))
    return Examples(
        seconds_B=np.full(size, round(day * DAY)),
        ids={name: np.repeat(values, size) for name, values in alike.ids.items()} | ids,
        bags={
            name: (np.tile(values, size), np.arange(size + 1) * len(values))
            for name, (values, _) in alike.bags.items()
        },
        counts={name: np.repeat(values, size) for name, values in alike.counts.items()},
    )


def id_logits(spec: DemoLog, teacher: Teacher, day: float, ids: dict[str, Ints]) -> Floats:
    parts = teacher.by_order(visits_on(spec, teacher, day, ids))
    return np.sum([parts[order] for order in ("own", "affinity") if order in parts], axis=0)


def content_hash(table: pa.Table) -> str:
    """A hash of every value, with probabilities to nine digits: the last one differs between CPUs."""
    oracle = table["oracle_probability"].to_numpy().round(9).tobytes()
    rest = table.drop_columns(["oracle_probability"])
    texts = repr([rest[name].to_pylist() for name in rest.column_names])
    return hashlib.sha256(texts.encode() + oracle).hexdigest()


def test_the_log_without_users_and_items_is_what_it_always_was(tmp_path: Path) -> None:
    path = generate(DemoLog(rows=5_000), tmp_path / "plain.parquet")
    assert content_hash(pq.read_table(path)) == PLAIN_SHA256
    assert pq.read_schema(path).metadata[b"demo_log"] == (
        b'{"base_rate": 0.22, "generator": 1, "logit_deviation": 1.75, "rows": 5000, "seed": 0, "shares": '
        b'{"drift": 0.05, "first": 0.25, "fourth": 0.15, "second": 0.3, "third": 0.25}}'
    )


def test_the_other_columns_are_those_of_the_log_without_users_and_items(
    recurring: pa.Table, tmp_path: Path
) -> None:
    plain = table_of(DemoLog(rows=ROWS, seed=3), tmp_path)
    shared = [name for name in plain.column_names if name not in ("label", "oracle_probability")]
    assert recurring.select(shared).equals(plain.select(shared))
    assert recurring.column_names == [*plain.column_names[:-1], "user", "item", "oracle_probability"]


def test_users_and_items_recur_as_often_as_there_are_few_of_them(recurring: pa.Table) -> None:
    for name, number in (("user", RECURRING.users), ("item", RECURRING.items)):
        counts = pc.value_counts(recurring[name]).field("counts").to_numpy()
        assert len(counts) == number
        assert recurring[name].null_count == 0
        expected = ROWS / number
        assert counts.std() == pytest.approx(np.sqrt(expected), rel=0.15), "all come equally often"
        assert counts.min() > expected - 5 * np.sqrt(expected)


def test_most_of_a_million_users_come_once_or_twice(tmp_path: Path) -> None:
    rare = table_of(DemoLog(rows=200_000, users=200_000), tmp_path)  # as a million of each
    counts = pc.value_counts(rare["user"]).field("counts").to_numpy()
    poisson = np.exp(-1) / np.array([1, 2, 6])
    for times, share in zip((1, 2, 3), poisson / (1 - np.exp(-1)), strict=True):
        assert (counts == times).mean() == pytest.approx(share, abs=0.01)
    assert (counts <= 2).mean() > 0.85


def test_popularity_is_the_exponent_of_how_often_they_come(tmp_path: Path) -> None:
    log = table_of(DemoLog(rows=ROWS, users=5_000, popularity=1.1), tmp_path)
    counts = np.sort(pc.value_counts(log["user"]).field("counts").to_numpy())[::-1][:40]
    assert np.polyfit(np.log(np.arange(1, 41)), np.log(counts), 1)[0] == pytest.approx(-1.1, abs=0.1)


@pytest.mark.parametrize("spec", [RECURRING, DRIFTING], ids=["recurring", "drifting"])
def test_own_effects_and_affinity_have_the_shares_asked_for(spec: DemoLog) -> None:
    left = {order: 0.4 * share for order, share in spec.shares.to_dict().items()}
    assert variance_shares(spec) == pytest.approx(left | {"own": 0.1, "affinity": 0.5}, abs=0.03)


@pytest.mark.parametrize("log", ["recurring", "drifting"])
def test_the_floor_is_the_entropy_of_the_probabilities(log: str, request: pytest.FixtureRequest) -> None:
    table = request.getfixturevalue(log)
    label, oracle = table["label"].to_numpy(), table["oracle_probability"].to_numpy()
    loss = -np.where(label == 1, np.log(oracle), np.log1p(-oracle))
    expected = -(oracle * np.log(oracle) + (1 - oracle) * np.log1p(-oracle))
    assert loss.mean() == pytest.approx(expected.mean(), abs=4.5 * (loss - expected).std() / np.sqrt(ROWS))
    assert oracle.mean() == pytest.approx(RECURRING.base_rate, abs=0.01)
    for part in np.array_split(np.argsort(oracle), 10):
        error = np.sqrt((oracle[part] * (1 - oracle[part])).sum()) / len(part)
        assert label[part].mean() == pytest.approx(oracle[part].mean(), abs=4.5 * error)


def test_affinity_has_the_rank_asked_for() -> None:
    """All logits of users by items, less their rows' and columns' means, are a matrix of this rank."""
    spec = RECURRING.replace(rank=3)
    teacher = Teacher.draw(spec)
    user, item = np.divmod(np.arange(40 * 30), 30)
    logit_UI = id_logits(spec, teacher, 0, {"user": user, "item": item}).reshape(40, 30)
    rest_UI = logit_UI - logit_UI.mean(axis=0) - logit_UI.mean(axis=1, keepdims=True) + logit_UI.mean()
    strengths = np.linalg.svd(rest_UI, compute_uv=False)
    assert strengths[2] > 0.1 * strengths[0]
    assert strengths[3] < 1e-6 * strengths[0]


def test_users_come_and_go(drifting: pa.Table) -> None:
    seconds = drifting["timestamp"].to_numpy().astype("datetime64[s]").astype(int)
    user = pc.dictionary_encode(drifting["user"].combine_chunks()).indices.to_numpy()
    first, last = np.full(user.max() + 1, seconds.max()), np.zeros(user.max() + 1, dtype=int)
    np.minimum.at(first, user, seconds)
    np.maximum.at(last, user, seconds)
    assert (last - first).max() <= 3 * DAY
    assert np.median((last - first)[np.bincount(user) > 10]) > 2 * DAY
    days = (seconds - seconds[0]) // DAY
    assert not set(user[days == 0]) & set(user[days == 4]), "none of the first day is there on the fifth"
    new = [np.isin(user[days == day], user[days < day], invert=True).mean() for day in (2, 5, 8)]
    assert all(share > 0.05 for share in new), "every day has rows of users whom no earlier day has"
    at_noon = ((first <= 5.5 * DAY + seconds[0]) & (last >= 5.5 * DAY + seconds[0])).sum()
    assert 0.75 * 2000 < at_noon <= 2000, "as many at a time as asked for, but for those yet to be seen"


def test_users_all_stay_where_no_lifetime_is_given(recurring: pa.Table) -> None:
    half = ROWS // 2
    early, late = (set(recurring["user"].slice(at, half).to_pylist()) for at in (0, half))
    assert early == late


def test_effects_turn_into_others_and_then_into_their_opposites() -> None:
    spec = RECURRING.replace(turn_days=4.0)
    teacher, rng = Teacher.draw(spec), np.random.default_rng(1)
    ids = {"user": rng.integers(0, 2000, 4000), "item": rng.integers(0, 300, 4000)}
    start, soon, turned, reversed_ = (id_logits(spec, teacher, day, ids) for day in (0, 0.5, 4, 8))
    assert np.corrcoef(start, soon)[0, 1] > 0.95
    assert abs(np.corrcoef(start, turned)[0, 1]) < 0.15
    assert np.corrcoef(start, reversed_)[0, 1] < -0.95
    assert turned.std() == pytest.approx(start.std(), rel=0.1), "the log's floor stays where it is"
    still = Teacher.draw(RECURRING)
    np.testing.assert_array_equal(id_logits(RECURRING, still, 0, ids), id_logits(RECURRING, still, 8, ids))


def test_an_items_click_rate_moves_with_time_where_effects_turn(tmp_path: Path) -> None:
    """What is seen in the log itself: rates by item early and late agree only where nothing moves."""
    spec = DemoLog(rows=ROWS, items=50, own=0.6)
    agree = []
    for turn_days in (None, 5.0):
        log = table_of(spec.replace(turn_days=turn_days), tmp_path)
        item = pc.dictionary_encode(log["item"].combine_chunks()).indices.to_numpy()
        label = log["label"].to_numpy().astype(float)
        early, late = (
            np.bincount(item[part], label[part]) / np.bincount(item[part])
            for part in (slice(None, ROWS // 10), slice(-ROWS // 10, None))
        )
        agree.append(np.corrcoef(early, late)[0, 1])
    assert agree[0] > 0.9
    assert agree[1] < 0


def test_fewer_ids_take_nothing_that_labels_follow_from(tmp_path: Path) -> None:
    spec = DemoLog(rows=5_000, seed=3)
    full, fewer = table_of(spec, tmp_path), table_of(spec.replace(most_ids=150), tmp_path)
    for name in ("label", "oracle_probability", "C1", "C4"):
        assert fewer[name].equals(full[name])
    assert len(full["C2"].unique()) > 500
    assert 130 < len(fewer["C2"].unique()) <= 150
    assert fewer["C3"].null_count == full["C3"].null_count > 0
    assert 130 < len(pc.list_flatten(fewer["M2"]).unique()) <= 150


def test_users_and_items_can_be_the_only_inputs(tmp_path: Path) -> None:
    whole = RECURRING.replace(own=0.1, affinity=0.9)
    alone = table_of(whole.replace(visits_alone=True), tmp_path)
    assert alone.column_names == ["label", "timestamp", "user", "item", "oracle_probability"]
    (tmp_path / "whole").mkdir()
    assert alone.equals(table_of(whole, tmp_path / "whole").select(alone.column_names))
    assert "I13" not in (tmp_path / "_README_log.txt").read_text(encoding="utf-8")


def test_examples_of_a_seed_have_the_same_visits_again() -> None:
    examples = draw_examples(
        np.random.default_rng(0), Teacher.draw(RECURRING).drift, 0.22, np.linspace(0, 1, 500)
    )
    first, again, other = (with_visits(RECURRING, examples, stream).ids["user"] for stream in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"affinity": 0.5}, "affinity is about users and items: give users=, items= or both"),
        ({"turn_days": 2}, "turn_days is about users and items"),
        ({"users": 10, "affinity": 0.5}, "give both users= and items="),
        ({"users": 10, "items": 5, "own": 0.5, "affinity": 0.6}, "at most 1 together, received 1.1"),
        ({"users": 5_000_000, "lifetime_days": 0.5}, "105,000,000 users or items would come and go"),
        (
            {"users": 9, "items": 5, "own": 0.5, "visits_alone": True},
            "add up to 1, such as .* received 0.5 and 0",
        ),
        ({"visits_alone": True}, "visits_alone is about users and items"),
        ({"users": -1}, "users"),
    ],
)
def test_settings_that_cannot_be_are_explained(data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(DemoLog, data, "demo")
